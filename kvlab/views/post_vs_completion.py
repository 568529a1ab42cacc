"""Views of post-vs-completion: the split, the cost of a descriptor, the rate, the ratio, the verdict."""

from __future__ import annotations

import great_tables as gt
import pandas as pd

from kvlab import charts, tables
from kvlab.analysis import pairs
from kvlab.capture.ucx import agrees
from kvlab.runs import Run
from kvlab.views import arms, baseline, caption, ordered


def _known(summary: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Call a post-bound arm synchronous where the evidence names shared memory, which copies inside the post.

    Where descriptors of one size are pulled, times alone cannot tell a cost by the byte from one by the descriptor.
    """
    verdicts = run.table("verdicts")
    pairs = zip(verdicts["arm"], verdicts["transport"], strict=True)
    copies = {a for a, t in pairs if isinstance(t, str) and agrees(t, "shared memory")}
    found = summary["arm"].isin(copies) & (summary["verdict"] == "post-bound")
    return summary.assign(verdict=summary["verdict"].mask(found, "synchronous"))


def split_table(summary: pd.DataFrame, run: Run) -> gt.GT:
    """Show medians of post, drain and pull with the pull's interval, a row an arm and prompt length."""
    frame = ordered(_known(summary, run), run)
    for name in ("post", "drain", "xfer", "xfer_low", "xfer_high"):
        frame[f"{name}_ms"] = frame[f"{name}_us"] / 1e3
    frame["interval"] = frame.apply(lambda r: f"{r['xfer_low_ms']:.1f} to {r['xfer_high_ms']:.1f}", axis=1)
    frame["interval"] = frame["interval"].where(frame["xfer_low_us"].notna())
    frame["gb"] = frame["bytes"] / 1e9
    return tables.show(
        frame,
        "split",
        title="The pull in two parts",
        labels={
            "arm": "Arm",
            "prompt_tokens": "Prompt (tokens)",
            "n": "Pulls",
            "descriptors": "Descriptors",
            "gb": "GB",
            "post_ms": "Post (ms)",
            "drain_ms": "Drain (ms)",
            "xfer_ms": "Pull (ms)",
            "interval": "95 % interval (ms)",
            "post_share": "Post share",
            "verdict": "Bound by",
        },
        decimals={"prompt_tokens": 0, "descriptors": 0, "gb": 2, "post_ms": 2, "drain_ms": 2, "xfer_ms": 2},
        percent=("post_share",),
        note="Medians. Post and drain are medians of their own and need not add up to the median pull.",
    )


def split_chart(summary: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw post and drain stacked, by arm and prompt length."""
    heading = charts.title(
        "Where the time of a pull goes", run, caption(run, run.table("pulls")) + "; whisker: 95 % of the median pull"
    )
    return charts.show(charts.stacked_split(ordered(summary, run), heading), "split", run)


def _cases(summary: pd.DataFrame, run: Run) -> pd.DataFrame:
    frame = ordered(summary, run)
    return frame.assign(case=frame["prompt_tokens"].map(charts.lengths) + " prompt")


def per_descriptor_chart(summary: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the post's cost of one descriptor, with its interval."""
    frame = _cases(summary, run)
    frame["text"] = frame["post_per_descriptor_us"].map(lambda v: f"{v:.2g} µs")
    chart = charts.points_with_interval(
        frame,
        charts.title("What one descriptor costs to post", run, caption(run, run.table("pulls"))),
        x="post_per_descriptor_us",
        low="post_per_descriptor_low_us",
        high="post_per_descriptor_high_us",
        x_title="Post per descriptor (µs, log scale)",
        log=True,
        text="text",
    )
    return charts.show(chart, "post_per_descriptor", run)


def rate_chart(summary: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw bytes over pull time beside the limits measured in the same run."""
    frame = _cases(summary, run)
    frame["text"] = frame["rate_gb_s"].map(lambda v: f"{v:.2g} GB/s")
    limits = run.table("limits")
    every = [*frame["rate_gb_s"], *limits["gb_per_s"]]
    wide = max(every) > 30 * min(every)
    lines = limits.groupby("name")["gb_per_s"].median().rename("value").reset_index()
    lines["name"] = lines.apply(lambda r: f"{r['name']} {r['value']:.1f}", axis=1)
    chart = charts.points_with_interval(
        frame,
        charts.title("Rate of one pull against this machine's limits", run, caption(run, run.table("pulls"))),
        x="rate_gb_s",
        low="rate_low_gb_s",
        high="rate_high_gb_s",
        x_title="Rate of one pull (GB/s, log scale)" if wide else "Rate of one pull (GB/s)",
        log=wide,
        limits=lines,
        text="text",
    )
    return charts.show(chart, "rate", run)


def pairs_table(run: Run) -> gt.GT | str:
    """Show the rate of each pair of agents and of all together against the slowest link; words where one is all."""
    pulls = run.table("pulls")
    if pulls.get("pair", pd.Series(dtype=int)).nunique() < 2:
        return "one pair of agents an arm: nothing to add up"
    return tables.show(
        ordered(pairs.rates(pulls, run.table("limits")), run),
        "pairs",
        title="Pairs that pull at once",
        labels={
            "arm": "Arm",
            "prompt_tokens": "Prompt (tokens)",
            "pair": "Pair",
            "link": "Link",
            "rounds": "Rounds",
            "gb_per_s": "Rate (GB/s)",
            "link_gb_per_s": "Plain socket (GB/s)",
            "share": "Rate / socket",
        },
        decimals={"prompt_tokens": 0, "gb_per_s": 3, "link_gb_per_s": 2},
        percent=("share",),
        note="Medians over the rounds. All together: all bytes over the time from the first start to the last end, "
        "against the slowest link's plain TCP socket, one stream of it, measured while nobody pulled.",
    )


def ratio_chart(ratios: pd.DataFrame, run: Run) -> charts.Shown | str:
    """Draw the ratio of median pull times to the baseline arm, with its interval; words where one arm is all."""
    if ratios.empty:
        return "one arm only: nothing to compare"
    frame = _cases(ratios, run)
    frame["text"] = frame.apply(lambda r: f"{r['ratio']:.2f}x {'' if r['different'] else '(not resolved)'}", axis=1)
    chart = charts.points_with_interval(
        frame,
        charts.title(f"Pull time relative to {baseline(run)}", run, caption(run, run.table("pulls"))),
        x="ratio",
        low="low",
        high="high",
        x_title="Ratio of median pull times (95 % interval)",
        reference=1.0,
        text="text",
    )
    return charts.show(chart, "ratio", run)


def conclude(run: Run, summary: pd.DataFrame, ratios: pd.DataFrame) -> str:
    """Say in words what the numbers say, arm by arm and against the prediction; write summary.json."""
    sentences, summary = [], _known(summary, run)
    for arm in arms(run):
        rows = summary[summary["arm"] == arm]
        shares = rows["post_share"]
        span = (
            f"{shares.min():.0%}"
            if round(shares.min(), 2) == round(shares.max(), 2)
            else f"{shares.min():.0%} to {shares.max():.0%}"
        )
        bound = ", ".join(dict.fromkeys(rows["verdict"]))
        sentences.append(f"{arm}: post {span} of the pull, {bound}")
    for arm in dict.fromkeys(ratios["arm"] if len(ratios) else ()):
        rows = ratios[ratios["arm"] == arm]
        if arm != baseline(run):
            low, high = rows["ratio"].min(), rows["ratio"].max()
            sure = "" if rows["different"].all() else ", not resolved at every length"
            sentences.append(f"{arm} takes {low:.1f} to {high:.1f} times as long as {baseline(run)}{sure}")
    checks = predictions(summary, run.table("verdicts"))
    sentences += [
        f"prediction for {c['transport']} {'holds' if c['holds'] else 'is REFUTED'} ({c['text']})" for c in checks
    ]
    outcome = run.manifest["outcome"]
    if outcome == "contradicted":
        sentences.insert(0, "THE EVIDENCE CONTRADICTS A LABEL: " + "; ".join(run.manifest.get("contradictions", [])))
    verdict = "On this machine " + "; ".join(sentences) + "."
    run.conclude(
        verdict,
        split=summary.to_dict("records"),
        ratios=ratios.to_dict("records"),
        predictions=checks,
    )
    return verdict


def predictions(summary: pd.DataFrame, verdicts: pd.DataFrame) -> list[dict[str, object]]:
    """Hold the notebook's prediction against the split: shared memory posts half or more, TCP a fifth or less.

    Arms are sorted by what the evidence says they are, never by their label.
    """
    found: list[dict[str, object]] = []
    for row in verdicts.drop_duplicates(["arm", "transport"]).itertuples():
        shares = summary.loc[summary["arm"] == row.arm, "post_share"]
        if not isinstance(row.transport, str) or shares.empty:
            continue
        if agrees(row.transport, "shared memory"):
            found.append(
                {
                    "transport": row.transport,
                    "holds": bool(shares.min() >= 0.5),
                    "text": f"least post share {shares.min():.0%}",
                }
            )
        elif agrees(row.transport, "tcp"):
            found.append(
                {
                    "transport": row.transport,
                    "holds": bool(shares.max() <= 0.2),
                    "text": f"largest post share {shares.max():.0%}",
                }
            )
    return found
