"""chunk-first beside others: the recordings from one GPU and the published bars, each with its status."""

from __future__ import annotations

import altair as alt
import great_tables as gt
import pandas as pd

from kvlab import charts, published, runs
from kvlab.runs import Run
from kvlab.views import build
from kvlab.views.chunk_first import GAPS, summary

#: the recording from one GPU
GPU = "chunk_first/h200-one-gpu"


def _bars(run: Run, where: str) -> pd.DataFrame:
    rows = summary(run)
    rows = rows[rows["replicas"] & rows["chunk_tokens"].notna()]
    return rows[["rate_rps", "chunk_tokens", *GAPS]].assign(where=where, status="measured", source=run.id)


def beside(run: Run) -> pd.DataFrame:
    """Return longest gaps by chunk: this run, the recordings from one GPU, the published bars, with their status."""
    known = published.load("chunk_stall").rename(
        columns={"max_num_batched_tokens": "chunk_tokens", "rate_per_gpu_rps": "rate_rps"}
    )
    known["where"] = known["model"] + ", " + known["workload"]
    gpu = runs.load(GPU)
    # A recording is not beside itself.
    found = {run.path: _bars(run, "this run")} | {gpu.path: _bars(gpu, "one H200, Llama-8B shape")}
    rows = pd.concat([*found.values(), known], ignore_index=True)
    rows["where"] += rows["rate_rps"].map(lambda r: f", {r:g} requests/s")
    return rows[["where", "chunk_tokens", *GAPS, "status", "source"]]


def beside_chart(rows: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the bars of :func:`beside`: a panel a source, each with a scale of its own."""
    y = alt.Y("chunk_tokens:O", title="Chunk", sort="descending")
    base = alt.Chart(rows).encode(y=y, tooltip=["where", "chunk_tokens", *GAPS, "status", "source"])
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("gap_median_ms:Q", title="Longest gap (ms)"),
        color=alt.Color("status:N", title="", scale=alt.Scale(domain=["measured", "figure"], range=charts.PALETTE[:2])),
    )
    span = base.mark_rule(strokeWidth=1.5).encode(x="gap_p10_ms:Q", x2="gap_p90_ms:Q")
    order = list(dict.fromkeys(rows["where"]))
    caption = "bar: median, line: p10 to p90 of the requests' longest gaps; figure: read off a published figure"
    chart = (
        alt.layer(bars, span)
        .properties(width=250, height=90)
        .facet(facet=alt.Facet("where:N", sort=order, title=None), columns=2)
        .resolve_scale(x="independent", y="independent")
        .properties(title=charts.title("The same question elsewhere", run, caption))
    )
    return charts.show(chart, "beside_published", run, several=True)


def steps_table(*found: Run) -> gt.GT | str:
    """Show the measured steps of the runs that have any: a chunk of a long prompt beside one running request."""
    parts = [r.table("steps").assign(run=r.id) for r in {r.path: r for r in found}.values() if r.has("steps")]
    if not parts:
        return "no step times were measured"
    keys = ["run", "arm", "chunk_tokens"]
    each = pd.concat(parts).groupby([*keys, "prefix_tokens"], as_index=False).agg(step_ms=("step_ms", "median"))
    what = {"n": "size", "first": "first", "step_ms": "median", "last": "last"}
    rows = each.groupby(keys, as_index=False).agg(**{name: ("step_ms", how) for name, how in what.items()})
    rows = rows.sort_values(["run", "chunk_tokens"], ascending=[True, False])
    return build.table(
        rows,
        "steps",
        "Steps that carry a chunk of a long prompt (ms)",
        "run arm chunk_tokens n first step_ms last",
        "At each prefix the median of the prompts; first: at prefix 0, last: at the longest prefix.",
        {"first": 1, "last": 1},
        arm="Configuration",
        n="Prefixes",
        first="First",
        step_ms="Median",
        last="Last",
    )
