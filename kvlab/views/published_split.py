"""The published RoCE and NVLink pulls beside a run of post-vs-completion, each value with its status.

What is published: ratios at three prompt lengths, and at 16k bytes, descriptors, a rate and the post of one
descriptor.  Milliseconds at 16k are derived from those (data/published/SOURCE.md).
"""

from __future__ import annotations

import textwrap
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published
from kvlab.runs import Run
from kvlab.views import baseline, build, ordered

LENGTH = 16384
NVLINK, ROCE = "cuda_ipc", "rc_mlx5"
_NAMES = {NVLINK: "B300, NVLink (cuda_ipc)", ROCE: "B300, RoCE (rc_mlx5)"}
_HERE = "measured, this run"
#: configs of the H200 that stand beside the published split -> their names; all with one request in flight
_H200 = {
    "cuda_ipc": "H200, vLLM, cuda_ipc, 16-token blocks",
    "blk128": "H200, vLLM, cuda_ipc, 128-token blocks",
    "tcp": "H200, vLLM, TCP",
}
#: NIXL's UCX worker threads that vLLM asks for, among which a transfer of 1,024 descriptors or more is split
VLLM_THREADS = 4


def at_16k(quantity: str, transport: str = NVLINK) -> float:
    """Return one figure of the B300 comparison at 16k tokens, in the unit of the table."""
    return published.value("roce_vs_nvlink", quantity=quantity, transport=transport, prompt_tokens=LENGTH)


def pulls(summary: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return pull time by prompt length, the published study's and this run's.

    Columns: ``prompt_tokens``, ``arm``, ``relative`` (to NVLink; in this run to its first arm), ``pull_ms`` (NaN
    where it is neither published nor to be derived), ``status`` of the ratio, ``ms_status`` of the milliseconds.

    :param summary: :func:`kvlab.analysis.split.summary` of the run
    """
    frame = published.load("roce_vs_nvlink")
    ratio = frame[frame["quantity"] == "kv_pull_time_relative"].rename(columns={"value": "relative"})
    keys = ["prompt_tokens", "transport"]
    ms = frame.loc[frame["quantity"] == "kv_pull_time", [*keys, "value", "status"]]
    ms = ms.rename(columns={"value": "pull_ms", "status": "ms_status"})
    theirs = ratio.merge(ms, on=keys, how="left").assign(arm=lambda f: f["transport"].map(_NAMES))
    mine = ordered(summary, run)
    base = mine[mine["arm"] == baseline(run)].set_index("prompt_tokens")["xfer_us"]
    mine = mine.assign(relative=mine["xfer_us"] / mine["prompt_tokens"].map(base), pull_ms=mine["xfer_us"] / 1e3)
    both = pd.concat([theirs, mine.assign(status=_HERE, ms_status=_HERE)])
    kept = both[["prompt_tokens", "arm", "relative", "pull_ms", "status", "ms_status"]]
    return kept.astype({"prompt_tokens": float}).sort_values("prompt_tokens", kind="stable", ignore_index=True)


def one_thread() -> pd.Series:
    """Return the H200's pull of about the published count and size of descriptors, posted by one thread."""
    return published.load("h200_pulls").query("descriptors == 4279 and payload_transport == 'cuda_ipc'").iloc[0]


def h200_alone() -> pd.DataFrame:
    """Return vLLM's pulls on the H200 at 16k tokens, one request in flight, by config."""
    rows = published.load("h200_vllm_pulls")
    return rows[(rows["in_flight"] == 1) & (rows["prompt_tokens"] == LENGTH)].set_index("config")


def halves(summary: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return the pull at 16k tokens in two parts (this run: its longest prompt; two agents: the published shape).

    Columns: ``arm``, ``prompt_tokens``, ``descriptors``, ``post_ms``, ``after_ms``, ``pull_ms``, ``post_share``,
    ``post_per_descriptor_us``, ``low_us``, ``high_us`` (95 percent; only this run has an interval), ``status`` of
    the split, ``post_status`` of the post per descriptor.
    """
    names = ["arm", "prompt_tokens", "descriptors", "post_ms", "after_ms", "status", "post_status"]
    rows: list[tuple[Any, ...]] = []
    for transport, arm in _NAMES.items():
        figures = (at_16k(q, transport) for q in ("descriptors_per_pull", "post_time", "after_post_time"))
        rows.append((arm, LENGTH, *figures, "derived", "published"))
    for config, r in h200_alone().loc[list(_H200)].iterrows():
        times = (r["post_ms"], r["xfer_ms"] - r["post_ms"])
        rows.append((_H200[str(config)], LENGTH, r["descriptors_per_pull"], *times, "measured", "measured"))
    one, arm = one_thread(), "H200, two agents, cuda_ipc, no threads"
    times = (one["post_us"] / 1e3, (one["xfer_us"] - one["post_us"]) / 1e3)
    rows.append((arm, np.nan, one["descriptors"], *times, "measured", "measured"))
    theirs = pd.DataFrame(rows, columns=names)
    # What is published is the post per descriptor itself, rounded; the others follow from the post.
    theirs["post_per_descriptor_us"] = theirs["post_ms"] * 1e3 / theirs["descriptors"]
    theirs.loc[[0, 1], "post_per_descriptor_us"] = [at_16k("post_per_descriptor", t) for t in _NAMES]
    mine = ordered(summary, run)
    length = mine["prompt_tokens"].fillna(0)  # imported averages may have no length
    mine = mine[length == length.max()].rename(
        columns={f"post_per_descriptor_{e}_us": f"{e}_us" for e in ("low", "high")}
    )
    mine = mine.assign(arm="this run, " + mine["arm"], post_ms=mine["post_us"] / 1e3, after_ms=mine["drain_us"] / 1e3)
    mine = mine.assign(status=_HERE, post_status=_HERE)[[*names, "post_per_descriptor_us", "low_us", "high_us"]]
    found: pd.DataFrame = pd.concat([theirs, mine], ignore_index=True)
    pull_ms = found["post_ms"] + found["after_ms"]
    return found.assign(pull_ms=pull_ms, post_share=found["post_ms"] / pull_ms)


def pull_table(summary: pd.DataFrame, run: Run) -> gt.GT:
    """Show pull time by prompt length, each value with its status."""
    return build.table(
        pulls(summary, run),
        "published_pulls",
        "Pull time by prompt length: the published study and this run",
        "prompt_tokens arm relative status pull_ms ms_status",
        "Relative to NVLink on the B300 node (30 requests at a time), and to the first arm in this run. "
        "Milliseconds are published at no length; at 16k they follow from bytes and rate. "
        "Repetitions are not published.",
        status="Ratio is",
    )


def split_chart(summary: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw post and what follows it as shares of the pull at 16k."""
    frame = halves(summary, run)
    frame["text"] = [
        f"{r['pull_ms']:,.{0 if r['pull_ms'] > 100 else 1}f} ms, {int(r['descriptors']):,} descriptors, {r['status']}"
        for r in frame.to_dict("records")
    ]
    frame["after_share"] = 1 - frame["post_share"]
    names = {"post_share": "post: issuing the reads", "after_share": "after the post, until a poll saw completion"}
    long = frame.melt(id_vars=["arm", "text"], value_vars=list(names), var_name="part", value_name="share")
    long["part"] = long["part"].map(names)
    colours = alt.Scale(domain=list(names.values()), range=[charts.POST, charts.DRAIN])
    y = alt.Y("arm:N", title=None, sort=list(frame["arm"]), axis=alt.Axis(labelLimit=260))
    bars = (
        alt.Chart(long)
        .mark_bar(height={"band": 0.7})
        .encode(
            x=alt.X("share:Q", title="Share of the pull", axis=alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1])),
            y=y,
            color=alt.Color("part:N", title="", scale=colours),
            order=alt.Order("part:N", sort="descending"),
        )
    )
    text = alt.Chart(frame).mark_text(align="left", dx=6, color="#222").encode(x=alt.datum(1), y=y, text="text:N")
    caption = (
        "Bytes and descriptors differ between the machines: compare shares, not lengths. B300: one TP rank, 30 "
        "requests at a time, number of pulls not published. H200: vLLM, one request at a time, means of 4 or 5 pulls; "
        "two agents: the median of six. "
        f"This run: medians at {charts.lengths(frame['prompt_tokens'].iloc[-1])} tokens, warm; {run.id}"
    )
    chart = alt.layer(bars, text).properties(
        width=charts.WIDTH - 100,
        height=30 * len(frame),
        title=charts.title("The pull at 16k tokens, in two", run, caption),
    )
    return charts.show(chart, "published_split", run, several=True)


def per_descriptor_chart(summary: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the post of one descriptor: published, on the H200, and in this run with its interval."""
    frame = halves(summary, run).rename(columns={"arm": "case", "post_status": "arm"})
    middle = frame["post_per_descriptor_us"]
    text = middle.map("{:.2g} µs, ".format) + frame["arm"]
    frame = frame.assign(low_us=frame["low_us"].fillna(middle), high_us=frame["high_us"].fillna(middle), text=text)
    caption = (
        "Post over descriptors at 16k tokens (this run: its longest prompt, with the 95 % interval of the median). "
        "About 125 KB a descriptor on the B300 node, 32 or 256 KiB in vLLM on the H200. vLLM gives NIXL 4 "
        "threads, and the post is their common time; the two agents post from one. A post that copies pays for bytes"
    )
    chart: Any = charts.points_with_interval(
        frame,
        charts.title("What one descriptor costs to post, published and measured", run, caption),
        x="post_per_descriptor_us",
        low="low_us",
        high="high_us",
        x_title="Post per descriptor (µs, log scale)",
        log=True,
        text="text",
    ).properties(height=28 * len(frame))
    for layer in chart.layer:
        layer.encoding.yOffset = alt.Undefined  # one point a row: nothing to set apart
    return charts.show(chart, "published_per_descriptor", run, several=True)


def bounds() -> dict[str, float]:
    """Work the published 16k pull through: what it leaves open, as numbers (ms, µs, GB/s, shares, counts).

    Copies to one peer run in order, while later ones are still being posted.  If the stream never idled, a copy took
    pull / descriptors and post / that of them were done when posting ended; a free post then saves nothing.  If no copy
    had run before posting ended, a free post saves all of it.  Both take it that posting does not slow the copies.
    """
    post, after, pull = at_16k("post_time"), at_16k("after_post_time"), at_16k("kv_pull_time")
    n, rate = at_16k("descriptors_per_pull"), at_16k("rate_per_rank")
    copy_us = pull * 1e3 / n
    rounded_ms = at_16k("bytes_per_pull") / rate * 1e3
    gb = pull / 1e3 * rate
    roce = "RoCE RDMA"
    low = {t: published.value("transport_bandwidth", "bandwidth_low_gb_s", transport=t) for t in ("NVLink", roce)}
    high = {t: published.value("transport_bandwidth", "bandwidth_high_gb_s", transport=t) for t in ("NVLink", roce)}
    step = published.load("h200_vllm_pulls").query("in_flight == 1 and config == 'cuda_ipc'")["itl_max_ms"]
    h200, one = h200_alone().loc["cuda_ipc"], one_thread()
    return {
        "post_ms": post,
        "after_ms": after,
        "pull_ms": pull,
        "pull_by_rounded_bytes_ms": rounded_ms,
        "post_share": post / pull,
        "post_share_by_rounded_bytes": post / rounded_ms,
        "post_us": at_16k("post_per_descriptor"),
        "copy_busy_us": copy_us,
        "copy_after_post_us": after * 1e3 / n,
        "done_when_posted": post * 1e3 / copy_us,
        "descriptors": n,
        "link_fast_ms": gb / high["NVLink"] * 1e3,
        "link_slow_ms": gb / low["NVLink"] * 1e3,
        "roce_low_gb_s": low[roce],
        "roce_high_gb_s": high[roce],
        "rounded_gb": at_16k("bytes_per_pull"),
        "roce_after_gb_s": gb / at_16k("after_post_time", ROCE) * 1e3,
        "roce_pull_ms": at_16k("kv_pull_time", ROCE),
        "lead_ms": pull - at_16k("kv_pull_time", ROCE),
        "threads": VLLM_THREADS,
        "thread_us": VLLM_THREADS * at_16k("post_per_descriptor"),
        "one_thread_us": one["post_us"] / one["descriptors"],
        "h200_vllm_us": h200["post_ms"] * 1e3 / h200["descriptors_per_pull"],
        "h200_gap_low_ms": float(step.min()),
        "h200_gap_high_ms": float(step.max()),
    }


_NOT_SHOWN = """What the post costs. Posting takes {post_ms:.1f} of {pull_ms:.1f} ms (derived), and copies run while
later ones are posted. If the stream never idled, a copy takes {copy_busy_us:.1f} µs against {post_us:.1f} µs to post
it, {done_when_posted:,.0f} of {descriptors:,.0f} were done when posting ended, the copies in order set the pace and not
the posting, and a free post saves nothing. If none had run by then, a copy takes {copy_after_post_us:.1f} µs and a free
post saves {post_ms:.1f} ms. The published split is the same for both: the saving lies between 0 and {post_share:.0%}.

Whose post it is. vLLM gives NIXL {threads} threads, which share a transfer of this size, and the post is their common
time. {post_us:.1f} µs a descriptor are then {thread_us:.1f} µs of one thread. On the H200 one thread took
{one_thread_us:.1f} µs for a descriptor of that size, and vLLM {h200_vllm_us:.1f} µs for one of 32 KiB (measured).
Whether the study's engines ran with {threads} is not published.

What the rest is. At the bandwidth that the guide expects of NVLink the bytes need {link_fast_ms:.1f} to
{link_slow_ms:.1f} ms; NVLink's pull goes on for {after_ms:.1f} ms after the post. Over RoCE the same bytes come in at
{roce_after_gb_s:.0f} GB/s after the post, at or above the {roce_low_gb_s:g} to {roce_high_gb_s:g} GB/s expected of it.
So the two rests are not the same thing: the second can be the wire, the first cannot.

When the data arrived. The clock ends at a poll, and an engine polls once a step; the step is not published. With polls
{lead_ms:.1f} ms apart or more, one RoCE pull of {roce_pull_ms:.1f} ms and one NVLink pull of {pull_ms:.1f} ms can hide
the same arrival, and averages over many pulls blur that without undoing it. For scale: the longest gap between two
tokens on the H200 was {h200_gap_low_ms:.0f} to {h200_gap_high_ms:.0f} ms (measured, cuda_ipc, one request at a time).

Whose time it is. With 30 requests at a time a rank's pulls share its stream or its NIC, so the time after the post also
holds other requests' copies. How many pulls there were, and whether these are means or medians, is not published.

How exact it is. {pull_ms:.1f} ms is derived from 0.53-0.56 GB; the published, rounded {rounded_gb:g} GB would make it
{pull_by_rounded_bytes_ms:.1f} ms and the post share {post_share_by_rounded_bytes:.0%} instead of {post_share:.0%}."""


def not_shown() -> str:
    """Say, with the published numbers worked through, what the published split does not show."""
    text = _NOT_SHOWN.format(**bounds()).split("\n\n")
    return "\n".join(
        textwrap.fill(" ".join(part.split()), 100, initial_indent=f"{i}. ", subsequent_indent="   ")
        for i, part in enumerate(text, 1)
    )
