"""Views of ttft-by-transport: published first tokens on one scale, the 98 seconds taken apart, one's own run."""

from __future__ import annotations

from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published, runs
from kvlab.analysis import split
from kvlab.analysis.transports import additions, queues
from kvlab.errors import BadInput
from kvlab.params import TtftByTransport
from kvlab.runs import Run
from kvlab.views import build

EXPECTED, MEASURED, OWN = "expected", "measured", "your run, measured"
ADDED, TTFT, ANYSCALE = "Added to TTFT", "TTFT, H200 (kvlab)", "TTFT, Anyscale"
COLLOCATED = "collocated 2xTP4"
#: config of h200_vllm_pulls -> the road its pulls took; cuda_ipc is the control
CONTROL = "cuda_ipc"
_ROADS = {"tcp": "TCP", "tcp2": "TCP", "ipc_noget": "TCP (reads off)", "cuda_ipc": CONTROL}
_CONFIGS = {
    "cuda_ipc": "cuda_ipc",
    "blk128": "cuda_ipc, block size 128",
    "xlayer": "cuda_ipc, cross-layer asked",
    "tcp": "TCP",
    "tcp2": "TCP",
    "ipc_noget": "TCP (cuda_ipc's reads off)",
}


def guide() -> pd.DataFrame:
    """Return NVIDIA's table with ``mark``: expected or measured."""
    frame = published.load("ttft_by_transport")
    return frame.assign(mark=frame["status"].map({"expected": EXPECTED}).fillna(MEASURED))


def anyscale_additions() -> pd.DataFrame:
    """Return Anyscale's P/D arrangements beside the collocated engines of the same host."""
    return additions(published.load("anyscale_pd_transports"), COLLOCATED)


def shared_road() -> pd.DataFrame:
    """Return N at a time against N times one alone on the H200: over TCP, and over cuda_ipc as the control."""
    frame = published.load("h200_vllm_pulls")
    return queues(frame.assign(road=frame["config"].map(_ROADS)).dropna(subset=["road"]))


def own(name: str) -> pd.DataFrame:
    """Return a run's own rows: median TTFT by arm and load, and median pull by arm and prompt, in seconds.

    Columns ``panel``, ``row``, ``x_s``, ``low_s``, ``high_s`` (95 percent of the median), ``load``.
    BadInput when the run holds neither requests with a TTFT nor pulls.
    """
    run = runs.load(name)
    over = build.transports(run)
    requests, pulls = run.table("requests").dropna(subset=["ttft_ms"]), run.table("pulls")
    parts = (
        (TTFT, requests, "ttft_ms", 1e3, "concurrency", "{n:g} in flight"),
        (ADDED, pulls, "xfer_us", 1e6, "prompt_tokens", "{n:g} tokens, the pull alone"),
    )
    rows: list[dict[str, Any]] = []
    for panel, frame, column, per_s, by, load in parts:
        if frame.empty:
            continue
        kept = split.warm(frame)
        keys = ["arm", by] if by in kept and kept[by].notna().any() else ["arm"]
        for key, g in kept.groupby(keys, sort=False):
            middle, low, high = (v / per_s for v in split.median_interval(g[column]))
            row = f"yours: {key[0]} ({over.get(str(key[0]), 'transport unknown')})"
            text = load.format(n=key[1]) if len(keys) > 1 else f"{len(g)} requests"
            rows.append({"panel": panel, "row": row, "x_s": middle, "low_s": low, "high_s": high, "load": text})
    if not rows:
        raise BadInput(f"{name}: no request with a TTFT and no pull in this run; own_run takes a run that has either")
    found = pd.DataFrame(rows)
    return found.assign(low_s=found["low_s"].fillna(found["x_s"]), high_s=found["high_s"].fillna(found["x_s"]))


def placed(parameters: TtftByTransport) -> pd.DataFrame:
    """Return every point of the first chart: ``panel``, ``row``, ``mark``, ``x_s``, ``low_s``, ``high_s``, ``load``."""
    table = guide()
    table = table[table["extra_ttft_high_ms"] > 0]
    ends = {"low_s": table["extra_ttft_low_ms"] / 1e3, "high_s": table["extra_ttft_high_ms"] / 1e3}
    nvidia = pd.DataFrame({"panel": ADDED, "row": table["transport"], "mark": table["mark"], **ends, "load": "a range"})
    points = [nvidia.assign(x_s=nvidia["low_s"]), nvidia.assign(x_s=nvidia["high_s"])]
    a = published.load("anyscale_pd_transports")
    a = a.assign(panel=ANYSCALE, row=a["arrangement"] + ", " + a["host"].str.replace(".48xlarge", ""))
    a = a.assign(x_s=a["ttft_median_ms"] / 1e3, load=a["concurrency"].astype(str) + " in flight")
    h = published.load("h200_vllm_pulls")
    h = h.assign(panel=TTFT, row=h["config"].map(_CONFIGS), x_s=h["ttft_p50_s"])
    h["row"] += h["in_flight"].eq(1).map({True: ", 1 in flight", False: ", 8 to 30 in flight"})
    h["load"] = h["in_flight"].astype(str) + " in flight, " + h["prompt_tokens"].astype(str) + " tokens"
    for frame in (a, h):
        spans = frame.groupby("row")["x_s"].agg(low_s="min", high_s="max")
        points.append(frame.join(spans, on="row").assign(mark=MEASURED).sort_values("low_s", kind="stable"))
    if parameters.own_run:
        points.append(own(parameters.own_run).assign(mark=OWN))
    return pd.concat(points)[["panel", "row", "mark", "x_s", "low_s", "high_s", "load"]].reset_index(drop=True)


def _span(low: float, high: float) -> str:
    unit, by = ("s", 1) if high >= 1 else ("ms", 1e3)
    low, high = (f"{float(f'{v * by:.3g}'):g}" for v in (low, high))  # type: ignore[assignment]
    return f"{low} {unit}" if low == high else f"{low}–{high} {unit}"


def placed_chart(points: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw all of them on one logarithmic scale, expected and measured told apart by colour and shape."""
    ends = points.groupby(["panel", "row", "mark"], sort=False, as_index=False).agg(
        low_s=("low_s", "min"), high_s=("high_s", "max")
    )
    ends["text"] = [f"{_span(a, b)}, {m}" for a, b, m in zip(ends["low_s"], ends["high_s"], ends["mark"], strict=True)]
    n = 2 + bool((ends["mark"] == OWN).any())
    marks = [EXPECTED, MEASURED, OWN][:n]
    scale = alt.Scale(type="log", domain=[0.01, 5000])
    colours = alt.Scale(domain=marks, range=["#E69F00", "#0072B2", "#009E73"][:n])
    shapes = alt.Scale(domain=marks, range=["diamond", "circle", "square"][:n])
    colour, shape = alt.Color("mark:N", title="", scale=colours), alt.Shape("mark:N", title="", scale=shapes)
    panels = []
    for panel in (ADDED, ANYSCALE, TTFT):
        order = list(dict.fromkeys(points.loc[points["panel"] == panel, "row"]))
        y = alt.Y("row:N", title=None, sort=order, axis=alt.Axis(labelLimit=300, minExtent=230))
        axis = alt.Axis(values=[0.01, 0.1, 1, 10, 100], format="~g")
        x = alt.X("x_s:Q", title=f"{panel} (s, log scale)", scale=scale, axis=axis)
        dots = alt.Chart(points[points["panel"] == panel]).mark_point(filled=True, size=55, opacity=0.85)
        bars = alt.Chart(ends[ends["panel"] == panel]).encode(y=y, x2="high_s:Q")
        left = alt.X("low_s:Q", scale=scale)
        panels.append(
            alt.layer(
                bars.mark_rule(strokeWidth=2).encode(x=left, color=colour),
                dots.encode(x=x, y=y, color=colour, shape=shape, tooltip=["row", "load", "x_s", "mark"]),
                bars.mark_text(align="left", dx=8, color="#222").encode(
                    x=alt.X("high_s:Q", scale=scale), x2=alt.Undefined, text="text:N"
                ),
            ).properties(width=charts.WIDTH, height=22 * len(order))
        )
    caption = (
        "Compare within a panel, not across: models, prompts, machines and what is counted differ. NVIDIA: the range "
        "of its table, and the two rows that it measured (8,000-token prompts, Llama 8B). Anyscale: medians at 4 to "
        "64 in flight, repetitions not published. H200: 4k, 8k and 16k prompts, 1 to 30 pulls a point, the same bytes "
        "on every transport at equal length, warm. A baseline of 0 and a row without a figure cannot be drawn."
    )
    heading = charts.title("First token by transport: published, expected, measured", run, caption)
    return charts.show(alt.vconcat(*panels).properties(title=heading), "placed", run)


def guide_table() -> gt.GT:
    """Show NVIDIA's table, each row marked."""
    frame = guide()
    for name, column in (("bandwidth", "bandwidth_{}_gb_s"), ("extra", "extra_ttft_{}_ms")):
        both = frame[[column.format(end) for end in ("low", "high")]].to_numpy()
        frame[name] = [None if pd.isna(a) else build.span(a, b, "g") for a, b in both]
    return build.table(
        frame,
        "guide",
        "What the transport adds to TTFT, by NVIDIA's guide",
        "transport bandwidth extra mark note",
        "Expected: the guide gives the range, no measurement behind it is shown. GB is 10^9 bytes.",
    )


def additions_table() -> gt.GT:
    """Show what each of Anyscale's arrangements adds over collocated engines, over the loads tried."""
    extra = anyscale_additions().groupby("arrangement", sort=False)["extra_ms"]
    frame = extra.agg(n="size", low="min", mid="median", high="max").reset_index()
    return build.table(
        frame,
        "additions",
        "What the hand-over adds over collocated engines at equal concurrency, Anyscale (measured; derived here)",
        "arrangement n low mid high",
        "Differences of published medians, 4 to 64 in flight. Below zero: P/D was faster, as prefill has its own "
        "GPUs. The InfiniBand set ran on another host without a collocated baseline, so it is not in this table.",
        n="Loads",
        low="Least (ms)",
        high="Most (ms)",
    )


def apart() -> pd.DataFrame:
    """Return the second chart's rows: one alone, N times that, and N at a time, for NVIDIA's case and the H200's."""
    other = published.load("other_figures").set_index("quantity")["value"]
    n, gb = int(other["tcp_fallback_requests"]), other["tcp_fallback_transfer"]
    road = published.value("ttft_by_transport", "bandwidth_low_gb_s", transport="TCP fallback")
    case = f"NVIDIA, {gb:g} GB at {road:g} GB/s, N = {n}"
    alone, seen = gb / road, other["tcp_fallback_ttft"]
    rows = [(case, alone, n * alone, seen, seen, "derived", "published")]
    queue = shared_road()
    for r in queue[queue["road"] != CONTROL].to_dict("records"):
        case = f"H200, {r['road']}, {charts.lengths(r['prompt_tokens'])} prompt, N = {r['n']}"
        rows.append((case, r["alone_s"], r["predicted_s"], r["p50_s"], r["last_s"], "measured", "measured"))
    long = []
    for case, one, times, p50, last, how, seen_how in rows:
        for arm, x, high, status in (
            ("one alone", one, one, how),
            ("N x one alone", times, times, "derived"),
            ("N at a time, median to last", p50, last, seen_how),
        ):
            long.append({"case": case, "arm": arm, "x_s": x, "high_s": high, "text": f"{_span(x, high)}, {status}"})
    return pd.DataFrame(long)


def apart_chart(frame: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw one alone, N times that and N at a time, a group for each case."""
    caption = (
        "NVIDIA: how many requests were in flight is not in the guide; ten is what 98 s needs. Its first bar is a "
        "transfer without the prefill. H200: TTFT, medians of 3 to 5 requests alone and of all N; the rule ends at "
        "the last of them. Same prompts and bytes alone and together; both engines on one GPU."
    )
    ends = {"x": "x_s", "low": "x_s", "high": "high_s"}
    title, text = "98 seconds are a queue", "Seconds (log scale)"
    return build.intervals(frame, run, "apart", title, caption, **ends, x_title=text, log=True, text="text")


def queue_table() -> gt.GT:
    """Show the H200's requests: N at a time against N times one, over TCP and over cuda_ipc."""
    return build.table(
        shared_road(),
        "queue",
        "One H200: N requests at a time take N times one, and the median tells what they wait for (measured)",
        "road prompt_tokens n alone_s pull_share predicted_s p50_s last_s last_ratio p50_share queue_share "
        "rate_alone_gb_s rate_n_gb_s",
        "Rate of N: all bytes until the last first token, prefill included, so over cuda_ipc it is the prefill's. "
        "0.35 GB/s are 0.33 GiB/s.",
        n="N",
    )


def conclude(run: Run, parameters: TtftByTransport) -> str:
    """Hold both predictions against the figures, place one's own run, and write summary.json."""
    queue, added, table = shared_road(), anyscale_additions(), guide()
    tcp, control = queue[queue["road"] != CONTROL], queue[queue["road"] == CONTROL]
    off = float((tcp["last_ratio"] - 1).abs().max())
    case = apart()
    one_s, seen_s = case["x_s"].iloc[0], case["x_s"].iloc[2]
    rdma = added.loc[added["arrangement"].str.contains("EFA SRD"), "extra_ms"]
    expected = table[(table["mark"] == EXPECTED) & table["transport"].str.contains("GPUDirect")]
    low, high = expected["extra_ttft_low_ms"].min(), expected["extra_ttft_high_ms"].max()
    inside = int(rdma.between(low, high).sum())
    checks = [
        {"prediction": "N at a time take N x one", "holds": off <= 0.25, "largest_deviation": off},
        {"prediction": "expected RDMA range", "holds": inside == len(rdma), "inside": inside, "of": len(rdma)},
    ]
    said = ["holds" if c["holds"] else "is REFUTED" for c in checks]

    def ends(values: pd.Series) -> str:
        return f"{values.min():.2f} to {values.max():.2f}"

    sentences = [
        f"{seen_s:g} seconds are {seen_s / one_s:.1f} transfers of {one_s:.1f} s each, not one slow one",
        f"on an H200 over TCP the last of N requests came after {ends(tcp['last_ratio'])} times N x one alone, so the "
        f"prediction of a queue {said[0]}",
        f"the median came at {ends(tcp['p50_share'])} of the last over TCP, where all share one road, and at "
        f"{ends(control['p50_share'])} over cuda_ipc, where they queue for the prefill",
        f"measured RDMA (EFA) adds {rdma.min():.0f} to {rdma.max():.0f} ms, {inside} of {len(rdma)} loads inside the "
        f"expected {low:.0f} to {high:.0f} ms, so the prediction that measurements meet the expected range {said[1]}",
    ]
    if parameters.own_run:
        sentences += _nearest(own(parameters.own_run))
    text = "; ".join(sentences) + "."
    run.conclude(text, predictions=checks, queue=queue.to_dict("records"), additions=added.to_dict("records"))
    return text


def _nearest(rows: pd.DataFrame) -> list[str]:
    """Say beside which row of its panel the slowest point of each of one's own arms comes to lie."""
    others, found = placed(TtftByTransport()), []
    for r in rows.sort_values("x_s").groupby(["panel", "row"], sort=False).tail(1).to_dict("records"):
        near = others[others["panel"] == r["panel"]]
        times = np.exp(np.log(near["x_s"] / r["x_s"]).abs())
        best = near.loc[times.idxmin()]
        where = f"nearest to {best['row']} ({best['mark']}), {times.min():.1f} times apart"
        found.append(f"{r['row']} at {r['load']}: {_span(r['x_s'], r['x_s'])}, {where}")
    return found
