"""One GPU's step times: held against stalls at chunks they were not fitted to, and the crossover they predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, kv_layout, runs, tables
from kvlab.analysis import calibrate, stalls, steps
from kvlab.analysis.calibrate import TAILS

#: the recording whose steps are fitted, then the others whose stalls they are held against
FITTED, OTHERS = "chunk_first/h200-steps", ("chunk_first/h200-one-gpu",)
LAYOUT, GAP_MS = "llama-3.1-8b", 50.0
#: chunk and median longest gap (ms) of a run that failed: known from data/chunk_first/SOURCE.md alone
KNOWN = (8192, 198.0)
RATES_GBPS = (25, 50, 100, 200, 400, 800)


def models() -> list[steps.Model]:
    """Fit the recorded steps: the estimate, then the draws; the transfer, not measured, gets the link's whole rate."""
    base = steps.with_layout(steps.PUBLISHED, kv_layout.load(LAYOUT))
    return calibrate.calibrate(runs.load(FITTED).table("steps"), base=base)


def _steps(m: steps.Model, chunk: int, prompt: int) -> tuple[float, float]:
    """Return the first and the longest step of a prompt; a chunk of several prompts' length holds that many."""
    size, whole = min(chunk, prompt), max(1, chunk // prompt)
    last = float(steps.step_ms(m, prompt - size, size))
    return float(steps.step_ms(m, 0, size)), whole * (last - m.fixed_ms) + m.fixed_ms


def stalls_told(fitted: Sequence[steps.Model]) -> pd.DataFrame:
    """Return a row a recording and chunk: the steps that the fit tells, first to longest, and what was measured.

    Columns: ``run``, ``chunk_tokens``, ``predicted`` (the longest step of a prompt), ``predicted_low`` (95 percent
    bound of the first), ``predicted_high`` (of the longest), ``p10``, ``median``, ``p90`` of the requests' longest
    gaps, ``all_median`` and ``all_p90`` of all gaps, ``ratio`` (median over predicted); in ms.
    """
    rows = []
    for name in (FITTED, *OTHERS):
        run = runs.load(name)
        frame, _ = stalls.load(run.table("requests"))
        gaps = run.table("requests").query("~warmup")[["chunk_tokens", "gaps_ms"]].explode("gaps_ms").astype(float)
        for chunk in sorted(set(frame["chunk_tokens"].astype(int))):
            longest = frame.loc[frame["chunk_tokens"] == chunk, "longest_gap_ms"].quantile([0.1, 0.5, 0.9])
            every = gaps.loc[gaps["chunk_tokens"] == chunk, "gaps_ms"].quantile([0.5, 0.9])
            rows.append((run.id.split("/")[-1], chunk, *longest, *every))
    rows.append(("not kept", KNOWN[0], np.nan, KNOWN[1], *[np.nan] * 3))
    told = pd.DataFrame(rows, columns=["run", "chunk_tokens", "p10", "median", "p90", "all_median", "all_p90"])
    prompt = int(runs.load(FITTED).manifest["parameters"]["prompt_tokens"])
    each = [np.array([_steps(m, chunk, prompt) for m in fitted]) for chunk in told["chunk_tokens"]]
    told["predicted"] = [e[0, 1] for e in each]
    told["predicted_low"], told["predicted_high"] = (
        [float(np.quantile(e[1:, i], TAILS[i])) for e in each] for i in (0, 1)
    )
    told["ratio"] = told["median"] / told["predicted"]
    return told.sort_values("chunk_tokens", ascending=False, kind="stable").reset_index(drop=True)


def stalls_table(told: pd.DataFrame) -> gt.GT:
    """Show predicted steps and measured longest gaps by chunk."""
    labels = {"run": "Recording", "chunk_tokens": "Chunk", "predicted_low": "Told: first step, low",
              "predicted": "Told: longest step", "predicted_high": "Told: longest, high", "p10": "Longest gap, p10",
              "median": "Longest gap, median", "p90": "Longest gap, p90", "ratio": "Median / told",
              "all_median": "All gaps, median", "all_p90": "All gaps, p90"}  # fmt: skip
    return tables.show(told, "gpu_stalls", title="Steps told by the fit, longest gaps measured (ms)", labels=labels,
                       decimals={k: int(k == "ratio") for k in labels if k != "run"},
                       note="Low and high: 95 % bounds. One prompt a step, at 8,192 two.")  # fmt: skip


def stalls_chart(told: pd.DataFrame) -> charts.Shown:
    """Draw the steps that the fit tells and the longest gaps measured, for each chunk."""
    case = [f"chunk {c:,}, {r}" for c, r in zip(told["chunk_tokens"], told["run"], strict=True)]
    names = {"steps told by the fit": ("predicted_low", "predicted", "predicted_high"),
             "longest gaps measured": ("p10", "median", "p90")}  # fmt: skip
    parts = [told[list(c)].set_axis(["low", "ms", "high"], axis=1).assign(arm=a, case=case) for a, c in names.items()]
    frame = pd.concat(parts)
    frame = frame.assign(low=frame["low"].fillna(frame["ms"]), high=frame["high"].fillna(frame["ms"]))
    caption = (
        "told: from the first step's lower 95 % bound to the longest's upper one, dot: the longest; measured: p10, "
        f"median, p90 of the requests; fitted to chunk 2,560 of {FITTED} alone; dummy weights"
    )
    chart = charts.points_with_interval(
        frame, charts.title("Longest gaps by chunk, and the steps that the fit tells", None, caption), x="ms",
        low="low", high="high", x_title="ms (log scale)", log=True,
    )  # fmt: skip
    return charts.show(chart, "gpu_stalls")


def stalls_said(told: pd.DataFrame) -> str:
    """Say how the fit did, computed from the rows."""
    inside = (told["median"] >= told["predicted_low"]) & (told["median"] <= told["predicted_high"])
    small, large = (told.loc[told["chunk_tokens"].map(f), "ratio"] for f in (lambda c: c < 2000, lambda c: c > 2000))
    return (
        f"The median longest gap lies among the steps told at {inside.sum()} of {len(told)}: it is "
        f"{small.min():.1f} to {small.max():.1f} times the longest step at chunks up to 1,024, "
        f"{large.min():.1f} to {large.max():.1f} times at 2,560 and 8,192."
    )


def crossovers(fitted: Sequence[steps.Model], ordinary_ms: float, rates: Sequence[float] = RATES_GBPS) -> pd.DataFrame:
    """Return where 1P1D pays by link rate: as fitted, and with an ordinary step's time as the fixed cost."""
    sets = {"as fitted": list(fitted)}
    sets[f"fixed cost {ordinary_ms:.1f} ms"] = [replace(m, fixed_ms=ordinary_ms) for m in fitted]
    rows = [
        {"arm": name, "gbps": r, **calibrate.crossover(ms, r, gap_ms=GAP_MS, grid=steps.GRID_TOKENS)}
        for name, ms in sets.items()
        for r in rates
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(("lower", "low", "high"), "Int64"))


def crossovers_table(found: pd.DataFrame) -> gt.GT:
    """Show the lower edge by link rate, with its interval."""
    labels = {"arm": "Fixed cost of a step", "gbps": "Link (Gbps)", "lower": "1P1D pays from (tokens)",
              "low": "Low (95 %)", "high": "High (95 %)", "never": "Draws in which never (%)"}  # fmt: skip
    most = f"{steps.GRID_TOKENS} up to {steps.MOST_TOKENS:,}"
    note = f"Gap limit {GAP_MS:g} ms, no TTFT limit; lengths by {most}; empty: none."
    return tables.show(found.assign(never=100 * found["never"]), "gpu_crossover", labels=labels, note=note,
                       title=f"Predicted for one GPU, KV of {LAYOUT}",
                       decimals={k: 0 for k in labels if k != "arm"})  # fmt: skip


def crossovers_chart(found: pd.DataFrame) -> charts.Shown:
    """Draw the lower edge by link rate; an interval that reaches the right end has draws that never pay."""
    most = steps.MOST_TOKENS
    frame = found.assign(
        case=[f"{r:g} Gbps" for r in found["gbps"]],
        text=[f"never in {n:.0%} of draws" if n else "" for n in found["never"]],
        **{c: found[c].astype(float).fillna(most) for c in ("low", "high")},
    )
    frame["lower"] = frame["lower"].astype(float)
    caption = (
        f"step times fitted to {FITTED}, KV of {LAYOUT}, the link's whole rate at once, low load, gap limit {GAP_MS:g} "
        f"ms; no dot: nowhere up to {most:,} tokens; bars: 95 %; a prediction that nobody measured"
    )
    chart = charts.points_with_interval(
        frame, charts.title("Where 1P1D would pay on this GPU, by link rate", None, caption), x="lower", low="low",
        high="high", x_title="1P1D pays from (tokens, log scale)", log=True, text="text",
    )  # fmt: skip
    return charts.show(chart, "gpu_crossover")
