"""Views of tcp-crossover: both TTFTs over input length, the pay-off window, sliders, prediction against measurement."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts
from kvlab.analysis import calibrate, steps
from kvlab.paths import shared_dir
from kvlab.runs import Run
from kvlab.views import build

ALONE, BOTH = "tuned replicas", "1P1D over TCP"
_COLOUR = alt.Color(
    "arm:N", title="", scale=alt.Scale(domain=[ALONE, BOTH], range=[charts.PALETTE[0], charts.PALETTE[1]])
)
#: spacing of the lengths between which edges of a measured run are looked for
GRID_TOKENS = 64
_NONE_S = 10  # the TTFT slider's end stands for no limit


def published() -> pd.DataFrame:
    """Return the published figure's points beside the model's values, with the relative errors."""
    frame = pd.read_csv(shared_dir("data") / "tcp_crossover" / "published" / "curve.csv")
    model = steps.curve(steps.PUBLISHED, list(frame["input_tokens"]), steps.PUBLISHED_GBPS, steps.PUBLISHED_GAP_MS)
    frame = frame.assign(model_chunk=model["chunk_tokens"])
    for side in ("replica", "1p1d"):
        frame[f"model_{side}_s"] = model[f"{side}_ms"] / 1e3
        frame[f"error_{side}"] = frame[f"model_{side}_s"] / frame[f"ttft_{side}_s"] - 1
    return frame


def published_table() -> gt.GT:
    """Show the published points, the model's, and how far apart they are."""
    frame = published()
    frame["error"] = 100 * frame[["error_replica", "error_1p1d"]].abs().max(axis=1)
    columns = (
        "input_tokens replica_chunk_tokens model_chunk ttft_replica_s model_replica_s ttft_1p1d_s model_1p1d_s error"
    )
    title, note = "The published curve and the step-time model", f"Model: {steps.PUBLISHED.source}."
    return build.table(frame, "published", title, columns, note)


def _grid(most: int) -> int:
    """Space about 192 input lengths up to ``most``, by multiples of 64 where that is not too coarse."""
    return max(16, 64 * round(most / 192 / 64))


def _curves(m: steps.Model, gbps: float, gap_ms: float, most: int) -> pd.DataFrame:
    frame = steps.curve(m, np.arange(_grid(most), most + 1, _grid(most)), gbps, gap_ms)
    parts = {ALONE: frame["replica_ms"], BOTH: frame["1p1d_ms"]}
    long = pd.concat(frame[["prompt_tokens", "chunk_tokens"]].assign(arm=k, ttft_s=v / 1e3) for k, v in parts.items())
    return long.replace(np.inf, np.nan).dropna()


def ttft_chart(
    m: steps.Model,
    points: pd.DataFrame,
    *,
    gbps: float,
    gap_ms: float,
    most: int = 49_152,
    name: str = "ttft",
    run: Run | None = None,
    said: str = "",
) -> charts.Shown:
    """Draw both TTFTs over input length, the pay-off window behind them and ``points`` (arm, prompt_tokens, ttft_s)."""
    w = steps.window(m, gbps, gap_ms=gap_ms, most=most, grid=_grid(most))
    x = alt.X("prompt_tokens:Q", title="Input (tokens)", scale=alt.Scale(domain=[0, most]))
    y = alt.Y("ttft_s:Q", title="TTFT (s, log scale)", scale=alt.Scale(type="log", nice=False))
    line = alt.Chart(_curves(m, gbps, gap_ms, most)).mark_line(strokeWidth=2).encode(x=x, y=y, color=_COLOUR)
    layers: list[alt.Chart] = []
    if w.lower:
        band = alt.Chart(pd.DataFrame({"from": [w.lower], "to": [w.upper or most]}))
        layers.append(band.mark_rect(color="#009E73", opacity=0.12).encode(x="from:Q", x2="to:Q"))
        text = f"1P1D pays: {w.lower:,} to {f'{w.upper:,}' if w.upper else 'beyond the chart'}"
        label = band.mark_text(align="left", dx=4, color="#00664a", text=text)
        layers.append(label.encode(x="from:Q", y=alt.value(8)))
    layers.append(line)
    if len(points):
        dots = alt.Chart(points).mark_point(filled=True, size=50, opacity=1, stroke="white", strokeWidth=1)
        layers.append(dots.encode(x=x, y=y, color=_COLOUR, tooltip=["arm:N", "prompt_tokens:Q", "ttft_s:Q"]))
    caption = f"lines: step-time model, {m.source}; {gbps:g} Gbps, gap limit {gap_ms:g} ms, no TTFT limit; {said}"
    heading = charts.title("Time to first token over input length", run, caption)
    return charts.show(alt.layer(*layers).properties(width=charts.WIDTH, height=300, title=heading), name, run)


def published_chart() -> charts.Shown:
    """Draw the model's curves with the published figure's points on them."""
    frame = published()
    sides = {ALONE: "ttft_replica_s", BOTH: "ttft_1p1d_s"}
    parts = [
        pd.DataFrame({"arm": k, "prompt_tokens": frame["input_tokens"], "ttft_s": frame[v]}) for k, v in sides.items()
    ]
    rate, said = steps.PUBLISHED_GBPS, "dots: the published figure"
    return ttft_chart(steps.PUBLISHED, pd.concat(parts), gbps=rate, gap_ms=50, name="published", said=said)


def window_chart(m: steps.Model, gap_ms: float = 50, ttfts_s: tuple[float, ...] = (1, 2, 3, np.inf)) -> charts.Shown:
    """Draw the pay-off window over the link rate, a panel a TTFT limit."""
    rates = np.geomspace(2, 400, 60)
    frame = steps.windows(m, list(rates), gap_ms=[gap_ms], ttft_ms=[1e3 * t for t in ttfts_s]).dropna(subset=["lower"])
    names = {1e3 * t: "no TTFT limit" if np.isinf(t) else f"TTFT limit {t:g} s" for t in ttfts_s}
    frame = frame.assign(limit=frame["ttft_ms"].map(names), upper=frame["upper"].fillna(steps.MOST_TOKENS))
    frame = frame[["gbps", "lower", "upper", "limit"]].astype({"lower": int, "upper": int})
    chart = alt.Chart(frame).mark_area(opacity=0.35, color="#009E73", line={"color": "#00664a"}).encode(
        x=alt.X("gbps:Q", title="Link rate (Gbps, log scale)", scale=alt.Scale(type="log", domain=[2, 400])),
        y=alt.Y("lower:Q", title="Input (tokens)"), y2="upper:Q",
    ).properties(width=charts.WIDTH // 2 - 30, height=170).facet(
        alt.Facet("limit:N", title=None, sort=list(names.values())), columns=2
    )  # fmt: skip
    caption = (
        f"{m.source}; gap limit {gap_ms:g} ms; shaded: input lengths at which 1P1D answers sooner and keeps both limits"
    )
    return charts.show(chart.properties(title=charts.title("Where 1P1D pays, by link rate", None, caption)), "window")


def explorer(
    m: steps.Model, *, gbps: float, gap_ms: float, most: int = 49_152, fastest: float = 100, name: str = "explorer"
) -> charts.Shown:
    """Draw the curves and the window with sliders for link rate, gap limit, TTFT limit and KV a token.

    Everything is computed in Vega expressions from the model's constants, so that it needs no Python behind it.
    """
    grid = _grid(most)
    slope = 2 * m.attention_ms if m.decode_token_ms is None else m.decode_token_ms
    start = m.fixed_ms + (m.token_ms if m.decode_token_ms is None else 0)
    c = max(m.attention_ms, 1e-12)
    own = f"{m.token_ms} * datum.L + {c} * datum.L * datum.L + {m.t0_ms}"

    def both(rate: str) -> str:
        moved = f"({m.window_bytes} * min(1, datum.L / {m.window_tokens}) + kv * 1024 * datum.L) * 8e-6 / {rate}"
        return f"{own} + {m.fixed_ms} * ceil(datum.L / {m.prefill_chunk}) + {m.transfer_ms} + {m.link_share} * {moved}"

    def wins(ms: str) -> str:
        keeps = f"{ms} <= (ttft < {_NONE_S} ? ttft * 1000 : 1e12) && {start} + {slope} * datum.L <= gap * 1.000001"
        return f"(!isValid(datum.alone) || {ms} < datum.alone) && {keeps}"

    def calc(expression: str, field: str) -> dict[str, str]:
        return {"calculate": expression, "as": field}

    bound = f"(sqrt({m.token_ms**2} + {4 * c} * max(0, gap - {m.fixed_ms})) - {m.token_ms}) / {2 * c}"
    full = f"{m.fixed_ms} + {m.token_ms} * datum.size + {c} * datum.size * (2 * datum.whole - datum.size)"
    rest = f"{m.fixed_ms} + (datum.L - datum.whole) * ({m.token_ms} + {c} * (datum.L + datum.whole))"
    search = [
        # The largest multiple of 16 whose longest step keeps the gap limit; 0 where none does.
        calc(f"sequence(0, min(datum.L + 16, {bound} + 32), 16)", "chunk"),
        {"flatten": ["chunk"]},
        calc("min(datum.chunk, datum.L)", "size"),
        calc("datum.size ? floor(datum.L / datum.size) * datum.size : 0", "whole"),
        {"filter": f"!datum.chunk || max({full}, datum.whole < datum.L ? {rest} : 0) <= gap"},
        {"aggregate": [{"op": "max", "field": "chunk", "as": "chunk"}], "groupby": ["L"]},
        calc(f"datum.chunk ? {own} + {m.fixed_ms} * ceil(datum.L / datum.chunk) : null", "alone"),
        calc(both("rate"), "both"),
    ]
    edges: list[dict[str, Any]] = [
        {"aggregate": [{"op": op, "field": "at", "as": op} for op in ("min", "max")], "groupby": ["r"]},
        calc(f"min(datum.max + {grid}, max(datum.max, floor((gap - {start}) / {slope or 1e-12} + 1e-6)))", "edge"),
        calc(f"datum.edge < datum.max + {grid} ? datum.edge : datum.max", "upper"),
    ]
    past = f"datum.max + {grid} > {most} ? ' tokens and up' : ' to ' + format(datum.upper, ',') + ' tokens'"
    ends = f"format(datum.min, ',') + ({past})"
    x = {"field": "L", "type": "quantitative", "title": "Input (tokens)", "scale": {"domain": [0, most]}}
    log = {"type": "log"}
    lines: dict[str, Any] = {
        "transform": [calc("datum.alone / 1000", ALONE), calc("datum.both / 1000", BOTH),
                      {"fold": [ALONE, BOTH], "as": ["arm", "s"]}, {"filter": "isValid(datum.s) && datum.s > 0"}],
        "mark": {"type": "line", "strokeWidth": 2},
        "encoding": {"x": x, "color": _COLOUR.to_dict(),
                     "y": {"field": "s", "type": "quantitative", "title": "TTFT (s, log scale)",
                           "scale": log | {"nice": False}}},
    }  # fmt: skip
    verdict: dict[str, Any] = {
        "transform": [calc(f"{wins('datum.both')} ? datum.L : null", "at"), calc("rate", "r"), *edges,
                      calc(f"isValid(datum.min) ? '1P1D pays: ' + {ends} : '1P1D does not pay'", "text")],
        "mark": {"type": "text", "align": "left", "fontWeight": "bold", "fontSize": 13, "x": 8, "y": 10},
        "encoding": {"text": {"field": "text"}},
    }  # fmt: skip
    rates = [round(float(r), 3) for r in np.geomspace(fastest / 50, fastest, 40)]
    area: dict[str, Any] = {
        "transform": [calc(str(rates), "r"), {"flatten": ["r"]}, calc(both("datum.r"), "ms"),
                      {"filter": wins("datum.ms")}, calc("datum.L", "at"), *edges],
        "mark": {"type": "area", "opacity": 0.35, "color": "#009E73", "line": {"color": "#00664a"}},
        "encoding": {"x": {"field": "r", "type": "quantitative", "title": "Link rate (Gbps, log scale)",
                           "scale": log | {"domain": [rates[0], rates[-1]], "nice": False}},
                     "y": {"field": "min", "type": "quantitative", "title": "Input where 1P1D pays (tokens)",
                           "scale": {"domain": [0, most]}}, "y2": {"field": "upper"}},
    }  # fmt: skip
    here = {"data": {"values": [{}]}, "transform": [calc("rate", "r")], "mark": {"type": "rule", "strokeDash": [4, 3]},
            "encoding": {"x": {"field": "r", "type": "quantitative"}}}  # fmt: skip
    sliders = [("rate", gbps, fastest / 50, fastest, fastest / 1000, "Link rate (Gbps)"),
               ("gap", gap_ms, int(m.fixed_ms), 4 * gap_ms, 0.1, "Gap limit (ms)"),
               ("ttft", _NONE_S, 0.5, _NONE_S, 0.1, f"TTFT limit (s; {_NONE_S}: none)"),
               ("kv", m.token_bytes / 1024, 1, 400, 0.1, "KV a token that grows (KiB)")]  # fmt: skip
    panels = [{"layer": [lines, verdict], "height": 240}, {"layer": [area, here], "height": 200}]
    heading = charts.title(
        "Move the sliders: both TTFTs, and where 1P1D pays", None, f"{m.source}; every {grid} tokens"
    )
    spec = {
        "title": heading.to_dict(),
        "params": [
            {"name": n, "value": v, "bind": {"input": "range", "min": lo, "max": hi, "step": by, "name": f"{text} "}}
            for n, v, lo, hi, by, text in sliders
        ],
        "data": {"sequence": {"start": grid, "stop": most + 1, "step": grid, "as": "L"}},
        "transform": search,
        "vconcat": [p | {"width": charts.WIDTH} for p in panels],
    }  # fmt: skip
    return charts.show(alt.VConcatChart.from_dict(spec), name)


def models_of(run: Run) -> list[steps.Model]:
    """Fit a recording: the estimate first, then the draws.  ``kv`` of the manifest gives the model's KV bytes."""
    base = replace(steps.PUBLISHED, **run.manifest.get("kv", {}))
    return calibrate.calibrate(run.table("steps"), calibrate.points(run.table("cells")), base=base)


def constants_table(models: list[steps.Model], where: str = "this machine") -> gt.GT:
    """Show the fitted constants with their intervals beside the published ones."""
    frame = calibrate.constants(models)
    words = {"fixed_ms": ("Fixed cost of a step", "ms", 1), "token_ms": ("A token", "µs", 1e3),
             "attention_ms": ("A token and 1,000 tokens of prefix", "µs", 2e6),
             "floor_ms": ("No step is shorter than", "ms", 1),
             "t0_ms": ("Beside the steps", "ms", 1), "transfer_ms": ("Transfer beside the link", "ms", 1),
             "link_share": ("Time on the link over bytes / rate", "", 1)}  # fmt: skip
    frame["what"], frame["unit"] = ([words[n][i] for n in frame["name"]] for i in (0, 1))
    factor = frame["name"].map(lambda n: words[n][2])
    frame["published"] = [getattr(steps.PUBLISHED, n) if n != "floor_ms" else np.nan for n in frame["name"]]
    numbers = ["value", "low", "high", "published"]
    frame[numbers] = frame[numbers].mul(factor, axis=0)
    title, columns = f"The step-time model of {where}", f"what unit {' '.join(numbers)}"
    return build.table(frame, "constants", title, columns, digits=dict.fromkeys(numbers, 2), what="Constant")


def steps_chart(run: Run) -> charts.Shown:
    """Draw the measured steps (dots, medians) on the fitted model (lines) over the prefix, a colour a chunk."""
    _, frame = calibrate.fit_steps(run.table("steps"))
    chunk = alt.Color("chunk_tokens:O", title="Chunk (tokens)")
    base = alt.Chart(frame).encode(x=alt.X("prefix_tokens:Q", title="Prefix (tokens)"), color=chunk)
    y = alt.Y("step_ms:Q", title="Step (ms, log scale)", scale=alt.Scale(type="log"))
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(y=y, tooltip=list(frame))
    worst = frame["residual"].abs().max()
    heading = charts.title("Step times, measured and fitted", run, f"largest residual {worst:.1%}; {run.id}")
    chart = alt.layer(base.mark_line().encode(y="model_ms:Q"), dots).properties(width=charts.WIDTH, title=heading)
    return charts.show(chart, "steps", run)


def check_chart(found: pd.DataFrame, run: Run) -> charts.Shown | str:
    """Draw TTFT of 1P1D over that of replicas, predicted and measured, for each length and rate checked."""
    if found.empty:
        return "this run has no point of the check"
    parts = []
    ends = ["ratio", "low", "high"]
    case = [f"{t:,} tokens, {r:g} Gbps" for t, r in zip(found["prompt_tokens"], found["gbps"], strict=True)]
    for arm, names, text in (
        ("predicted", ["predicted", "predicted_low", "predicted_high"], ""),
        ("measured", ends, found["outcome"]),
    ):
        parts.append(found[names].set_axis(ends, axis=1).assign(arm=arm, case=case, text=text))
    caption = f"below 1: 1P1D answers sooner; bars: 95 %; replicas with the chunk of the gap limit; {run.id}"
    heading, how = "Predicted from short inputs, then measured", {"x_title": "TTFT of 1P1D / TTFT of replicas"}
    frame = pd.concat(parts)
    return build.intervals(frame, run, "check", heading, caption, *ends, reference=1.0, log=True, text="text", **how)


def protocol(run: Run) -> tuple[list[float], dict[str, Any]]:
    """Return the run's link rates (Gbps) and the limits that :func:`kvlab.analysis.steps.window` takes."""
    p = run.manifest["parameters"]
    rates = run.manifest.get("link", {}).get("rates_gbps") or p["rates_gbps"]
    most = {"most": int(p["most_tokens"]), "grid": GRID_TOKENS}
    return rates, {"gap_ms": p["gap_limit_ms"], "ttft_ms": p.get("ttft_limit_ms") or np.inf, **most}


def crossovers(run: Run, models: list[steps.Model]) -> list[dict[str, Any]]:
    """Return the crossover at each rate of the run, computed from the calibration alone."""
    rates, limits = protocol(run)
    return [{"gbps": r, **calibrate.crossover(models, r, **limits)} for r in rates]


def fixed(run: Run, models: list[steps.Model]) -> str:
    """Say when the prediction was fixed, and whether the recording's calibration still gives it."""
    made = run.manifest.get("prediction")
    if not made:
        return "No prediction was fixed: this run has no 1P1D. Below, a link that is used whole at once is assumed."
    phases = run.table("phases")
    after = phases.loc[phases["phase"].astype(str).str.startswith("check"), "start_s"].min() - made["fixed_s"]
    same = [c["lower"] for c in made["crossover"]] == [c["lower"] for c in crossovers(run, models)]
    return (f"Fixed {made['fixed_s']:.0f} s into the run, {after:.1f} s before the first point of the check; computed "
            f"again from the recording: {'the same edges' if same else 'OTHER EDGES'}.")  # fmt: skip


def prediction_table(run: Run, models: list[steps.Model]) -> gt.GT:
    """Show, for each rate, from where 1P1D pays by the calibration, with the interval."""
    frame = pd.DataFrame(crossovers(run, models)).astype(dict.fromkeys(("lower", "low", "high", "upper"), "Int64"))
    frame["never"] = 100 * frame["never"]
    _, limits = protocol(run)
    ttft = "no TTFT limit" if np.isinf(limits["ttft_ms"]) else f"TTFT limit {limits['ttft_ms']:g} ms"
    note = f"Gap limit {limits['gap_ms']:g} ms, {ttft}; lengths by {GRID_TOKENS} up to {limits['most']:,}; empty: none."
    columns = "gbps lower low high never upper ends_by"
    return build.table(frame, "prediction", "Predicted from short inputs", columns, note)


def here_chart(run: Run, models: list[steps.Model], gbps: float) -> charts.Shown:
    """Draw the predicted curves at one rate, and on them the medians measured in the check."""
    rows = calibrate.points(run.table("cells"))
    rows = rows[(rows["phase"] == "check") & ((rows["arm"] == "replica") | (rows["gbps"] == gbps))]
    dots = rows.groupby(["arm", "prompt_tokens"], as_index=False)["ttft_ms"].median()
    dots = dots.assign(arm=dots["arm"].map({"replica": ALONE, "1P1D": BOTH}), ttft_s=dots["ttft_ms"] / 1e3)
    _, limits = protocol(run)
    said = f"dots: medians of the check, measured after the lines were fixed; {run.id}"
    how = {"gap_ms": limits["gap_ms"], "most": int(limits["most"])}
    return ttft_chart(models[0], dots, gbps=gbps, name=f"ttft-{gbps:g}", run=run, said=said, **how)


def deviations(run: Run) -> str:
    """List where the run departs from its protocol, the parameter file; one line each."""
    m, p, said = run.manifest, run.manifest["parameters"], list[str]()
    committed = m.get("parameter_file_committed")
    if not committed:
        said.append("the parameter file was changed or not committed before the run" if committed is False
                    else "whether the parameter file was committed before the run is not known")  # fmt: skip
    said += [f"set on the command line: {w}" for w in re.findall(r"-p (\S+)", str(m.get("command", "")))]
    link = m.get("link", {})
    if link.get("kind") == "loopback":
        said.append(f"no shaped link ({link['reason']}): loopback, whose pulls reached {link['rates_gbps'][0]:g} Gbps")
    if m["outcome"] != "completed":
        said.append(f"the run ended as {m['outcome']}: {m.get('error', '')}")
    cells = run.table("cells")
    lost = cells["value"].isna().sum()
    said += [f"{lost} requests failed"] if lost else []
    asked = len(p["chunk_tokens"]) * len(p["step_prompt_tokens"]) * p["step_repetitions"]
    timed = run.table("steps").groupby(["arm", "prompt_tokens", "repetition"]).ngroups
    if timed < asked:
        said.append(
            f"{asked - timed} of {asked} prompts whose steps were to be timed did not show as many as they have"
        )
    for n, chunk in m.get("prediction", {}).get("chunks", {}).items():
        said += [] if chunk else [f"no chunk keeps the gap limit at {int(n):,} tokens: no replica was measured there"]
    for c in m.get("prediction", {}).get("crossover", []):
        sides = {n < (c["lower"] or np.inf) for n in p["check_tokens"]}
        if len(sides) < 2:
            said.append(f"at {c['gbps']:g} Gbps all lengths of the check lie on one side of the predicted crossover")
    return "\n".join(f"- {x}" for x in said) or "none"


def conclude(run: Run, models: list[steps.Model], found: pd.DataFrame) -> str:
    """Say from where 1P1D pays here, how sure that is, and whether the check hit; write summary.json."""
    edges, (_, limits) = crossovers(run, models), protocol(run)
    said = []
    for edge in edges:
        low, high = (f"{edge[k]:,}" if edge[k] else "never" for k in ("low", "high"))
        start = f"from {edge['lower']:,} tokens" if edge["lower"] else f"nowhere up to {limits['most']:,} tokens"
        sure = f"95 % {low} to {high}; in {edge['never']:.0%} of draws never" if edge["lower"] else ""
        sure = sure or f"in {1 - edge['never']:.0%} of draws somewhere"
        said.append(f"{start} at {edge['gbps']:g} Gbps ({sure})")
    verdict = (
        f"On this machine runs at short inputs predict, at a gap limit of {limits['gap_ms']:g} ms, that 1P1D pays "
    )
    verdict += " and ".join(said)
    if len(found):
        counts = found["outcome"].value_counts()
        words = ", ".join(f"{counts.get(k, 0)} {k}" for k in ("hit", "miss", "unresolved"))
        verdict += f"; measured afterwards at {len(found)} points: {words}"
    run.conclude(verdict + ".", crossover=edges, check=found.to_dict("records"))
    return verdict + "."
