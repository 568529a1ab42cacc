"""Would NVLink win with a few large regions?  The published pull under the cost model, vLLM's pulls, the real knobs."""

from __future__ import annotations

import textwrap
from functools import cache
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published, runs
from kvlab.analysis import cost
from kvlab.runs import Run
from kvlab.views import descriptor_shape as shape
from kvlab.views.published_split import NVLINK, ROCE, VLLM_THREADS, at_16k, h200_alone, one_thread


@cache
def b300() -> tuple[cost.Fit, cost.Fit, cost.Fit]:
    """Return models of the published 16k pull: NVLink's wire paid by the byte, by the descriptor; RoCE's by the byte.

    One shape is published, so what the wire is paid for cannot be told: the first two are its two ends.  The second
    takes the bandwidth that the guide expects of NVLink for the bytes and lays the rest on the descriptors.
    """
    n, size = at_16k("descriptors_per_pull"), at_16k("kv_pull_time") * at_16k("rate_per_rank") * 1e6
    link = published.value("transport_bandwidth", "bandwidth_high_gb_s", transport="NVLink") * 1e3

    def one(name: str, transport: str, by_descriptor: bool) -> cost.Fit:
        post, pull = at_16k("post_per_descriptor", transport), at_16k("kv_pull_time", transport) * 1e3
        seen = pd.DataFrame({"descriptors": [n], "bytes": [size], "post_us": [post * n], "xfer_us": [pull]})
        wire = {"wire_per_byte_us": pull / size}
        if by_descriptor:
            wire = {"wire_per_byte_us": 1 / link, "wire_per_descriptor_us": (pull - size / link) / n}
        return cost.given(name, seen, post_per_descriptor_us=post, **wire)

    names = ("NVLink, rest by the byte", "NVLink, rest by the descriptor", "RoCE")
    return one(names[0], NVLINK, False), one(names[1], NVLINK, True), one(names[2], ROCE, False)


def break_evens() -> pd.DataFrame:
    """Return where the published NVLink pull, under each reading, would take as long as RoCE's."""
    *nvlink, roce = b300()
    found = [cost.break_even(f, roce, f.ranges["bytes"][0]).assign(pair=f"{f.arm} / {roce.arm}") for f in nvlink]
    return pd.concat(found).assign(where="B300, published")


@cache
def _recorded() -> Run:
    return runs.load(shape.GPU)


def threaded(pair: list[Run]) -> list[cost.Fit]:
    """Return the models of one GPU arm with NIXL threads, below the split and above: of these runs, else recorded."""
    for run in (*pair, _recorded()):
        fits = [f for f in shape.models(run).values() if shape.PART in f.arm]
        if shape.on_gpu(run) and fits:
            return fits[:2]
    raise AssertionError("the recording has an arm with threads")


def chart(pair: list[Run]) -> charts.Shown:
    """Draw the published pull by descriptor count under each model, and the H200's where it was fitted."""
    size, here = b300()[0].ranges["bytes"][0], f"H200, {VLLM_THREADS} threads (fitted)"
    names = [*(f"B300 {f.arm}" for f in b300()), here]
    given = [cost.predict(f, np.geomspace(1, 1e5, 50), size).assign(arm=f"B300 {f.arm}") for f in b300()]
    own = [cost.predict(f, np.geomspace(*f.ranges["descriptors"], 50), size) for f in threaded(pair)]
    fitted = pd.concat(own).assign(model=lambda f: f["arm"], arm=here)
    seen = pd.concat([b300()[i].residuals.assign(arm=names[i], x=lambda f: f["descriptors"]) for i in (0, 2)])
    titles, y = ("Descriptors of the pull (log scale)", "Pull time (ms, log scale)"), "xfer{}_us"
    drawn = alt.layer(
        shape.marks(shape.points(pd.concat(given), "descriptors", y, 1e3), names, titles, "dash"),
        shape.marks(shape.points(fitted, "descriptors", y, 1e3), names, titles, "band", "line"),
        shape.marks(seen.assign(y=seen["xfer_us"] / 1e3), names, titles, "point"),
    )
    caption = (
        f"{size / 1e9:.2f} GB a rank at every count. Points: published pulls at 16k (derived). Dashed: extrapolated "
        "from that one shape, which leaves open what NVLink's time after the post is paid for: by the byte and by the "
        "descriptor are the two ends. B300: 30 requests at a time, number of pulls not published. H200: its model with "
        "95 % band, where it was fitted; one in flight, two processes on one GPU"
    )
    heading = charts.title("The published pull, had the connector handed over fewer regions", None, caption)
    drawn = drawn.properties(width=charts.WIDTH, height=300, title=heading)
    return charts.show(drawn, "few_large_regions", pair[0], several=True)


def vllm_table(pair: list[Run]) -> gt.GT:
    """Show vLLM's pulls on the H200 (made by hand) beside what the model fitted to bare pulls says of them."""
    frame = published.load("h200_vllm_pulls").query("in_flight == 1 and payload_transport == 'cuda_ipc'")
    fit, rows = threaded(pair)[1], []
    for r in frame.to_dict("records"):
        said = cost.predict(fit, r["descriptors_per_pull"], r["mib_per_pull"] * 2**20).to_dict("records")[0]
        row = {"Config": f"{r['config']}, {r['block_size']} tokens a block"}
        row |= {"Prompt": charts.lengths(r["prompt_tokens"]), "Descriptors": f"{r['descriptors_per_pull']:,}"}
        row |= {"MiB": f"{r['mib_per_pull']:,}"}
        for part, gap in (("post", ""), ("xfer", " ")):
            row[f"{'Pull' if gap else 'Post'} (ms)"] = f"{r[f'{part}_ms']:.1f}"
            row[f"by the model{gap}"] = shape.span(*(said[f"{part}{e}_us"] / 1e3 for e in ("", "_low", "_high")))
        row |= {"Pull / model": f"{r['xfer_ms'] * 1e3 / said['xfer_us']:.2f}", "TTFT P50 (s)": f"{r['ttft_p50_s']:.3f}"}
        rows.append(row | {" ": "extrapolated" if said["extrapolated"] else ""})
    note = (
        "vLLM 0.23.0 1P1D on one H200, one request at a time, means of 3 to 5 pulls, one start, by hand; vLLM gives "
        f"NIXL {VLLM_THREADS} threads. Model: {fit.arm}, fitted to pulls between two bare agents."
    )
    return shape.show_rows(rows, "vllm", "The same claim inside vLLM: block size 16 and 128", note)


#: setting, what it acted on, figure before and after, counts before and after (names in other_figures)
_KNOBS = (
    ("block size 16 → 64 tokens", "hand-over (ms)", "handover_block_16", "handover_block_64", None),
    ("cross-layer blocks, short prompt", "TTFT (ms)", "short_ttft_before", "short_ttft_after", "short"),
    ("cross-layer blocks, long prompt", "TTFT (ms)", "long_ttft_before", "long_ttft_after", "long"),
    ("strided descriptors", "first TTFT (ms)", "first_ttft_before", "first_ttft_after", None),
)


def knobs_table(pair: list[Run]) -> gt.GT:
    """Show what real settings do to the count of descriptors, and what came of it, each with its status."""
    rows: list[tuple[Any, ...]] = []
    hand = "measured by hand, vLLM 0.23.0, H200"
    vllm = h200_alone()
    for knob, config in (("block size 16 → 128 tokens", "blk128"), ("cross-layer blocks, FLASH_ATTN", "xlayer")):
        a, b = vllm.loc["cuda_ipc"], vllm.loc[config]
        for effect, c in (("pull at 16k (ms)", "xfer_ms"), ("TTFT at 16k (s)", "ttft_p50_s")):
            rows.append((knob, a["descriptors_per_pull"], b["descriptors_per_pull"], effect, a[c], b[c], hand))
    figures = published.load("other_figures").set_index("quantity")
    for knob, effect, before, after, count in _KNOBS:
        n = [figures["value"].get(f"{count}_descriptors_{e}", np.nan) for e in ("before", "after")]
        a, b = figures.loc[before], figures.loc[after]
        rows.append((knob, *n, effect, a["value"], b["value"], f"{a['status']}, {a['source']}"))
    for run in pair:
        seen = shape.pulls(run).query("not warmup and variation in ('plain', 'contiguous')")
        cells = seen.groupby(["arm", "bytes", "descriptor_bytes", "variation"])[["descriptors", "xfer_us"]].median()
        both = cells.unstack("variation").dropna() if (seen["variation"] == "contiguous").any() else cells.head(0)
        first = both.groupby("arm", sort=False).head(1).droplevel(["bytes", "descriptor_bytes"])
        for arm, r in first.iterrows():
            n, times = ([r[c, v] for v in ("plain", "contiguous")] for c in ("descriptors", "xfer_us"))
            times = [t / 1e3 for t in times]
            rows.append(("contiguous allocation", *n, f"pull (ms), {arm}", *times, f"measured, {run.id}"))
    p = [f.theta[1] for f in threaded(pair)]
    knob = f"{VLLM_THREADS} NIXL threads, from {shape.SPLIT_AT:,} descriptors"
    rows.append((knob, np.nan, np.nan, "post a descriptor (µs)", *p, "fitted, H200"))
    shown = [
        {
            "Setting": knob,
            "Descriptors": "not given" if np.isnan(n) else f"{n:,.0f} → {m:,.0f}",
            "Effect on": effect,
            "Before → after": f"{shape.span(a)} → {shape.span(b)} ({b / a:.2g}x)",
            "Status, source": source,
        }
        for knob, n, m, effect, a, b, source in rows
    ]
    note = "NIXL merges neighbours: a contiguous list is one descriptor. Threads leave the count and share the posting."
    return shape.show_rows(shown, "knobs", "What real settings do to the count, and what came of it", note)


def cost_rows() -> list[dict[str, str]]:
    """Return published and hand-made costs of a descriptor as rows of the cost table."""
    other = published.load("other_figures").set_index("quantity")["value"]
    two, vllm = one_thread(), h200_alone().iloc[0]
    said = (
        ("B300 (study)", "cuda_ipc over NVLink", "not given", at_16k("post_per_descriptor"), "published"),
        ("B300 (study)", "rc_mlx5 over RoCE", "not given", at_16k("post_per_descriptor", ROCE), "published"),
        ("H200, VRAM", "two agents by hand", "0", two["post_us"] / two["descriptors"], "measured"),
        ("H200, vLLM", "by hand", "4", vllm["post_ms"] * 1e3 / vllm["descriptors_per_pull"], "measured"),
        ("vllm#50913", "one pull", "not given", other["sample_post"] * 1e3 / other["sample_descriptors"], "derived"),
        ("nixl#176", "transfer() call", "not given", other["transfer_call"] * 1e6 / other["segments"], "derived"),
    )
    keys = ("Machine", "Arm", "Threads", "Post a descriptor (µs)", "Status")
    return [dict(zip(keys, (m, a, t, f"{v:.2g}", s), strict=True)) for m, a, t, v, s in said]


def claim(model: cost.Fit, met: pd.DataFrame) -> str:
    """Say what the models say of the claim about the published pull.

    :param model: of a GPU measured here, shared by threads
    :param met: :func:`break_evens`
    """
    text, met = "NVLink would win with a few large regions: ", met.dropna(subset=["descriptors"])
    if met.empty:
        return text + "under no reading of the published pull do NVLink and RoCE change places."
    r = met.iloc[0]
    text += (
        "the published pull alone cannot say. If its time after the post is paid by the byte, RoCE is ahead at every "
        f"count; if by the descriptor, NVLink is ahead from {r['descriptor_bytes'] / 1024:.0f} KiB a descriptor up "
        f"(fewer than {r['descriptors']:,.0f}; extrapolated from one published shape). "
    )
    wire = model.parameters.set_index("parameter").loc["wire_per_descriptor_us", ["value", "low", "high"]]
    if not wire["low"] > 0:
        return text + "The wire measured here shows no cost of a descriptor: nothing speaks for the second reading."
    return (
        f"{text}The H200's wire pays {shape.span(*wire)} µs a descriptor, which speaks for the second reading; its "
        "copies stay on one GPU, so that is no proof for NVLink."
    )


def conclude(pair: list[Run]) -> str:
    """Say in words what both runs and the published figures show; write summary.json."""
    said, met = [shape.verdict(run) for run in pair], break_evens()
    whole = "\n".join([*(words for words, _ in said), textwrap.fill(claim(threaded(pair)[1], met), 110)])
    numbers = {run.id: n for run, (_, n) in zip(pair, said, strict=True)}
    pair[0].conclude(whole, runs=numbers, published_break_evens=met.to_dict("records"))
    return whole
