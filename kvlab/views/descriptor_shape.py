"""Views of descriptor-shape: rate and post by descriptor, the cost model, break-evens, real knobs, the verdict."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published, runs, tables
from kvlab.analysis import compare, cost, split
from kvlab.capture.ucx import agrees
from kvlab.measures.descriptor_shape import size_text
from kvlab.runs import Run
from kvlab.views import arms, published_split
from kvlab.views.published_split import VLLM_THREADS as VLLM

PLAIN = "plain"
PART = " · "
#: from this count up NIXL's UCX backend shares a transfer among its threads (split_batch_size)
SPLIT_AT = 1024
#: descriptor size that the predictions are about, near the published 125 KB
PREDICTED_AT = 128 << 10
#: (transport, least ratio, largest ratio) of the pull in descriptors of that size to the pull in one
PREDICTIONS = (("cuda_ipc", 10.0, np.inf), ("shared memory", 0.0, 2.0), ("tcp", 0.0, 2.0))
#: part of the shapes that the cost model must describe to within FIT_WITHIN
FIT_SHARE, FIT_WITHIN = 0.9, 0.25
GOAL = 0.6
_CPU, _GPU = (f"descriptor_shape/{name}" for name in ("cpu-loopback", "h200-one-gpu"))


def both(run: Run) -> list[Run]:
    """Return ``run`` and the recording to see beside it: of a GPU, or of CPUs where ``run`` is of a GPU."""
    other = runs.load(_CPU if _memory(run) == "VRAM" else _GPU)
    other.out = run.out
    return [run, other]


def _memory(run: Run) -> str:
    return str(run.manifest["parameters"]["memory"])


def _gpu(pair: list[Run]) -> Run:
    return next(r for r in pair if _memory(r) == "VRAM")


def _where(run: Run) -> str:
    """Name a run's machine in two words or three."""
    gpus = run.manifest["provenance"].get("gpus") or []
    return f"{gpus[0].removeprefix('NVIDIA ')}, two processes" if _memory(run) == "VRAM" and gpus else "CPU"


def pulls(run: Run) -> pd.DataFrame:
    """Return the pulls with ``pull`` (the size asked for, as text) and ``variation`` (``plain``, ``contiguous``...)."""
    frame = run.table("pulls")
    parts = frame["case"].str.extract(r"^(?P<pull>.+?) in [\d,]+ x [^,]+(?:, (?P<variation>.+))?$")
    return frame.assign(pull=parts["pull"], variation=parts["variation"].fillna(PLAIN))


def plain(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.split.summary` of the plain cells by arm, pull and descriptor size asked for."""
    rows = pulls(run)
    found = split.summary(rows[rows["variation"] == PLAIN], by=("arm", "pull", "descriptor_bytes"))
    rank = {label: i for i, label in enumerate(arms(run))}
    # Below six pulls the median has no interval: its point is drawn alone.
    for name in ("rate{}_gb_s", "post_per_descriptor{}_us", "xfer{}_us"):
        for end in ("_low", "_high"):
            found[name.format(end)] = found[name.format(end)].fillna(found[name.format("")])
    found = found.assign(_pull=found.groupby("pull")["bytes"].transform("min"), _arm=found["arm"].map(rank))
    return found.sort_values(["_pull", "_arm", "descriptor_bytes"], ignore_index=True)


@cache
def models(run: Run) -> dict[str, cost.Fit]:
    """Fit the cost model to each arm's plain cells; an arm with threads has one below and one above the split."""
    rows, found = pulls(run), {}
    rows = rows[rows["variation"] == PLAIN]
    for arm in arms(run):
        mine = rows[rows["arm"] == arm]
        over = (mine["nixl_threads"] > 0) & (mine["descriptors"] >= SPLIT_AT)
        names = (f"{arm}{PART}below {SPLIT_AT:,}", f"{arm}{PART}{SPLIT_AT:,} and up") if over.any() else (arm, arm)
        for name, part in zip(names, (mine[~over], mine[over]), strict=True):
            if part["descriptors"].nunique() > 1:
                found[name] = cost.fit(part.assign(arm=name))
    return found


def _caption(run: Run, rows: pd.DataFrame) -> str:
    spread = (rows.groupby("pull")["bytes"].max() / rows.groupby("pull")["bytes"].min()).max() - 1
    same = "Same bytes at every size" if spread < 0.001 else f"Bytes of a pull agree to {spread:.0%} (counts round up)"
    n = f"{rows['n'].min()} to {rows['n'].max()}" if rows["n"].nunique() > 1 else f"{rows['n'].min()}"
    return (
        f"{same}; scattered, one in flight, busy polls; warm, {n} pulls a point, cells in a new random order every "
        f"round; whisker: 95 % of the median (from six pulls up); {run.id}; machine possibly shared"
    )


def _lines(rows: pd.DataFrame, x: str, y: str, names: list[str], titles: tuple[str, str], label: str) -> alt.LayerChart:
    """Layer a line, whiskers and points an arm, and its name at the left or right end (``label`` min, max or none).

    ``y`` has a ``{}`` for ``_low`` and ``_high``.
    """
    log = alt.Scale(type="log")
    axes = {
        "x": alt.X(f"{x}:Q", title=titles[0], scale=log, axis=_BYTES if "bytes" in x else _COUNT),
        "y": alt.Y(f"{y.format('')}:Q", title=titles[1], scale=log, axis=_COUNT),
    }
    base = alt.Chart(rows).encode(color=charts.arm_colour(names), **axes)
    columns = ["arm", "pull", "n", "descriptors", "bytes", "descriptor_bytes", y.format(""), "verdict"]
    layers = [
        base.mark_line(opacity=0.5),
        base.mark_rule(strokeWidth=2).encode(y=f"{y.format('_low')}:Q", y2=f"{y.format('_high')}:Q"),
        base.mark_point(filled=True, size=45, opacity=1).encode(tooltip=[c for c in columns if c in rows]),
    ]
    if label:
        ends = base.encode(text="arm:N").properties(data=rows.loc[rows.groupby("arm")[x].agg(f"idx{label}")])
        place = {"align": "left", **({"dx": 2, "dy": 14} if label == "min" else {"dx": 8})}
        layers.append(
            ends.mark_text(**place, fontWeight="bold").encode(stroke=alt.value("white"), strokeWidth=alt.value(4))
        )
        layers.append(ends.mark_text(**place, fontWeight="bold"))
    return alt.layer(*layers)


_DESCRIPTORS = "Descriptors of the pull, as NIXL counted them (log scale)"
_COUNT = alt.Axis(format=",~g", labelOverlap=True, tickCount=6)
_UNIT = "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
_BYTES = alt.Axis(labelExpr=_UNIT, labelOverlap=True, values=[2.0**k for k in range(13, 32, 3)])


def rate_chart(run: Run) -> charts.Shown:
    """Draw rate by descriptor size, a line an arm, a panel a pull size, under the limits of the same run."""
    rows, limits, panels = plain(run), run.table("limits"), []
    lines = limits.groupby(["bytes", "name"], as_index=False)["gb_per_s"].median()
    lines["text"] = lines["name"] + lines["gb_per_s"].map(lambda v: f" {v:,.4g}")
    titles = ("Descriptor size (log scale)", "Rate of a pull (GB/s, log scale)")
    for pull, part in rows.groupby("pull", sort=False):
        rules = alt.Chart(lines[lines["bytes"] == part["bytes"].min()]).encode(y="gb_per_s:Q", text="text:N")
        dashes = rules.mark_rule(strokeDash=[4, 3], color=charts.LIMIT)
        text = rules.mark_text(align="left", dy=-6, color=charts.LIMIT, fontSize=10).encode(x=alt.value(2))
        drawn = _lines(part, "descriptor_bytes", "rate{}_gb_s", arms(run), titles, "" if panels else "min")
        width = charts.WIDTH if rows["pull"].nunique() == 1 else 270
        panels.append(alt.layer(dashes, text, drawn).properties(width=width, height=300, title=f"{pull} a pull"))
    heading = charts.title(f"Rate by descriptor size: {_where(run)}", run, _caption(run, rows))
    chart = alt.hconcat(*panels).resolve_scale(y="shared", color="shared").properties(title=heading)
    return charts.show(chart, f"rate_{_memory(run).lower()}", run)


def post_chart(run: Run) -> charts.Shown:
    """Draw the post of one descriptor by the count of descriptors, all pull sizes in one."""
    rows = plain(run)
    titles = (_DESCRIPTORS, "Post per descriptor (µs, log scale)")
    parts = [part for _, part in rows.groupby("pull", sort=False)]
    y = "post_per_descriptor{}_us"
    layers = [_lines(p, "descriptors", y, arms(run), titles, "" if i else "max") for i, p in enumerate(parts)]
    if run.table("pulls")["nixl_threads"].max() > 0:
        rule = alt.Chart(pd.DataFrame({"n": [SPLIT_AT], "text": [f"{SPLIT_AT:,}: NIXL splits"]})).encode(x="n:Q")
        layers.append(rule.mark_rule(strokeDash=[4, 3], color=charts.LIMIT))
        layers.append(rule.mark_text(align="left", dx=4, color=charts.LIMIT).encode(y=alt.value(6), text="text:N"))
    heading = charts.title(f"What one descriptor costs to post: {_where(run)}", run, _caption(run, rows))
    chart = alt.layer(*layers).properties(width=charts.WIDTH, height=280, title=heading)
    return charts.show(chart, f"post_{_memory(run).lower()}", run)


def break_evens(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.cost.break_even` of every two models of different arms, at each pull size."""
    rows = [
        cost.break_even(a, b, float(size)).assign(pair=f"{a.arm} / {b.arm}")
        for a, b in combinations(models(run).values(), 2)
        if a.arm.split(PART)[0] != b.arm.split(PART)[0]
        for size in plain(run)["_pull"].unique()
    ]
    return pd.concat([f for f in rows if len(f)], ignore_index=True) if rows else pd.DataFrame()


def fit_chart(run: Run) -> charts.Shown:
    """Draw pull time by count: measured, fitted with its band, where two arms meet; below, every shape's residual."""
    fits, rows = models(run), plain(run)
    size, colour = float(rows["_pull"].min()), charts.arm_colour(list(fits))
    grids = {name: np.geomspace(*f.ranges["descriptors"], 40) for name, f in fits.items()}
    curve = pd.concat([cost.predict(f, grids[name], size) for name, f in fits.items()])
    shapes = pd.concat([f.residuals for f in fits.values()]).rename(columns={"xfer_residual": "residual"})
    near = shapes[shapes["bytes"] == size]
    ends = [float(shapes["descriptors"].min()), float(shapes["descriptors"].max())]
    x = alt.X("descriptors:Q", scale=alt.Scale(type="log", domain=ends), axis=_COUNT, title=_DESCRIPTORS)
    y = alt.Y("ms:Q", scale=alt.Scale(type="log"), axis=_COUNT, title="Pull time (ms, log scale)")
    base = alt.Chart(_ms(curve)).encode(x=x, color=colour)
    layers = [
        base.mark_area(opacity=0.25).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_line().encode(y=y),
        alt.Chart(_ms(near)).mark_point(filled=True, size=45).encode(x=x, y=y, color=colour),
    ]
    met = break_evens(run)
    met = met[met["descriptors"].notna() & (met["bytes"] == size) & ~met["extrapolated"]]
    if len(met):
        marks = alt.Chart(_ms(met)).encode(x=x, y=y, tooltip=["pair", "descriptors", "descriptor_bytes"])
        layers.append(marks.mark_rule(strokeWidth=3).encode(x="descriptors_low:Q", x2="descriptors_high:Q"))
        layers += [
            marks.mark_point(size=110, color="black"),
            marks.mark_text(dy=-14).encode(text=alt.value("break-even")),
        ]
    top = alt.layer(*layers).properties(width=charts.WIDTH, height=260, title=f"Pulls of {size_text(int(size))}")
    zero = alt.Chart(pd.DataFrame({"v": [0]})).mark_rule(color=charts.LIMIT).encode(y="v:Q")
    residual = alt.Y("residual:Q", title="Measured / fitted - 1", axis=alt.Axis(format="+.0%", tickCount=5))
    points = alt.Chart(shapes[["arm", "descriptors", "bytes", "residual", "pulls"]]).mark_point(filled=True, size=40)
    points = points.encode(x=x, y=residual, color=colour, tooltip=["arm", "descriptors", "bytes", "residual", "pulls"])
    bottom = alt.layer(zero, points).properties(
        width=charts.WIDTH, height=110, title="What the model leaves, all pulls"
    )
    caption = "Lines: post = a + p n (+ s B), wire = b + w n + B / bandwidth, pull = max(post, wire), fitted to medians; bands: 95 %. "
    heading = charts.title(f"The cost model: {_where(run)}", run, caption + _caption(run, rows))
    chart = alt.vconcat(top, bottom).resolve_scale(color="shared").properties(title=heading)
    return charts.show(chart, f"fit_{_memory(run).lower()}", run)


def _ms(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep what a chart of pull times needs, in ms; a missing end is the middle."""
    ends = {e: frame.get(f"xfer_{e}_us", frame["xfer_us"]).fillna(frame["xfer_us"]) / 1e3 for e in ("low", "high")}
    return frame[[c for c in frame if c in _KEPT]].assign(ms=frame["xfer_us"] / 1e3, **ends)


_KEPT = (
    "arm",
    "pair",
    "descriptors",
    "descriptors_low",
    "descriptors_high",
    "descriptor_bytes",
    "bytes",
    "extrapolated",
)


def break_even_table(pair: list[Run]) -> gt.GT:
    """Show where two arms take the same time, here, on the other machine and in the published B300 case."""
    _, by_descriptor, roce = b300()
    size = by_descriptor.ranges["bytes"][0]
    theirs = [cost.break_even(f, roce, size).assign(pair=f"{f.arm} / {roce.arm}") for f in b300()[:2]]
    frame = pd.concat(
        [*(break_evens(r).assign(where=_where(r)) for r in pair), *(t.assign(where="B300, given") for t in theirs)]
    )
    frame["mib"] = frame["bytes"] / 2**20
    frame["at"] = [
        _span(r, "descriptors") if r["descriptors"] == r["descriptors"] else "never" for r in frame.to_dict("records")
    ]
    frame["kib"] = frame["descriptor_bytes"] / 1024
    frame["who"] = np.where(
        frame["descriptors"].isna(), frame["fewer"] + " at every count", frame["fewer"] + " with fewer"
    )
    frame["marked"] = np.where(frame["extrapolated"] & frame["descriptors"].notna(), "extrapolated", "")
    return tables.show(
        frame,
        "break_even",
        title="Where two arms take the same time",
        labels={
            "where": "Machine",
            "pair": "Arms",
            "mib": "Pull (MiB)",
            "at": "Descriptors (95 %)",
            "kib": "Size then (KiB)",
            "who": "Faster",
            "marked": "",
        },
        decimals={"mib": 0, "kib": 1},
        note="From the fitted models; extrapolated: outside the counts and sizes that were measured or published.",
    )


def _span(row: dict[str, Any], name: str, unit: str = "") -> str:
    """Write a value with its interval: 12 (11 to 13)."""
    value, low, high = (row[k] for k in (name, f"{name}_low", f"{name}_high"))
    return f"{value:,.3g}{unit}" + (f" ({low:,.3g} to {high:,.3g})" if low == low else "")


@cache
def b300() -> tuple[cost.Fit, cost.Fit, cost.Fit]:
    """Return models of the published 16k pull: NVLink's wire paid by the byte, by the descriptor; RoCE's by the byte.

    One shape is published, so the wire's part cannot be told apart: the first two are its two ends.  The second takes
    the bandwidth that the guide expects of NVLink for the bytes and lays the rest on the descriptors.
    """
    at = published_split.at_16k
    n, size = at("descriptors_per_pull"), at("kv_pull_time") * at("rate_per_rank") * 1e6
    link = published.value("transport_bandwidth", "bandwidth_high_gb_s", transport="NVLink") * 1e3

    def one(name: str, transport: str, by_descriptor: bool) -> cost.Fit:
        post, pull = at("post_per_descriptor", transport), at("kv_pull_time", transport) * 1e3
        shape = pd.DataFrame({"descriptors": [n], "bytes": [size], "post_us": [post * n], "xfer_us": [pull]})
        wire = {"wire_per_byte_us": pull / size}
        if by_descriptor:
            wire = {"wire_per_byte_us": 1 / link, "wire_per_descriptor_us": (pull - size / link) / n}
        return cost.given(name, shape, post_per_descriptor_us=post, **wire)

    nvlink = published_split.NVLINK
    return (
        one("NVLink, rest by the byte", nvlink, False),
        one("NVLink, rest by the descriptor", nvlink, True),
        one("RoCE", published_split.ROCE, False),
    )


def threaded(pair: list[Run]) -> cost.Fit:
    """Return the model of pulls shared by NIXL's threads on a GPU: of these runs, else of the recording."""
    fits = (f for r in (*pair, runs.load(_GPU)) if _memory(r) == "VRAM" for f in models(r).values())
    return next(f for f in fits if f.arm.endswith("and up"))


def b300_chart(pair: list[Run]) -> charts.Shown:
    """Draw the published pull by descriptor count under each model; dashed where nothing was measured."""
    size = b300()[0].ranges["bytes"][0]
    fits = [*b300(), threaded(pair)]
    names = [*(f"B300 {f.arm}" for f in fits[:3]), f"{_where(_gpu(pair))}, {VLLM} threads (fitted)"]
    grid = np.geomspace(1, fits[0].ranges["descriptors"][0] * 16, 60)
    curve = pd.concat([cost.predict(f, grid, size).assign(arm=n) for f, n in zip(fits, names, strict=True)])
    shapes = pd.concat([f.residuals.assign(arm=n) for f, n in zip(fits[::2], names[::2], strict=False)][:2])
    x = alt.X("descriptors:Q", scale=alt.Scale(type="log"), axis=_COUNT, title="Descriptors of the pull (log scale)")
    y = alt.Y("ms:Q", scale=alt.Scale(type="log"), axis=_COUNT, title="Pull time (ms, log scale)")
    colour = charts.arm_colour(names)
    base = alt.Chart(_ms(curve)).encode(x=x, color=colour)
    layers = [
        base.mark_area(opacity=0.25).encode(y=alt.Y("low:Q"), y2="high:Q"),
        base.mark_line(strokeDash=[5, 4]).encode(y=y),
        base.mark_line(strokeWidth=3).encode(y=y).transform_filter("!datum.extrapolated"),
        alt.Chart(_ms(shapes)).mark_point(filled=True, size=110).encode(x=x, y=y, color=colour),
    ]
    caption = (
        f"{size / 1e9:.2f} GB a rank at every count. Points: the published pulls (derived). Dashed: extrapolated. One shape "
        "is published, so what NVLink's time after the post is paid for is open: by the byte and by the descriptor are its "
        "two ends. H200: one GPU, band 95 %, one in flight; B300: 30 requests at a time, number of pulls not published"
    )
    heading = charts.title("The published pull, had the connector handed over fewer regions", None, caption)
    chart = alt.layer(*layers).properties(width=charts.WIDTH, height=300, title=heading)
    return charts.show(chart, "b300", pair[0])
