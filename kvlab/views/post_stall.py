"""Views of post-stall: gaps against posts, pull phases against their controls, of a run and one beside it; verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published, runs
from kvlab.analysis import poststall
from kvlab.capture.ucx import agrees
from kvlab.runs import Run
from kvlab.views import arms, build

CPU, GPU = (f"post_stall/{name}" for name in ("cpu", "h200-one-gpu"))


class Found:
    """What analysis makes of a run, done once."""

    def __init__(self, run: Run) -> None:
        self.run = run
        gpus = run.manifest["provenance"].get("gpus") or ["GPU"]
        #: the machine, shortly
        self.where = gpus[0].removeprefix("NVIDIA ") if run.manifest["parameters"]["prefill_gpus"] else "CPU"
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


def both(run: Run) -> list[Found]:
    """Return what is found in ``run`` and in the recording to see beside it: of a GPU, or of a CPU beside a GPU's."""
    other = runs.load(CPU if run.manifest["parameters"]["prefill_gpus"] else GPU)
    other.out = run.out
    return [Found(run), Found(other)]


def table(pair: Sequence[Found]) -> gt.GT:
    """Show, for each arm and prompt length: descriptors, post, the gap it fell into, the same window of the control."""
    found, medians = [], ["descriptors", "bytes", "post_ms", "gap_ms", "control_ms", "uncertainty_ms"]
    for one in pair:
        grouped = one.met.groupby(["arm", "pulled_tokens"])
        rows = grouped[medians].median().assign(n=grouped["pulls"].sum()).reset_index()
        rows = rows.assign(where=one.where, step_ms=rows["arm"].map(one.step_ms))
        found.append(build.in_order(rows, ["pulled_tokens", "arm"], arm=arms(one.run)))
    rows = pd.concat(found, ignore_index=True)
    rows = rows.assign(mib=rows["bytes"] / 2**20, over_ms=rows["gap_ms"] - rows["control_ms"])
    return build.table(
        rows,
        "posts",
        "A post and the gap it fell into (medians)",
        "where arm pulled_tokens n descriptors mib post_ms gap_ms control_ms over_ms step_ms uncertainty_ms",
        "Ordinary step: median gap of the control phases. The gap is the longest that the post may have fallen "
        "into, so even the same window of the control is longer than an ordinary step. Prediction: difference = post.",
    )


def chart(pair: Sequence[Found]) -> charts.Shown:
    """Draw each gap against the post that fell into it and the control's gap below, with the line of slope 1.

    A panel a run, all on scales of their own: the two machines' posts differ by the factor of ten.
    """
    panels, said = [], []
    for one in pair:
        names = [f"with pulls, {a}" for a in arms(one.run)] + ["control: same window, no pull"]
        met = one.met.assign(case=one.met["pulled_tokens"].map(charts.lengths) + " prompt")
        control = met.assign(series=names[-1], gap_ms=met["control_ms"]).dropna(subset="gap_ms")
        rows = pd.concat([met.assign(series="with pulls, " + met["arm"]), control])
        x = np.array([0.0, float(met["post_ms"].max()) * 1.05])
        step, line = float(one.step_ms.median()), one.line
        drawn = {
            f"predicted: step {step:.0f} ms + post": step + x,
            f"fit: {line['a_ms']:.0f} ms + {_span(line)} x post": line["a_ms"] + line["b"] * x,
        }
        lines = pd.concat([pd.DataFrame({"post_ms": x, "gap_ms": y, "line": name}) for name, y in drawn.items()])
        axis = {"x": alt.X("post_ms:Q", title="Post of the pull (ms)"), "y": alt.Y("gap_ms:Q", title="Gap (ms)")}
        colours = [*charts.PALETTE[: len(names) - 1], "#9a9a9a"]
        legend, wide = alt.Legend(columns=1, symbolOpacity=1), alt.Legend(columns=1, symbolSize=600)
        points = (
            alt.Chart(rows[["series", "case", "post_ms", "gap_ms", "descriptors", "uncertainty_ms", "repetition"]])
            .mark_point(filled=True, size=45, opacity=0.7)
            .encode(
                **axis,
                color=alt.Color("series:N", title="", scale=alt.Scale(domain=names, range=colours), legend=legend),
                tooltip=["series", "case", "post_ms", "gap_ms", "descriptors", "uncertainty_ms", "repetition"],
            )
        )
        dashes = alt.Scale(domain=list(drawn), range=[[1, 0], [6, 4]])
        ruled = alt.Chart(lines).mark_line(color="black", strokeWidth=1.5)
        ruled = ruled.encode(**axis, strokeDash=alt.StrokeDash("line:N", title="", scale=dashes, legend=wide))
        panels.append(alt.layer(ruled, points).properties(width=330, height=300, title=one.where))
        p = one.run.manifest["parameters"]
        said.append(
            f"{one.where}: {p['steady_requests']} requests decode all the time on the engine that pulls; {one.used} of "
            f"{one.pulls} pulls came while they ran, at a time known well enough, in {one.line['blocks']} phases "
            f"({one.run.id})"
        )
    caption = f"{'; '.join(said)}; 95 % interval of the slope from whole phases; machines possibly shared"
    both_runs = alt.hconcat(*panels).resolve_scale(color="independent", strokeDash="independent")
    both_runs = both_runs.properties(title=charts.title("The gap that a post fell into", pair[0].run, caption))
    return charts.show(both_runs, "post_against_gap", pair[0].run, several=True)


def contrast_chart(pair: Sequence[Found]) -> charts.Shown:
    """Draw the longest gap of each phase, with pulls and without."""
    names = {"pull": "with pulls", "control": "control: same prefills, no pull"}
    rows = pd.concat([one.phases.assign(row=one.where + ", " + one.phases["arm"]) for one in pair])
    rows["kind"], rows["case"] = rows["kind"].map(names), rows["pulled_tokens"].map(charts.lengths) + " prompts"
    kinds, order = list(names.values()), [f"{one.where}, {a}" for one in pair for a in arms(one.run)]
    panels = []
    for row in order:
        own = rows[rows["row"] == row]
        cases = list(dict.fromkeys(own.sort_values("pulled_tokens")["case"]))
        last = row == order[-1]
        title = "Longest gap of a running request (ms, median of the phase's requests)" if last else ""
        scale = alt.Scale(domain=[0, float(rows["longest_ms"].max()) * 1.03])
        points = alt.Chart(own).mark_point(filled=True, size=60, opacity=0.75)
        points = points.encode(
            x=alt.X("longest_ms:Q", title=title, scale=scale, axis=alt.Axis(labels=last, ticks=last)),
            y=alt.Y("case:N", title=None, sort=cases),
            yOffset=alt.YOffset("kind:N", sort=kinds),
            color=alt.Color("kind:N", title="", scale=alt.Scale(domain=kinds, range=[charts.POST, charts.DRAIN])),
            tooltip=["row", "case", "kind", "longest_ms", "repetition"],
        )
        panels.append(points.properties(width=charts.WIDTH, height=76, title=alt.TitleParams(row, fontSize=12)))
    caption = f"a point a phase; {', '.join(one.run.id for one in pair)}"
    heading = charts.title("Longest gaps with pulls and without", pair[0].run, caption)
    drawn = alt.vconcat(*panels).properties(title=heading)
    return charts.show(drawn, "pull_against_control", pair[0].run, several=True)


def contrast_table(pair: Sequence[Found]) -> gt.GT:
    """Show the ratio of longest gaps, pull to control, with interval and rank test."""
    rows = pd.concat([one.ratios.assign(where=one.where) for one in pair], ignore_index=True)
    rows = rows.assign(
        interval=[f"{a:.2f} to {b:.2f}" if a == a else "too few phases" for a, b in rows[["low", "high"]].to_numpy()],
        sure=rows["different"].map({True: "yes", False: "not resolved"}),
    )
    title = "Longest gap of the running requests, pull phases over their controls"
    columns = "where arm n ratio interval p_value sure"
    return build.table(rows, "contrast", title, columns, n="Pairs of phases", ratio="Pull / control")


def related_table() -> gt.GT:
    """Show the hand-made series on one H200: the longest gap between tokens beside the mean post, by block size."""
    rows = published.load("h200_vllm_pulls")
    rows = rows[(rows["payload_transport"] == "cuda_ipc") & (rows["in_flight"] >= 8)]
    return build.table(
        rows.sort_values(["prompt_tokens", "descriptors_per_pull"]),
        "related",
        "Related: 1P1D on one H200, every request pulled, several in flight",
        "prompt_tokens block_size in_flight descriptors_per_pull post_ms itl_max_ms status",
        "vLLM 0.23.0, Llama-8B shape, cuda_ipc. No control and no steady load: it suggested this experiment.",
        digits={"post_ms": None},
        post_ms="Mean post (ms)",
    )


def _span(line: dict[str, Any]) -> str:
    return f"{line['b']:.2f}" + (f" ({line['b_low']:.2f} to {line['b_high']:.2f})" if line["b_low"] > -np.inf else "")


def verdict(found: Found) -> tuple[str, dict[str, Any]]:
    """Say whether gap = step + post holds in a run, and what pulls did to the longest gaps; with the numbers."""
    line, run, outcome = found.line, found.run, poststall.judge(found.line)
    words = {"holds": "holds", "refuted": "is REFUTED", "unresolved": "is not resolved"}[outcome]
    parts = [f"the prediction of slope 1 {words}: a gap grows by {_span(line)} ms for each ms of post it meets"]
    parts.append(f"the same windows of the control, where nothing is pulled, grow by {_span(found.placebo)}")
    for row in found.ratios.itertuples():
        sure = "" if row.different else ", not resolved"
        parts.append(f"{row.arm}: longest gaps {row.ratio:.2f} times those of the control{sure}")
    longest = found.met[found.met["pulled_tokens"] == found.met["pulled_tokens"].max()]
    medians = longest.groupby("arm")[["gap_ms", "descriptors", "bytes"]].median()
    for arm, own in medians.sort_values("descriptors").iterrows():
        size = f"{own['bytes'] / 2**20:,.0f} MiB in {own['descriptors']:,.0f} descriptors ({arm})"
        parts.append(f"a pull of {size} falls into a gap of {own['gap_ms']:.0f} ms")
    carried = run.table("verdicts")["transport"].dropna()
    if len(carried) and all(agrees(t, "shared memory") for t in carried):
        parts.append("the transport is shared memory, whose copy is inside the post")
    numbers: dict[str, Any] = {"prediction": outcome, "fit": line, "control": found.placebo}
    numbers |= {"ratios": found.ratios.to_dict("records"), "step_ms": found.step_ms.to_dict()}
    return f"{found.where} ({run.id}):\n  " + "\n  ".join([*build.contradiction(run), *parts]), numbers


def conclude(pair: Sequence[Found]) -> str:
    """Say what both runs show; write the first one's summary.json."""
    said, numbers = verdict(pair[0])
    pair[0].run.conclude(said, **numbers)
    return "\n".join([said, *(verdict(other)[0] for other in pair[1:])])
