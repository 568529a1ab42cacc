"""One GPU's step times: the fit, stalls under load held against it, and the crossover that it predicts."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, kv_layout
from kvlab.analysis import calibrate, stalls, steps
from kvlab.analysis.calibrate import TAILS
from kvlab.runs import Run
from kvlab.views import build

#: the recording whose steps are fitted, and whose stalls under load are held against the fit
FITTED = "chunk_first/h200-one-gpu"
LAYOUT, GAPS_MS = "llama-3.1-8b", (50.0, 30.0)
#: bootstrap draws of the fit; each is carried through to every crossover shown
DRAWS = 100
RATES_GBPS = (25, 50, 100, 200, 400, 800)


def models(run: Run, floor: bool = True) -> list[steps.Model]:
    """Fit the recorded steps: the estimate, then the draws; the transfer, not measured, gets the link's whole rate.

    :param floor: False fits costs that add up at every size, as the published model has them
    """
    base = steps.with_layout(steps.PUBLISHED, kv_layout.load(LAYOUT))
    table = run.table("steps")
    return calibrate.calibrate(table if floor else table.drop(columns="ordinary_ms"), base=base, draws=DRAWS)


def _steps(m: steps.Model, chunk: int, prompt: int) -> tuple[float, float]:
    """Return the first and the longest step of a prompt; a chunk of several prompts' length holds that many."""
    size, whole = min(chunk, prompt), max(1, chunk // prompt)
    last = float(steps.step_ms(m, prompt - size, size))
    return float(steps.step_ms(m, 0, size)), whole * (last - m.fixed_ms) + m.fixed_ms


def stalls_told(fitted: Sequence[steps.Model], run: Run) -> pd.DataFrame:
    """Return a row a chunk: the steps that the fit tells, first to longest, and the stalls measured under load.

    Columns: ``chunk_tokens``, ``predicted`` (the longest step of a prompt), ``predicted_low`` (95 percent bound of the
    first), ``predicted_high`` (of the longest), ``p10``, ``median``, ``p90`` of the requests' longest gaps,
    ``all_median`` and ``all_p90`` of all gaps, ``ratio`` (median over predicted); in ms.
    """
    rows = []
    frame, _ = stalls.load(run.table("requests"))
    gaps = run.table("requests").query("~warmup")[["chunk_tokens", "gaps_ms"]].explode("gaps_ms").astype(float)
    for chunk in sorted(set(frame["chunk_tokens"].astype(int)), reverse=True):
        longest = frame.loc[frame["chunk_tokens"] == chunk, "longest_gap_ms"].quantile([0.1, 0.5, 0.9])
        every = gaps.loc[gaps["chunk_tokens"] == chunk, "gaps_ms"].quantile([0.5, 0.9])
        rows.append((chunk, *longest, *every))
    told = pd.DataFrame(rows, columns=["chunk_tokens", "p10", "median", "p90", "all_median", "all_p90"])
    prompt = int(run.manifest["parameters"]["prompt_tokens"])
    each = [np.array([_steps(m, chunk, prompt) for m in fitted]) for chunk in told["chunk_tokens"]]
    told["predicted"] = [e[0, 1] for e in each]
    told["predicted_low"], told["predicted_high"] = (
        [float(np.quantile(e[1:, i], TAILS[i])) for e in each] for i in (0, 1)
    )
    return told.assign(ratio=told["median"] / told["predicted"])


def stalls_table(told: pd.DataFrame) -> gt.GT:
    """Show predicted steps and measured longest gaps by chunk."""
    columns = "chunk_tokens predicted_low predicted predicted_high p10 median p90 ratio all_median all_p90"
    title = "Steps told by the fit, longest gaps measured (ms)"
    note = "Low and high: 95 % bounds. One prompt a step, at 8,192 two."
    names = {"chunk_tokens": "Chunk", "ratio": "Median / told"}
    return build.table(told, "gpu_stalls", title, columns, note, {"ratio": 1}, **names)


def stalls_chart(told: pd.DataFrame) -> charts.Shown:
    """Draw the steps that the fit tells and the longest gaps measured, for each chunk."""
    case = [f"chunk {c:,}" for c in told["chunk_tokens"]]
    names = {"steps told by the fit": ("predicted_low", "predicted", "predicted_high"),
             "longest gaps measured": ("p10", "median", "p90")}  # fmt: skip
    parts = [told[list(c)].set_axis(["low", "ms", "high"], axis=1).assign(arm=a, case=case) for a, c in names.items()]
    caption = (
        "told: from the first step's lower 95 % bound to the longest's upper one, dot: the longest; measured: p10, "
        f"median, p90 of the requests; steps and stalls of {FITTED}; dummy weights"
    )
    heading, ends = "Longest gaps by chunk, and the steps that the fit tells", ("ms", "low", "high")
    frame = pd.concat(parts)
    return build.intervals(frame, None, "gpu_stalls", heading, caption, *ends, x_title="ms (log scale)", log=True)


def stalls_said(told: pd.DataFrame) -> str:
    """Say how the fit did, computed from the rows."""
    inside = (told["median"] >= told["predicted_low"]) & (told["median"] <= told["predicted_high"])
    return (
        f"The median longest gap lies among the steps told at {inside.sum()} of {len(told)} chunks; it is "
        f"{told['ratio'].min():.1f} to {told['ratio'].max():.1f} times the longest step told."
    )


def crossovers(
    sets: Sequence[tuple[str, Sequence[steps.Model], float]], rates: Sequence[float] = RATES_GBPS
) -> pd.DataFrame:
    """Return where 1P1D pays by link rate, for each (name, models, gap limit in ms)."""
    rows = [
        {"arm": name, "gbps": r, **calibrate.crossover(fitted, r, gap_ms=gap, grid=steps.GRID_TOKENS)}
        for name, fitted, gap in sets
        for r in rates
    ]
    return pd.DataFrame(rows).astype(dict.fromkeys(("lower", "steady", "upper", "low", "high"), "Int64"))


def crossovers_table(found: pd.DataFrame) -> gt.GT:
    """Show the lower edge by link rate, with its interval, and from where on 1P1D pays at every length."""
    most = f"{steps.GRID_TOKENS} up to {steps.MOST_TOKENS:,}"
    note = f"No TTFT limit; lengths by {most}; empty: none, or (to) not reached."
    names = {"arm": "Gap limit", "lower": "First length at which 1P1D pays (tokens)", "upper": "to"}
    title, columns = f"Predicted for one GPU, KV of {LAYOUT}", "arm gbps lower low high steady upper never"
    shown = found.assign(never=100 * found["never"])
    return build.table(shown, "gpu_crossover", title, columns, note, {"gbps": 0}, **names)


def crossovers_chart(fitted: Sequence[steps.Model]) -> charts.Shown:
    """Draw how much sooner 1P1D answers than tuned replicas: a panel a gap limit, a colour a link rate."""
    lengths = np.arange(512, 32_768 + 1, 512)
    parts = [
        steps.curve(fitted[0], lengths, rate, gap).assign(gbps=rate, gap=f"gap limit {gap:g} ms")
        for rate in RATES_GBPS[1::2]
        for gap in GAPS_MS
    ]
    frame = pd.concat(parts)
    frame["saved_ms"] = (frame["replica_ms"] - frame["1p1d_ms"]).where(np.isfinite(frame["replica_ms"])).round(2)
    frame = frame[["prompt_tokens", "chunk_tokens", "saved_ms", "gbps", "gap"]]
    caption = (
        f"TTFT of replicas less that of 1P1D: above 0, 1P1D answers sooner; step times fitted to {FITTED}, KV of "
        f"{LAYOUT}, the link's whole rate at once, low load; a prediction that nobody measured"
    )
    scale = alt.Scale(domain=[-60, 120], clamp=True)
    lines = (
        alt.Chart(frame)
        .mark_line()
        .encode(
            x=alt.X("prompt_tokens:Q", title="Prompt (tokens)"),
            y=alt.Y("saved_ms:Q", title="Saved (ms)", scale=scale),
            color=alt.Color("gbps:O", title="Link (Gbps)", scale=alt.Scale(scheme="viridis")),
            tooltip=["prompt_tokens", "chunk_tokens", "saved_ms", "gbps"],
        )
    )
    zero = alt.Chart().mark_rule(strokeDash=[4, 3], color="#888").encode(y=alt.datum(0))
    chart = (
        alt.layer(lines, zero, data=frame)
        .properties(width=charts.WIDTH, height=200)
        .facet(row=alt.Row("gap:N", title=None, sort=[f"gap limit {g:g} ms" for g in GAPS_MS]))
        .properties(title=charts.title("What 1P1D would save on this GPU, by link rate", None, caption))
    )
    return charts.show(chart, "gpu_crossover")
