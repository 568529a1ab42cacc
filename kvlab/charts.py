"""Charts: a theme, saving and showing, and the marks that several notebooks draw.  Computes nothing."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from kvlab import schema
from kvlab.runs import Run, safe_name, write_atomic

#: Okabe and Ito's palette, told apart by people with any common colour blindness (jfly.uni-koeln.de/color)
PALETTE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#F0E442"]
POST, DRAIN, LIMIT, INK = "#D55E00", "#0072B2", "#5F5F5F", "#1b1b1b"
WIDTH = 560


def theme() -> alt.theme.ThemeConfig:
    """One look for all charts: a white ground of their own, so that they read in dark JupyterLab and in print.

    Every colour of text is named: JupyterLab's dark theme fills in white for what a chart leaves open.
    """
    axis = {"labelFontSize": 11, "titleFontSize": 12, "gridColor": "#e8e8e8", "domainColor": "#888"}
    subtitle = {"subtitleFontSize": 11, "subtitleColor": "#555"}
    config: Any = {
        "background": "white",
        "padding": 12,
        "font": "DejaVu Sans, Helvetica, Arial, sans-serif",
        "view": {"stroke": None, "continuousWidth": WIDTH, "continuousHeight": 260},
        "title": {"anchor": "start", "fontSize": 15, "color": INK, "offset": 10, **subtitle},
        "style": {name: {"fill": INK} for name in ("guide-label", "guide-title", "group-title")},
        "axis": {**axis, "tickColor": "#888"},
        "legend": {"labelFontSize": 11, "titleFontSize": 11, "orient": "top", "labelLimit": 400},
        "header": {"labelFontSize": 12, "titleFontSize": 12, "labelFontWeight": "bold", "labelColor": INK},
        "range": {"category": PALETTE},
        "text": {"fontSize": 11},
    }
    return {"config": config}


alt.theme.register("kvlab", enable=True)(theme)


def title(text: str, run: Run | None = None, caption: str = "") -> alt.TitleParams:
    """Return a chart's title with its caption as subtitle; a contradicted run says so in every title."""
    if run is not None and run.manifest.get("outcome") == "contradicted":
        text = f"CONTRADICTED BY THE EVIDENCE: {text}"
    return alt.TitleParams(text, subtitle=textwrap.wrap(caption, 100) if caption else [])


class Shown:
    """A chart that is interactive where Vega-Lite is drawn (JupyterLab) and an SVG everywhere else."""

    def __init__(self, spec: dict[str, Any], svg: str, name: str) -> None:
        # JupyterLab 4 draws this type with a Vega-Lite of its own (5), offline; our marks are in both versions.
        spec = {**spec, "$schema": "https://vega.github.io/schema/vega-lite/v5.json"}
        self.bundle = {"application/vnd.vegalite.v5+json": spec, "image/svg+xml": svg, "text/plain": f"<chart {name}>"}

    def _repr_mimebundle_(self, **_: object) -> tuple[dict[str, Any], dict[str, Any]]:
        # As SVG its words can be selected and copied.
        return self.bundle, {"application/vnd.vegalite.v5+json": {"embed_options": {"renderer": "svg"}}}


_UNITS = {"ms": "ms", "us": "µs", "s": "s", "rps": "requests/s"}


def _tooltips(spec: dict[str, Any], run_id: str) -> None:
    """Give every tooltip of a chart headings with units, round numbers, and the run."""
    for part in [x for key in ("layer", "vconcat", "hconcat", "concat") for x in spec.get(key, [])]:
        _tooltips(part, run_id)
    if "spec" in spec:
        _tooltips(spec["spec"], run_id)
    told = spec.get("encoding", {}).get("tooltip")
    if not isinstance(told, list):
        return
    for one in told:
        stem, _, unit = one["field"].rpartition("_")
        name = f"{stem} ({_UNITS[unit]})" if unit in _UNITS and stem else one["field"]
        one.setdefault("title", (name[0].upper() + name[1:]).replace("_", " "))
        if one.get("type") == "quantitative":
            one.setdefault("format", ",.4~r")
    if run_id and all(one["field"] != "run" for one in told):
        spec.setdefault("transform", []).append({"calculate": json.dumps(run_id), "as": "run"})
        told.append({"field": "run", "type": "nominal", "title": "Run"})


def show(chart: alt.TopLevelMixin, name: str, run: Run | None = None, *, several: bool = False) -> Shown:
    """Render ``chart``; save NAME.svg and NAME.png among the run's charts when it has a folder to write to.

    :param several: the chart shows more than ``run``, so its tooltips do not name it
    """
    import vl_convert

    spec = chart.to_dict()
    _tooltips(spec, run.id if run is not None and not several else "")
    svg = vl_convert.vegalite_to_svg(spec)
    if run is not None and run.out is not None:
        folder = run.out / "charts"
        folder.mkdir(exist_ok=True)
        stem = safe_name(name)
        write_atomic(folder / f"{stem}.svg", svg.encode())
        write_atomic(folder / f"{stem}.png", vl_convert.vegalite_to_png(spec, scale=2))
    return Shown(spec, svg, name)


def lengths(tokens: float) -> str:
    """Write a prompt length as people do: 4k, 16k; 500 stays 500."""
    if tokens != tokens:
        return "unknown"
    return f"{tokens / 1024:g}k" if tokens % 1024 == 0 and tokens else f"{tokens:g}"


def short(value: float) -> str:
    """Write a number to three digits without an exponent: 0.123, 12.3, 1,230."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_record(points: alt.Chart, key: str, first: Any, lines: str, *, height: int) -> alt.VConcatChart:
    """Put the text of a point below the chart: of the point clicked, of ``first`` until then.

    :param key: column whose value is each point's own
    :param lines: column with the text, ``\n`` between its lines
    """
    picked = alt.selection_point(name="picked", fields=[key], value=[{key: first}], toggle=False, empty=False)
    ring = alt.condition(picked, alt.value("black"), alt.value("transparent"))
    text = (
        alt.Chart(points.data)
        .transform_filter(picked)
        .mark_text(align="left", baseline="top", lineBreak="\n", lineHeight=15, color=INK)
        .encode(text=f"{lines}:N", x=alt.value(0), y=alt.value(0))
        .properties(width=WIDTH, height=height)
    )
    return alt.vconcat(points.encode(stroke=ring, tooltip=points.encoding.tooltip).add_params(picked), text)


def ratio_points(ratios: pd.DataFrame) -> pd.DataFrame:
    """Return ratios ready for :func:`points_with_interval`: a text for each, a point where there is no interval."""
    return ratios.assign(
        low=ratios["low"].fillna(ratios["ratio"]),
        high=ratios["high"].fillna(ratios["ratio"]),
        text=ratios["ratio"].map("{:.2f}x".format) + ratios["different"].map({True: "", False: " (not resolved)"}),
    )


def arm_colour(arms: Sequence[str]) -> alt.Color:
    """Give each arm its colour, in the run's order."""
    return alt.Color("arm:N", title="", scale=alt.Scale(domain=list(arms), range=PALETTE[: len(arms)]), sort=list(arms))


def stacked_split(summary: pd.DataFrame, heading: alt.TitleParams) -> alt.TopLevelMixin:
    """Draw post and drain stacked, a bar an arm, a panel a prompt length; the whole pull's interval on top.

    :param summary: rows of :func:`kvlab.analysis.split.summary`
    """
    rows = summary.assign(
        case=summary["prompt_tokens"].map(lengths) + " prompt",
        low_ms=summary["xfer_low_us"] / 1e3,
        high_ms=summary["xfer_high_us"].fillna(summary["xfer_us"]) / 1e3,
        text=[
            f"{short(x / 1e3)} ms, post {share:.0%}"
            for x, share in zip(summary["xfer_us"], summary["post_share"], strict=True)
        ],
    )
    arms = list(dict.fromkeys(rows["arm"]))
    names = {"post_us": "post: issuing the reads", "drain_us": "drain: until completion is seen"}
    kept = ["arm", "case", "n", "descriptors", "bytes", "low_ms", "high_ms", "text"]
    long = rows.melt(id_vars=kept, value_vars=list(names), var_name="part", value_name="part_us")
    long["part_ms"] = long["part_us"] / 1e3
    long["part"] = long["part"].map(names)
    base = alt.Chart().encode(y=alt.Y("arm:N", title=None, sort=arms, axis=alt.Axis(labelLimit=200)))
    bars = base.mark_bar(height={"band": 0.7}).encode(
        x=alt.X("part_ms:Q", title="Median pull (ms)", stack="zero"),
        color=alt.Color("part:N", title="", scale=alt.Scale(domain=list(names.values()), range=[POST, DRAIN])),
        order=alt.Order("part:N", sort="descending"),
        tooltip=[
            alt.Tooltip("arm:N", title="Arm"),
            alt.Tooltip("part:N", title="Part"),
            alt.Tooltip("part_ms:Q", title="Median (ms)", format=".3f"),
            alt.Tooltip("low_ms:Q", title="Whole pull, 95 % from (ms)", format=".3f"),
            alt.Tooltip("high_ms:Q", title="to (ms)", format=".3f"),
            alt.Tooltip("n:Q", title="Pulls"),
            alt.Tooltip("descriptors:Q", title=schema.label("pulls", "descriptors"), format=","),
            alt.Tooltip("bytes:Q", title=schema.label("pulls", "bytes"), format=","),
        ],
    )
    whisker = base.mark_rule(color="black", strokeWidth=1.5).encode(x="low_ms:Q", x2="high_ms:Q")
    text = base.mark_text(align="left", dx=6, color="#222").encode(x="high_ms:Q", text="text:N")
    order = list(dict.fromkeys(rows.sort_values("prompt_tokens")["case"]))
    return (
        alt.layer(bars, whisker, text, data=long)
        .properties(width=WIDTH, height=34 * len(arms))
        .facet(row=alt.Row("case:N", sort=order, title=None, header=alt.Header(labelAngle=0, labelAlign="left")))
        .properties(title=heading)
    )


def points_with_interval(
    frame: pd.DataFrame,
    heading: alt.TitleParams,
    *,
    x: str,
    low: str,
    high: str,
    x_title: str,
    y: str = "case",
    y_title: str | None = None,
    log: bool = False,
    reference: float | None = None,
    limits: pd.DataFrame | None = None,
    text: str | None = None,
) -> alt.TopLevelMixin:
    """Draw a point and its interval for each row of ``frame``: arms in colour and offset, ``y`` down the side.

    :param reference: a value to mark with a line (1 for a ratio)
    :param limits: columns ``name`` and ``value``: labelled lines, such as the rate of a memory copy
    :param text: column to write beside each point
    """
    arms = list(dict.fromkeys(frame["arm"]))
    scale = alt.Scale(type="log") if log else alt.Scale(zero=reference is None)
    base = alt.Chart(frame).encode(
        y=alt.Y(f"{y}:N", title=y_title, sort=list(dict.fromkeys(frame[y])), axis=alt.Axis(labelLimit=240)),
        yOffset=alt.YOffset("arm:N", sort=arms),
        color=arm_colour(arms),
    )
    named = {x: x_title, low: "Interval from", high: "to"}
    wanted = [c for c in ("arm", y, x, low, high, "n", "run") if c in frame.columns]
    tooltip = [alt.Tooltip(c, title=named[c]) if c in named else alt.Tooltip(c) for c in wanted]
    layers = [
        base.mark_rule(strokeWidth=2).encode(x=alt.X(f"{low}:Q", title=x_title, scale=scale), x2=f"{high}:Q"),
        base.mark_point(filled=True, size=70, opacity=1).encode(x=alt.X(f"{x}:Q", scale=scale), tooltip=tooltip),
    ]
    if text:
        layers.append(base.mark_text(align="left", dx=8).encode(x=f"{high}:Q", text=f"{text}:N"))
    if reference is not None:
        line = alt.Chart(pd.DataFrame({"v": [reference]}))
        layers.insert(0, line.mark_rule(strokeDash=[4, 3], color=LIMIT).encode(x="v:Q"))
    if limits is not None and len(limits):
        rules = alt.Chart(limits)
        layers.append(rules.mark_rule(strokeDash=[4, 3], color=LIMIT).encode(x="value:Q"))
        layers.append(
            rules.mark_text(angle=270, align="right", dy=-7, color=LIMIT, fontSize=10).encode(
                x="value:Q", y=alt.value(4), text="name:N"
            )
        )
    height = max(120, 26 * len(arms) * frame[y].nunique())
    return alt.layer(*layers).properties(width=WIDTH, height=height, title=heading)
