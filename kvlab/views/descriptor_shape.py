"""Views of descriptor-shape: rate, post, cost model, break-even and variations of a run and one beside it; the verdict.

What is published stands in :mod:`kvlab.views.few_large_regions`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, runs, tables
from kvlab.analysis import compare, cost, split, tcp
from kvlab.capture.ucx import agrees
from kvlab.measures.descriptor_shape import size_text
from kvlab.runs import Run
from kvlab.views import arms, build
from kvlab.views.build import transports

PLAIN, PART = "plain", " · "
#: from this count up NIXL's UCX backend shares a transfer among its threads
SPLIT_AT = tcp.PIECE
#: descriptor size that the predictions are about, next to the published 125 KB
PREDICTED_AT = 128 << 10
#: transport -> least and largest ratio of the pull in descriptors of that size to the pull in one
PREDICTIONS = {"cuda_ipc": (10.0, np.inf), "shared memory": (0.0, 2.0), "tcp": (0.0, 2.0)}
#: part of the shapes that the cost model must describe to within FIT_WITHIN
FIT_SHARE, FIT_WITHIN = 0.9, 0.25
#: part of a device copy's rate that the best arm is to reach
GOAL = 0.6
CPU, GPU = (f"descriptor_shape/{name}" for name in ("cpu-loopback", "h200-one-gpu"))
_AXIS = alt.Axis(format=",~g", labelOverlap=True, tickCount=6)
_UNIT = "datum.value >= 1048576 ? datum.value / 1048576 + ' MiB' : datum.value / 1024 + ' KiB'"
_SIZES = alt.Axis(labelExpr=_UNIT, labelOverlap=True, values=[2.0**k for k in range(13, 32, 3)])
COUNT = "Descriptors of the pull, as NIXL counts them (log scale)"


def both(run: Run) -> list[Run]:
    """Return ``run`` and the recording to see beside it: of a GPU, or of CPUs where ``run`` is of a GPU."""
    other = runs.load(CPU if on_gpu(run) else GPU)
    other.out = run.out
    return [run, other]


def on_gpu(run: Run) -> bool:
    """Tell whether the run pulled between GPU memories."""
    return bool(run.manifest["parameters"]["memory"] == "VRAM")


def where(run: Run) -> str:
    """Name a run's machine, shortly."""
    gpus = run.manifest["provenance"].get("gpus") or ["GPU"]
    return f"{gpus[0].removeprefix('NVIDIA ')}, VRAM" if on_gpu(run) else "CPU, DRAM"


def pulls(run: Run) -> pd.DataFrame:
    """Return the pulls with ``pull`` (the size asked for, as text) and ``variation`` (``plain``, ``contiguous``...)."""
    frame = run.table("pulls")
    parts = frame["case"].str.extract(r"^(?P<pull>.+?) in [\d,]+ x [^,]+(?:, (?P<variation>.+))?$")
    return frame.assign(pull=parts["pull"], variation=parts["variation"].fillna(PLAIN))


@cache
def plain(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.split.summary` of the plain cells by arm, pull and descriptor size asked for."""
    rows = pulls(run)
    found = split.summary(rows[rows["variation"] == PLAIN], by=("arm", "pull", "descriptor_bytes"))
    found = found.assign(pull_bytes=found.groupby("pull")["bytes"].transform("min"))
    found = build.in_order(found, ["pull_bytes", "arm", "descriptor_bytes"], arm=arms(run))
    return found.reset_index(drop=True)


@cache
def models(run: Run) -> dict[str, cost.Fit]:
    """Fit the cost model to each arm's plain cells; an arm with threads has one below and one above the split."""
    rows, found = pulls(run), {}
    for arm in arms(run):
        mine = rows[(rows["variation"] == PLAIN) & (rows["arm"] == arm) & (rows["post_us"] > 0)]
        # Neighbours that meet by chance are merged: a case is one shape, of its median count.
        mine = mine.assign(descriptors=mine.groupby("case")["descriptors"].transform("median"))
        over = (mine["nixl_threads"] > 0) & (mine["descriptors"] >= SPLIT_AT)
        names = (f"{arm}{PART}below {SPLIT_AT:,}", f"{arm}{PART}{SPLIT_AT:,} and up") if over.any() else (arm, arm)
        for name, part in zip(names, (mine[~over], mine[over]), strict=True):
            if part["descriptors"].nunique() > 1:
                found[name] = cost.fit(part.assign(arm=name))
    return found


def break_evens(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.cost.break_even` of every two models of different transports, at the least pull."""
    over, size = transports(run), float(plain(run)["pull_bytes"].min())
    found = [pd.DataFrame({"descriptors": [], "extrapolated": []})]
    for a, b in combinations(models(run).values(), 2):
        if len({over.get(f.arm.split(PART)[0], f.arm) for f in (a, b)}) == 2:
            found.append(cost.break_even(a, b, size).assign(pair=f"{a.arm} / {b.arm}"))
    return pd.concat(found[1:] or found, ignore_index=True)


def show_rows(rows: list[dict[str, str]], name: str, title: str, note: str = "") -> gt.GT:
    """Show rows whose keys are the headings."""
    frame = pd.DataFrame(rows)
    return tables.show(frame, name, title=title, labels={str(c): str(c) for c in frame}, note=note)


def span(value: float, low: float = np.nan, high: float = np.nan) -> str:
    """Write a value with its interval, where there is one: ``12 (11 to 13)``."""
    text = [f"{v:,.3g}" if abs(v) < 1000 else f"{v:,.0f}" for v in (value, low, high)]
    return text[0] if np.isnan(low) else f"{text[0]} ({text[1]} to {text[2]})"


def points(frame: pd.DataFrame, x: str, y: str, scale: float = 1) -> pd.DataFrame:
    """Name what is drawn ``x``, ``y``, ``low``, ``high``; a missing end is the middle (a median of few pulls)."""
    low, high = (frame[y.format(e)].fillna(frame[y.format("")]) / scale for e in ("_low", "_high"))
    return frame.assign(x=frame[x], y=frame[y.format("")] / scale, low=low, high=high)


def marks(frame: pd.DataFrame, names: Sequence[str], titles: tuple[str, str], *wanted: str) -> Any:
    """Layer marks (keys of ``made``) over :func:`points` on log scales; ``model`` parts the lines of an arm."""
    log, about = alt.Scale(type="log"), ("arm", "n", "descriptors", "bytes", "y", "low", "high", "verdict")
    base = alt.Chart(frame[[c for c in (*about, "x", "model", "extrapolated") if c in frame]]).encode(
        x=alt.X("x:Q", title=titles[0], scale=log, axis=_SIZES if "size" in titles[0] else _AXIS),
        y=alt.Y("y:Q", title=titles[1], scale=log, axis=_AXIS),
        color=charts.arm_colour(names),
        detail="model:N" if "model" in frame else alt.Detail(),
    )
    ends = base.encode(text="arm:N").properties(data=frame.loc[frame.groupby("arm")["x"].idxmin()])
    place: dict[str, Any] = {"align": "left", "dx": 4, "dy": 13, "fontWeight": "bold"}
    made = {
        "band": lambda: base.mark_area(opacity=0.25).encode(y="low:Q", y2="high:Q"),
        "line": lambda: base.mark_line(opacity=0.6),
        "dash": lambda: base.mark_line(strokeDash=[5, 4]),
        "whisker": lambda: base.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q"),
        "point": lambda: base.mark_point(filled=True, size=50, opacity=1).encode(
            tooltip=[c for c in about if c in frame]
        ),
        "halo": lambda: ends.mark_text(**place, stroke="white", strokeWidth=4),
        "label": lambda: ends.mark_text(**place),
    }
    return alt.layer(*(made[name]() for name in wanted))


def rule(at: float, text: str, across: bool) -> list[Any]:
    """Return a dashed line with its label: a limit ``across``, or a count down the chart."""
    base = alt.Chart(pd.DataFrame({"at": [at], "text": [text]})).encode(**{"y" if across else "x": "at:Q"})
    label = base.mark_text(align="left", dx=3, dy=-6 if across else 6, color=charts.LIMIT, fontSize=10)
    place = {"x" if across else "y": alt.value(0)}
    return [base.mark_rule(strokeDash=[4, 3], color=charts.LIMIT), label.encode(text="text:N", **place)]


def _finish(chart: alt.TopLevelMixin, name: str, heading: str, run: Run, caption: str = "") -> charts.Shown:
    rows = plain(run)
    spread = (rows.groupby("pull")["bytes"].max() / rows["pull_bytes"].groupby(rows["pull"]).first()).max() - 1
    same = "Same bytes at every size" if spread < 0.001 else f"Bytes agree to {spread:.0%} (counts are rounded up)"
    n = f"{rows['n'].min()} to {rows['n'].max()}" if rows["n"].nunique() > 1 else f"{rows['n'].min()}"
    own = run.manifest["parameters"]
    polls = f"polled every {own['poll_interval_ms']:g} ms" if own["poll_interval_ms"] else "busy polls"
    how = (
        f"{own['shape']}, {own['in_flight']} in flight, {polls}; warm, {n} pulls a point, cells in a new random order "
        f"every round; interval: 95 % of the median, from six pulls up; {run.id}; machine possibly shared"
    )
    how = f"imported averages, {own['in_flight']} in flight; {run.id}" if run.manifest.get("imported") else how
    chart = chart.properties(title=charts.title(f"{heading}: {where(run)}", run, f"{caption}{same}; {how}"))
    return charts.show(chart, f"{name}_{'vram' if on_gpu(run) else 'dram'}", run)


def rate_chart(run: Run) -> charts.Shown:
    """Draw rate by descriptor size, a line an arm, a panel a pull size, under the limits of the same run."""
    rows, panels = plain(run), list[Any]()
    limits = run.table("limits").groupby(["bytes", "name"])["gb_per_s"].median().reset_index()
    for pull, part in rows.groupby("pull", sort=False):
        own = limits[limits["bytes"] == part["bytes"].min()]
        lines = [m for r in own.itertuples() for m in rule(r.gb_per_s, f"{r.name} {r.gb_per_s:,.4g}", True)]
        wanted = ("line", "whisker", "point", *([] if panels else ["halo", "label"]))
        titles = ("Descriptor size (log scale)", "Rate of a pull (GB/s, log scale)")
        drawn = marks(points(part, "descriptor_bytes", "rate{}_gb_s"), arms(run), titles, *wanted)
        width = charts.WIDTH if rows["pull"].nunique() == 1 else 270
        panels.append(alt.layer(*lines, drawn).properties(width=width, height=300, title=f"{pull} a pull"))
    chart = alt.hconcat(*panels).resolve_scale(y="shared", color="shared")
    return _finish(chart, "rate", "Rate by descriptor size", run)


def post_chart(run: Run) -> charts.Shown | str:
    """Draw the post of one descriptor by the count of descriptors, all pull sizes in one."""
    if plain(run)["post_us"].isna().all():
        return "the post is not known apart from the pull"
    frame = points(plain(run), "descriptors", "post_per_descriptor{}_us").assign(model=lambda f: f["pull"])
    drawn = marks(frame, arms(run), (COUNT, "Post per descriptor (µs, log scale)"), "line", "whisker", "point")
    threads = run.table("pulls")["nixl_threads"].max() > 0
    lines = rule(SPLIT_AT, f"{SPLIT_AT:,}: NIXL splits", False) if threads else []
    chart = alt.layer(*lines, drawn).properties(width=charts.WIDTH, height=280)
    return _finish(chart, "post", "What one descriptor costs to post", run)


def fit_chart(run: Run) -> charts.Shown | str:
    """Draw pull time by count: measured, fitted with its band, where transports meet; below, all residuals."""
    if not models(run):
        return "no cost model: it takes post and pull of two counts of descriptors or more in one arm"
    fits, size = models(run), float(plain(run)["pull_bytes"].min())
    curve = pd.concat([cost.predict(f, np.geomspace(*f.ranges["descriptors"], 40), size) for f in fits.values()])
    curve = points(curve, "descriptors", "xfer{}_us", 1e3).assign(model=curve["arm"])
    shapes = pd.concat([f.residuals for f in fits.values()]).assign(x=lambda f: f["descriptors"])
    shapes["y"] = shapes["xfer_us"] / 1e3
    # Both parts of an arm with threads have its colour; a line stays a part.
    curve, shapes = (f.assign(arm=f["arm"].str.split(PART).str[0]) for f in (curve, shapes))
    titles = (COUNT, "Pull time (ms, log scale)")
    layers = [marks(curve, arms(run), titles, "band", "line")]
    layers.append(marks(shapes[shapes["bytes"] == size], arms(run), titles, "point"))
    met = break_evens(run)
    for n in met.loc[met["descriptors"].notna() & (met["extrapolated"] == False), "descriptors"]:  # noqa: E712
        layers += rule(n, "break-even", False)
    top = alt.layer(*layers).properties(width=charts.WIDTH, height=260, title=f"Pulls of {size_text(int(size))}")
    zero = alt.Chart(pd.DataFrame({"v": [0]})).mark_rule(color=charts.LIMIT).encode(y="v:Q")
    dots = marks(shapes, arms(run), titles, "point").layer[0]
    dots = dots.encode(y=alt.Y("xfer_residual:Q", title="Residual", axis=alt.Axis(format="+.0%", tickCount=5)))
    dots.data = shapes[["arm", "x", "descriptors", "bytes", "y", "xfer_residual"]]
    heading = "What the model leaves, pulls of every size: measured / fitted - 1"
    bottom = alt.layer(zero, dots).properties(width=charts.WIDTH, height=110, title=heading)
    caption = (
        "Lines: post = a + p n (+ s B), wire = b + w n + B / bandwidth, pull = max(post, wire), fitted to all plain "
        "cells; bands: 95 %. "
    )
    chart = alt.vconcat(top, bottom).resolve_scale(color="shared")
    return _finish(chart, "fit", "The cost model", run, caption)


def ratios(run: Run) -> pd.DataFrame:
    """Return each variation's pull time as a ratio to the plain cell: ``over`` (the arm), ``arm`` (the variation)."""
    rows = pulls(run)
    first = rows[rows["variation"] != PLAIN].groupby(["pull", "descriptor_bytes", "arm"]).size().index
    rows = rows[rows.set_index(["pull", "descriptor_bytes", "arm"]).index.isin(first)]
    rows = rows.assign(over=rows["arm"], arm=rows["variation"])
    return compare.ratios(rows, baseline=PLAIN, by=("over", "descriptor_bytes"))


def variations_chart(run: Run) -> charts.Shown | str:
    """Draw the variations as ratios to the plain cell, or say that there are none."""
    if (pulls(run)["variation"] == PLAIN).all():
        return "no variations were measured"
    frame = ratios(run).sort_values(["arm", "over", "descriptor_bytes"], ascending=[False, True, True])
    frame["case"] = frame["over"] + ", " + frame["descriptor_bytes"].map(size_text)
    text = frame["ratio"].map("{:.2g}x".format) + frame["different"].map({True: "", False: " (not resolved)"})
    chart = charts.points_with_interval(
        charts.ratio_points(frame).assign(text=text), alt.TitleParams(""), x="ratio", low="low", high="high",
        text="text", log=True, reference=1.0, x_title="Pull time / that of the plain cell (log scale, 95 %)",
    )  # fmt: skip
    caption = "One thing changed at a time. In flight: time of one of the pulls, all posted by one caller in turn. "
    return _finish(chart, "variations", "Variations of the plain cell", run, caption)


def break_even_table(pair: list[Run], others: pd.DataFrame) -> gt.GT:
    """Show where two transports take the same time: in these runs, and in ``others`` (with ``where``)."""
    rows = []
    for r in pd.concat([*(break_evens(r).assign(where=where(r)) for r in pair), others]).to_dict("records"):
        row = {"Machine": r["where"], "Arms": r["pair"], "Pull": size_text(int(r["bytes"]))}
        met = ("none", "–", f"{r['fewer']} at every count", "")
        if not np.isnan(r["descriptors"]):
            counts = span(*(r[f"descriptors{e}"] for e in ("", "_low", "_high")))
            each = f"{r['descriptor_bytes'] / 1024:,.0f}"
            met = (counts, each, f"{r['fewer']} with fewer", "extrapolated" if r["extrapolated"] else "")
        rows.append(row | dict(zip(("Descriptors (95 %)", "KiB each", "Faster", " "), met, strict=True)))
    note = "From the cost models. Extrapolated: outside the counts and sizes that were measured or published."
    return show_rows(rows, "break_even", "Where two transports take the same time", note)


def cost_table(pair: list[Run], others: list[dict[str, str]]) -> gt.GT:
    """Show what a descriptor costs by transport and thread count, with intervals; ``others``: rows not fitted here."""
    rows = []
    for run in pair:
        threads = run.table("pulls").groupby("arm")["nixl_threads"].max()
        for fit in models(run).values():
            got = fit.parameters.set_index("parameter")[["value", "low", "high"]].astype(float)
            n = threads[fit.arm.split(PART)[0]]
            row = {"Machine": where(run), "Arm": fit.arm, "Threads": f"{n:g}" if n == n else "not known"}
            for part in ("Post", "Wire"):
                row[f"{part} a descriptor (µs)"] = span(*got.loc[f"{part.lower()}_per_descriptor_us"])
            rate, own = got.loc["bandwidth_gb_s"], fit.residuals["xfer_residual"].abs()
            text = span(*rate) if np.isfinite(rate["value"]) else f"not seen, {rate['low']:.3g} or more"
            if (byte := got.loc["post_per_byte_us"])["value"] > 0:
                text = span(*(1e-3 / byte[["value", "high", "low"]])) + ", in the post"
            row |= {"Bandwidth (GB/s)": text, "Residual": f"median {own.median():.0%}, worst {own.max():.0%}"}
            rows.append(row | {"Status": "fitted"})
    note = (
        "0: the fit puts nothing there. A synchronous transport pays for bytes in the post. Rows not fitted are "
        "post over count of one shape, without an interval."
    )
    return show_rows(rows + others, "cost", "What one descriptor costs, by transport and thread count", note)


def shares(run: Run) -> pd.DataFrame:
    """Return each arm's rate in one descriptor over a plain copy's in the same rounds; empty without limits."""
    rows = pulls(run)
    whole = rows[(rows["variation"] == PLAIN) & ~rows["warmup"] & (rows["descriptor_bytes"] == rows["bytes"])]
    copy = run.table("limits").query("kind == 'memory'").assign(arm="copy", xfer_us=lambda f: f["seconds"] * 1e6)
    kept = ["arm", "bytes", "repetition", "xfer_us"]
    if whole.empty or copy.empty:
        return pd.DataFrame()
    found = compare.ratios(pd.concat([whole[kept], copy[kept]]), baseline="copy", by=("bytes",))
    found[["share", "share_high", "share_low"]] = 1 / found[["ratio", "low", "high"]]
    return found.sort_values("share", ignore_index=True)


def gains(run: Run) -> pd.DataFrame:
    """Return the smallest pull in descriptors of about PREDICTED_AT over that in one, a row an arm (``over``)."""
    rows = pulls(run)
    rows = rows[(rows["variation"] == PLAIN) & (rows["pull"] == plain(run)["pull"].iloc[0])]
    sizes = rows["descriptor_bytes"]
    small = min(sizes.unique(), key=lambda s: abs(np.log(s / PREDICTED_AT)))
    rows = rows.assign(over=rows["arm"], arm=np.where(sizes == small, "many", "one"))
    rows = rows[sizes.isin([small, sizes.max()])]
    if small == sizes.max():
        return pd.DataFrame()
    return compare.ratios(rows, baseline="one", by=("over",)).assign(descriptor_bytes=small)


def predictions(over: dict[str, str], gained: pd.DataFrame, residuals: pd.Series, best: float) -> list[dict[str, Any]]:
    """Hold the predictions against the numbers: ``holds`` True, False, or None where the interval does not tell.

    :param over: arm -> transport, by evidence
    :param gained: :func:`gains`
    :param residuals: of the pull, every shape of every model
    :param best: the best arm's share of a device copy; NaN: no GPU
    """
    found: list[dict[str, Any]] = []
    for r in gained.to_dict("records"):
        for name, (least, most) in PREDICTIONS.items():
            if agrees(over.get(r["over"], ""), name):
                holds = True if least <= r["low"] and r["high"] <= most else None
                holds = False if r["high"] < least or r["low"] > most else holds
                ratio = span(r["ratio"], r["low"], r["high"])
                text = f"{size_text(r['descriptor_bytes'])} take {ratio} times one descriptor"
                found.append({"what": f"{r['over']} ({over[r['over']]})", "holds": holds, "text": text})
    near = float((residuals.abs() <= FIT_WITHIN).mean()) if len(residuals) else np.nan
    text = f"{near:.0%} of {len(residuals)} shapes within {FIT_WITHIN:.0%}" if len(residuals) else "nothing to fit"
    found.append({"what": "the cost model", "holds": near >= FIT_SHARE if len(residuals) else None, "text": text})
    if not np.isnan(best):
        found.append({"what": f"{GOAL:.0%} of a device copy", "holds": best >= GOAL, "text": f"best arm {best:.0%}"})
    return found


def verdict(run: Run) -> tuple[str, dict[str, Any]]:
    """Say what one run shows, with the numbers behind it."""
    share, gained = shares(run), gains(run)
    residuals = pd.concat([pd.Series(dtype=float), *(f.residuals["xfer_residual"] for f in models(run).values())])
    best = share["share"].max() if on_gpu(run) and len(share) else np.nan
    checks = predictions(transports(run), gained, residuals, best)
    words = {True: "holds", False: "is REFUTED", None: "is not resolved"}
    said = [f"prediction for {c['what']} {words[c['holds']]}: {c['text']}" for c in checks]
    for r in share.tail(1).to_dict("records"):
        percent = span(*(r[f"share{e}"] * 100 for e in ("", "_low", "_high")))
        said.append(f"best arm {r['arm']}, {size_text(r['bytes'])} in one descriptor: {percent} % of a copy")
    numbers = {"predictions": checks, "shares": share.to_dict("records"), "gains": gained.to_dict("records")}
    return f"{where(run)} ({run.id}):\n  " + "\n  ".join([*build.contradiction(run), *said]), numbers
