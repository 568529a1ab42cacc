"""Views of post-stall: gaps against posts, pull phases against their controls, the verdict."""

from __future__ import annotations

from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published, tables
from kvlab.analysis import poststall
from kvlab.capture.ucx import agrees
from kvlab.runs import Run
from kvlab.views import arms


class Found:
    """What analysis makes of a run, done once."""

    def __init__(self, run: Run) -> None:
        requests = run.table("requests")
        self.met = poststall.met(run.table("pulls"), requests, run.table("phases"))
        self.line = poststall.fit(self.met)
        #: the same fit to the same windows of the control phases: 0 where nothing but the pull lengthens gaps
        self.placebo = poststall.fit(self.met, "control_ms")
        self.phases, self.ratios = poststall.contrast(requests)
        every = poststall.gaps(requests)
        control = every[every["kind"] == "control"]
        self.step_ms = control.groupby("arm")["gap_ms"].median()
        self.pulls = int((~run.table("pulls")["warmup"].fillna(False).astype(bool)).sum())
        self.used = int(self.met["pulls"].sum())


def _caption(run: Run, found: Found) -> str:
    p = run.manifest["parameters"]
    return (
        f"{p['steady_requests']} requests decode all the time on the engine that pulls; {found.used} of {found.pulls} "
        f"pulls, the others came when no request ran or at an uncertain time; {run.id}; machine possibly shared"
    )


def table(found: Found, run: Run) -> gt.GT:
    """Show, for each arm and prompt length: descriptors, post, the gap it fell into, the same window of the control."""
    times = ["post_ms", "gap_ms", "control_ms", "uncertainty_ms"]
    grouped = found.met.groupby(["arm", "pulled_tokens"])
    rows = grouped[["descriptors", "bytes", *times]].median().assign(n=grouped["pulls"].sum()).reset_index()
    rows["mib"] = rows["bytes"] / 2**20
    rows["step_ms"] = rows["arm"].map(found.step_ms)
    rows["over_ms"] = rows["gap_ms"] - rows["control_ms"]
    order = {a: i for i, a in enumerate(arms(run))}
    rows = rows.sort_values(["pulled_tokens", "arm"], key=lambda c: c.map(order) if c.name == "arm" else c)
    return tables.show(
        rows,
        "posts",
        title="A post and the gap it fell into (medians)",
        labels={
            "arm": "Arm",
            "pulled_tokens": "Prompt (tokens)",
            "n": "Pulls",
            "descriptors": "Descriptors",
            "mib": "MiB",
            "post_ms": "Post (ms)",
            "gap_ms": "Gap it fell into (ms)",
            "control_ms": "Same window, no pull (ms)",
            "over_ms": "Difference (ms)",
            "step_ms": "Ordinary step (ms)",
            "uncertainty_ms": "Start known to ± (ms)",
        },
        decimals={"pulled_tokens": 0, "descriptors": 0, "mib": 0} | dict.fromkeys([*times, "over_ms", "step_ms"], 1),
        note="Ordinary step: median gap of the control phases. The gap is the longest that the post may have fallen "
        "into, so even the same window of the control is longer than an ordinary step. Prediction: difference = post.",
    )


def chart(found: Found, run: Run) -> charts.Shown:
    """Draw each gap against the post that fell into it, the fitted line, and the prediction of slope 1."""
    top = float(found.met["post_ms"].max()) * 1.05
    x = np.array([0.0, top])
    line, base = found.line, float(found.step_ms.median())
    fitted = f"fit: {line['a_ms']:.1f} ms + {line['b']:.2f} x post"
    lines = pd.concat(
        [
            pd.DataFrame({"post_ms": x, "gap_ms": line["a_ms"] + line["b"] * x, "line": fitted}),
            pd.DataFrame({"post_ms": x, "gap_ms": base + x, "line": f"predicted: step {base:.1f} ms + post"}),
        ]
    )
    rows = found.met.assign(case=found.met["pulled_tokens"].map(charts.lengths) + " prompt")
    cases = list(dict.fromkeys(rows.sort_values("pulled_tokens")["case"]))
    axis = {"x": alt.X("post_ms:Q", title="Post of the pull (ms)"), "y": alt.Y("gap_ms:Q", title="Longest gap (ms)")}
    tips = ["arm", "case", "post_ms", "gap_ms", "control_ms", "descriptors", "uncertainty_ms"]
    points = (
        alt.Chart(rows)
        .mark_point(filled=True, size=60, opacity=0.75)
        .encode(
            **axis, color=charts.arm_colour(arms(run)), shape=alt.Shape("case:N", title="", sort=cases), tooltip=tips
        )
    )
    dashes = alt.StrokeDash("line:N", title="", scale=alt.Scale(domain=[fitted, lines["line"].iloc[-1]]))
    drawn = alt.Chart(lines).mark_line(color=charts.LIMIT).encode(**axis, strokeDash=dashes)
    heading = charts.title("The gap that a post fell into", run, _caption(run, found))
    both = alt.layer(drawn, points).properties(width=charts.WIDTH, height=320, title=heading)
    return charts.show(both, "post_against_gap", run)


def contrast_chart(found: Found, run: Run) -> charts.Shown:
    """Draw the longest gap of each phase, with pulls and without."""
    names = {"pull": "with pulls", "control": "control: same prefills, no pull"}
    rows = found.phases.assign(kind=found.phases["kind"].map(names))
    rows["case"] = rows["pulled_tokens"].map(charts.lengths) + " prompts"
    cases = list(dict.fromkeys(rows.sort_values("pulled_tokens")["case"]))
    kinds = list(names.values())
    points = (
        alt.Chart(rows)
        .mark_point(filled=True, size=70, opacity=0.75)
        .encode(
            x=alt.X("longest_ms:Q", title="Longest gap of a running request (ms, median of the phase's requests)"),
            y=alt.Y("case:N", title=None, sort=cases),
            yOffset=alt.YOffset("kind:N", sort=kinds),
            color=alt.Color("kind:N", title="", scale=alt.Scale(domain=kinds, range=[charts.POST, charts.DRAIN])),
            tooltip=["arm", "case", "kind", "longest_ms", "repetition"],
        )
        .properties(width=charts.WIDTH, height=90)
        .facet(row=alt.Row("arm:N", sort=arms(run), title=None, header=alt.Header(labelAngle=0, labelAlign="left")))
        .properties(title=charts.title("Longest gaps with pulls and without", run, f"a point a phase; {run.id}"))
    )
    return charts.show(points, "pull_against_control", run)


def contrast_table(found: Found) -> gt.GT:
    """Show the ratio of longest gaps, pull to control, with interval and rank test."""
    rows = found.ratios.assign(
        interval=[f"{a:.2f} to {b:.2f}" if a == a else "–" for a, b in found.ratios[["low", "high"]].to_numpy()],
        sure=found.ratios["different"].map({True: "yes", False: "not resolved"}),
    )
    labels = {"arm": "Arm", "n": "Pairs of phases", "ratio": "Pull / control", "interval": "95 % interval"}
    return tables.show(
        rows,
        "contrast",
        title="Longest gap of the running requests, pull phases over their controls",
        labels=labels | {"p_value": "p (signed ranks)", "sure": "Different"},
        decimals={"ratio": 2, "p_value": 3},
    )


def related_table() -> gt.GT:
    """Show the hand-made series on one H200: the longest gap between tokens beside the mean post, by block size."""
    rows = published.load("h200_vllm_pulls")
    rows = rows[(rows["payload_transport"] == "cuda_ipc") & (rows["in_flight"] >= 8)]
    return tables.show(
        rows.sort_values(["prompt_tokens", "descriptors_per_pull"]),
        "related",
        title="Related: 1P1D on one H200, every request pulled, several in flight",
        labels={
            "prompt_tokens": "Prompt (tokens)",
            "block_size": "Block (tokens)",
            "in_flight": "In flight",
            "descriptors_per_pull": "Descriptors",
            "post_ms": "Mean post (ms)",
            "itl_max_ms": "Longest gap (ms)",
            "status": "Status",
        },
        decimals={"prompt_tokens": 0, "descriptors_per_pull": 0},
        note="vLLM 0.23.0, Llama-8B shape, cuda_ipc. No control and no steady load: it suggested this experiment.",
    )


def _span(line: dict[str, Any]) -> str:
    return f"{line['b']:.2f}" + (f" ({line['b_low']:.2f} to {line['b_high']:.2f})" if line["b_low"] > -np.inf else "")


def conclude(found: Found, run: Run) -> str:
    """Say whether gap = step + post holds here, and what pulls did to the longest gaps; write summary.json."""
    line, outcome = found.line, poststall.judge(found.line)
    words = {"holds": "holds", "refuted": "is REFUTED", "unresolved": "is not resolved"}[outcome]
    parts = [f"the prediction of slope 1 {words}: a gap grows by {_span(line)} ms for each ms of post it meets"]
    parts.append(f"the same windows of the control, where nothing is pulled, grow by {_span(found.placebo)}")
    for row in found.ratios.itertuples():
        sure = "" if row.different else ", not resolved"
        parts.append(f"{row.arm}: longest gaps {row.ratio:.2f} times those of the control{sure}")
    carried = run.table("verdicts")["transport"].dropna()
    if len(carried) and all(agrees(t, "shared memory") for t in carried):
        parts.append("the transport is shared memory, whose copy is inside the post")
    verdict = "On this machine " + "; ".join(parts) + "."
    if run.manifest["outcome"] == "contradicted":
        verdict = (
            "THE EVIDENCE CONTRADICTS A LABEL: " + "; ".join(run.manifest.get("contradictions", [])) + ". " + verdict
        )
    numbers: dict[str, Any] = {
        "prediction": outcome,
        "fit": line,
        "control": found.placebo,
        "ratios": found.ratios.to_dict("records"),
    }
    run.conclude(verdict, **numbers, step_ms=found.step_ms.to_dict())
    return verdict
