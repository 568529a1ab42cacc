"""Views of relative-to-nvlink: the table of ratios, the published one beside it, what a first token is made of."""

from __future__ import annotations

import altair as alt
import great_tables as gt
import pandas as pd

from kvlab import charts, published, tables
from kvlab.analysis import cost
from kvlab.analysis import relative as analysis
from kvlab.analysis.join import ttft_parts
from kvlab.analysis.split import median_interval, warm
from kvlab.runs import Run
from kvlab.views import arms, baseline
from kvlab.views import descriptor_shape as shape

#: published quantity -> ours
PUBLISHED = {
    "kv_pull_time_relative": "KV pull, one at a time",
    "post_time_relative": "post, one at a time",
    "ttft_p50_relative": "TTFT p50, one at a time",
    "requests_per_second_relative": "requests per second, several at once",
}


def _tables(run: Run) -> dict[str, pd.DataFrame]:
    return {name: run.table(name) for name in ("pulls", "requests", "phases")}


def ratios(run: Run) -> pd.DataFrame:
    """Return every quantity relative to the first arm, with intervals (analysis.relative)."""
    return analysis.relative(_tables(run), baseline(run))


def sentence(run: Run) -> str:
    """Answer a sceptic in a line: repetitions, bytes and descriptors, cold or warm, who shared the machine."""
    pulls = warm(run.table("pulls"))
    phases = run.table("phases")
    rounds = phases[~phases["warmup"].astype(bool)].groupby("arm")["repetition"].nunique().min()
    starts = int(phases["start"].nunique())
    per = pulls.groupby(["prompt_tokens", "arm"])[["bytes", "descriptors"]].median().groupby("prompt_tokens").nunique()
    same = ["bytes" if (per["bytes"] <= 1).all() else "", "descriptors" if (per["descriptors"] <= 1).all() else ""]
    words = " and ".join(x for x in same if x)
    equal = f"same {words} in every arm" if words else "bytes and descriptors differ between arms"
    return (
        f"{equal}; {rounds} rounds in each of {starts} start{'s' if starts > 1 else ''} of each arm's engines, warm-up "
        f"left out; same prompts in every arm; {run.id}; machine possibly shared"
    )


def ratio_table(found: pd.DataFrame, run: Run) -> gt.GT:
    """Show the ratios, a row a quantity, prompt length and arm."""
    frame = found.copy()
    frame["interval"] = [
        f"{low:.2f} to {high:.2f}" if pd.notna(low) else "too few rounds"
        for low, high in zip(frame["low"], frame["high"], strict=True)
    ]
    frame["resolved"] = frame["different"].map({True: "yes", False: "no"})
    labels = {"quantity": "Quantity", "prompt_tokens": "Prompt (tokens)", "arm": "Arm", "ratio": "Ratio"}
    return tables.show(
        frame,
        "relative",
        title=f"Relative to {baseline(run)}",
        labels={**labels, "interval": "95 % interval", "resolved": "Differs from 1", "n": "Rounds"},
        decimals={"prompt_tokens": 0, "ratio": 2},
        note=f"Ratios of medians of rounds; {sentence(run)}.",
    )


def ratio_chart(found: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the ratios with intervals, a panel a quantity."""
    case = found["quantity"] + ", " + found["prompt_tokens"].map(charts.lengths)
    frame = charts.ratio_points(found).assign(case=case)
    chart = charts.points_with_interval(
        frame,
        charts.title(f"Relative to {baseline(run)}", run, sentence(run)),
        x="ratio",
        low="low",
        high="high",
        x_title="Ratio (log scale, 95 % interval)",
        log=True,
        reference=1.0,
        text="text",
    )
    return charts.show(chart, "relative", run)


def published_table() -> gt.GT:
    """Show the published ratios of RoCE to NVLink."""
    frame = published.load("roce_vs_nvlink")
    frame = frame[frame["quantity"].isin(PUBLISHED)].copy()
    frame["quantity"] = frame["quantity"].map(PUBLISHED)
    wide = frame.pivot_table(
        index=["quantity", "transport"], columns="prompt_tokens", values="value", sort=False
    ).reset_index()
    lengths = [c for c in wide.columns if not isinstance(c, str)]
    wide = wide.rename(columns={c: f"t{int(c)}" for c in lengths})
    wide["status"] = "published"
    labels = {"quantity": "Quantity", "transport": "Transport"} | {
        f"t{int(c)}": charts.lengths(float(c)) for c in lengths
    }
    return tables.show(
        wide,
        "published",
        title="The same table as published: one B300 node, relative to NVLink (cuda_ipc)",
        labels={**labels, "status": "Status"},
        decimals={f"t{int(c)}": 2 for c in lengths},
        note="RoCE vs NVLink notes (B300); vLLM 0.23, NIXL 1.3.1, Gemma 4 31B at TP4. See data/published.",
    )


def absolute_table(run: Run) -> gt.GT:
    """Show medians one request at a time: pull, post, first token, descriptors and bytes."""
    pulls, requests = (analysis.with_blocks(warm(run.table(n))) for n in ("pulls", "requests"))
    rows = []
    for arm in arms(run):
        for tokens in sorted(requests["prompt_tokens"].dropna().unique()):
            own = pulls[(pulls["arm"] == arm) & (pulls["prompt_tokens"] == tokens) & (pulls["concurrency"] == 1)]
            ask = requests[(requests["arm"] == arm) & (requests["prompt_tokens"] == tokens)]
            ask = ask[ask["concurrency"] == 1]
            if own.empty or ask.empty:
                continue
            pull, low, high = median_interval(own["xfer_us"] / 1e3)
            rows.append(
                {
                    "arm": arm,
                    "prompt_tokens": int(tokens),
                    "n": len(own),
                    "mb": own["bytes"].median() / 1e6,
                    "descriptors": own["descriptors"].median(),
                    "post_ms": own["post_us"].median() / 1e3,
                    "pull_ms": pull,
                    "interval": f"{low:.3g} to {high:.3g}",
                    "post_share": (own["post_us"] / own["xfer_us"]).median(),
                    "ttft_ms": ask["ttft_ms"].median(),
                }
            )
    names = {"arm": "Arm", "prompt_tokens": "Prompt (tokens)", "n": "Pulls", "mb": "MB", "descriptors": "Descriptors"}
    times = {"post_ms": "Post (ms)", "pull_ms": "Pull (ms)", "interval": "95 % interval (ms)"}
    return tables.show(
        pd.DataFrame(rows),
        "absolute",
        title="One request at a time, medians",
        labels={**names, **times, "post_share": "Post share", "ttft_ms": "TTFT (ms)"},
        decimals={"prompt_tokens": 0, "mb": 1, "descriptors": 0, "post_ms": 2, "pull_ms": 2, "ttft_ms": 1},
        percent=("post_share",),
        note="Descriptors: vLLM's own sum over its pulls. Post and pull: NIXL's times, from its telemetry ring.",
    )


def ttft_chart(run: Run) -> charts.Shown:
    """Draw what a first token is made of, one request at a time: prefill request, post, drain, unaccounted."""
    parts = warm(ttft_parts(run.table("pulls"), run.table("requests")))
    parts = parts[parts["concurrency"].astype(float) == 1]
    names = {
        "prefill_ms": "prefill request",
        "post_ms": "pull: post",
        "drain_ms": "pull: drain",
        "unaccounted_ms": "unaccounted",
    }
    medians = parts.groupby(["arm", "prompt_tokens"], sort=False)[list(names)].median().reset_index()
    counts = parts.groupby(["arm", "prompt_tokens"], sort=False).size().rename("n").reset_index()
    long = medians.melt(["arm", "prompt_tokens"], var_name="part", value_name="ms").merge(counts)
    long["order"] = long["part"].map({k: i for i, k in enumerate(names)})
    long["part"], long["case"] = long["part"].map(names), long["prompt_tokens"].map(charts.lengths) + " prompt"
    caption = f"medians of requests whose own pull is known; {sentence(run)}"
    order = list(dict.fromkeys(long.sort_values("prompt_tokens")["case"]))
    chart = (
        alt.Chart(long)
        .mark_bar(height={"band": 0.7})
        .encode(
            y=alt.Y("arm:N", title=None, sort=arms(run), axis=alt.Axis(labelLimit=220)),
            x=alt.X("ms:Q", title="Time to first token (ms)", stack="zero"),
            color=alt.Color("part:N", title="", scale=alt.Scale(domain=list(names.values()), range=charts.PALETTE[:4])),
            order=alt.Order("order:Q"),
            tooltip=["arm", "case", "part", alt.Tooltip("ms:Q", format=".2f"), "n"],
        )
        .properties(width=charts.WIDTH, height=34 * len(arms(run)))
        .facet(row=alt.Row("case:N", sort=order, title=None, header=alt.Header(labelAngle=0, labelAlign="left")))
        .properties(title=charts.title("What a first token is made of", run, caption))
    )
    return charts.show(chart, "ttft_parts", run)


def reconciliation_table(run: Run) -> gt.GT:
    """Show the rings' totals beside vLLM's own counters."""
    frame = analysis.reconciled(run.table("phases"))
    frame["mb"], frame["vllm_mb"] = frame["pulled_bytes"] / 1e6, frame["vllm_bytes"] / 1e6
    losses = run.manifest.get("ring_losses") or ["none"]
    names = {
        "arm": "Arm",
        "pulls": "Pulls in NIXL's ring",
        "vllm_transfers": "Transfers by vLLM",
        "mb": "MB by the ring",
    }
    return tables.show(
        frame,
        "reconciled",
        title="Every pull caught? NIXL's ring against vLLM's counters",
        labels={**names, "vllm_mb": "MB (vLLM)", "byte_difference": "Difference (B)"},
        decimals={"pulls": 0, "vllm_transfers": 0, "mb": 1, "vllm_mb": 1, "byte_difference": 0},
        note=f"Over all phases, warm-up included. Losses reported by the ring: {'; '.join(losses)}.",
    )


def answers_text(run: Run) -> str:
    """Say in a line what the answer check found."""
    found = run.table("answers")
    if found.empty:
        return "answer check: left out"
    worst, tolerance = found["largest_logprob_difference"].max(), found["tolerance"].min()
    return (
        f"answer check: {int(found['tokens'].sum())} tokens of {len(found)} prompts equal those of one engine alone; "
        f"log-probabilities at most {worst:.3f} apart (tolerance {tolerance:.3f})"
    )


def conclude(run: Run, found: pd.DataFrame) -> str:
    """Say what the ratios say, and whether the pull's difference reaches the user; write summary.json."""
    said = []
    for arm in [a for a in arms(run) if a != baseline(run)]:
        own = found[found["arm"] == arm]
        for quantity in analysis.QUANTITIES:
            rows = own[own["quantity"] == quantity]
            if rows.empty:
                continue
            sure = rows[rows["different"]]
            if rows["low"].isna().all():
                low, high = rows["ratio"].min(), rows["ratio"].max()
                said.append(f"{arm}: {quantity} {low:.2f} to {high:.2f} times, too few rounds for an interval")
            elif sure.empty:
                said.append(f"{arm}: {quantity} not told apart from {baseline(run)}")
            else:
                low, high = sure["ratio"].min(), sure["ratio"].max()
                span = f"{low:.2f}" if round(low, 2) == round(high, 2) else f"{low:.2f} to {high:.2f}"
                lengths = ", ".join(map(charts.lengths, sorted(sure["prompt_tokens"])))
                said.append(f"{arm}: {quantity} {span} times {baseline(run)}'s (at {lengths})")
    ttft = found[(found["quantity"] == "TTFT p50, one at a time") & found["different"]]
    rate = found[(found["quantity"] == "requests per second, several at once") & found["different"]]
    matters = "it matters to the user" if len(ttft) or len(rate) else "no difference for the user is resolved here"
    outcome = "THE EVIDENCE CONTRADICTS A LABEL. " if run.manifest["outcome"] == "contradicted" else ""
    verdict = f"{outcome}{'; '.join(said)}. By first token and throughput: {matters}. {answers_text(run)}."
    run.conclude(verdict, ratios=found.to_dict("records"))
    return verdict


def block_sizes(engines: Run, agents: Run, agents_arm: str) -> pd.DataFrame:
    """Return engine pulls by block size, beside what the cost model of two bare agents predicts for the same shapes.

    :param engines: a run whose arms differ in block size only
    :param agents: a descriptor-shape run on the same machine, whose model of arm ``agents_arm`` with threads predicts
    """
    pulls = analysis.with_blocks(warm(engines.table("pulls")))
    asked = analysis.with_blocks(warm(engines.table("requests")))
    # Below the split NIXL does not share a pull out among its threads.
    model = shape.models(agents)[f"{agents_arm}{shape.PART}{shape.SPLIT_AT:,} and up"]
    rows = []
    for (arm, tokens), own in pulls.groupby(["arm", "prompt_tokens"], sort=False):
        n, size = int(own["descriptors"].median()), int(own["bytes"].median())
        guess = cost.predict(model, [n], [size]).iloc[0]
        ttft = asked[(asked["arm"] == arm) & (asked["prompt_tokens"] == tokens)]["ttft_ms"]
        pull, low, high = median_interval(own["xfer_us"] / 1e3)
        rows.append(
            {
                "arm": arm,
                "prompt_tokens": round(float(str(tokens))),
                "n": len(own),
                "descriptors": n,
                "kib": size / n / 1024,
                "post_ms": own["post_us"].median() / 1e3,
                "pull_ms": pull,
                "low_ms": low,
                "high_ms": high,
                "predicted_ms": guess["xfer_us"] / 1e3,
                "extrapolated": bool(guess["extrapolated"]),
                "post_per_descriptor_us": (own["post_us"] / own["descriptors"]).median(),
                "gb_per_s": size / (pull * 1e6),
                "ttft_ms": ttft.median(),
                "ttft_n": int(ttft.notna().sum()),
            }
        )
    return pd.DataFrame(rows).sort_values(["prompt_tokens", "descriptors"], ascending=[True, False])


def block_size_table(found: pd.DataFrame) -> gt.GT:
    """Show the table of :func:`block_sizes`."""
    frame = found.assign(
        interval=[
            f"{low:.3g} to {high:.3g}" if pd.notna(low) else "too few"
            for low, high in zip(found["low_ms"], found["high_ms"], strict=True)
        ],
        marked=found["extrapolated"].map({True: "extrapolated", False: ""}),
    )
    names = {"arm": "Arm", "prompt_tokens": "Prompt (tokens)", "n": "Pulls", "descriptors": "Descriptors"}
    names |= {"kib": "KiB each"}
    times = {"post_ms": "Post (ms)", "post_per_descriptor_us": "µs a descriptor", "pull_ms": "Pull (ms)"}
    rest = {"interval": "95 % interval (ms)", "predicted_ms": "Predicted (ms)", "marked": "", "gb_per_s": "GB/s"}
    return tables.show(
        frame,
        "blocks",
        title="The same KV in fewer, larger blocks: vLLM on one H200, one request at a time",
        labels={**names, **times, **rest, "ttft_ms": "TTFT (ms)"},
        decimals={
            **dict.fromkeys(("prompt_tokens", "descriptors", "kib"), 0),
            **dict.fromkeys(("post_ms", "pull_ms", "predicted_ms", "gb_per_s", "ttft_ms"), 1),
            "post_per_descriptor_us": 2,
        },
        note="Predicted: the cost model fitted to two bare NIXL agents with four threads on the same machine "
        "(descriptor-shape), which never saw these pulls. One start of the engines an arm.",
    )


def block_size_advice(found: pd.DataFrame) -> str:
    """Say in one line what to set, and how far the prediction was off."""
    said = []
    for tokens, rows in found.groupby("prompt_tokens"):
        first, last = rows.iloc[0], rows.iloc[-1]
        said.append(
            f"at {charts.lengths(float(str(tokens)))} the pull went from {first['pull_ms']:.0f} to "
            f"{last['pull_ms']:.0f} ms, the first token from {first['ttft_ms']:.0f} to {last['ttft_ms']:.0f} ms "
            f"({first['arm']} to {last['arm']})"
        )
    off = (found["pull_ms"] / found["predicted_ms"] - 1).abs().max()
    return (
        f"Set the largest --block-size that the attention backend takes: {'; '.join(said)}. "
        f"The model of bare agents was off by at most {off:.0%}."
    )
