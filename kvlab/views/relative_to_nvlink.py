"""Views of relative-to-nvlink: the table of ratios, the published one beside it, what a first token is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import great_tables as gt
import numpy as np
import pandas as pd

from kvlab import charts, published
from kvlab.analysis import compare, cost
from kvlab.analysis import relative as analysis
from kvlab.analysis.join import ttft_parts
from kvlab.analysis.split import median_interval, warm
from kvlab.capture import vllm
from kvlab.capture.ucx import agrees
from kvlab.runs import Run
from kvlab.views import arms, baseline, build
from kvlab.views import descriptor_shape as shape

PULL, POST, TTFT, _, RATE = analysis.QUANTITIES
#: published quantity -> ours
PUBLISHED = {
    "kv_pull_time_relative": PULL,
    "post_time_relative": POST,
    "ttft_p50_relative": TTFT,
    "requests_per_second_relative": RATE,
}
ENDS = ("_ms", "_low_ms", "_high_ms")


def _tables(run: Run) -> dict[str, pd.DataFrame]:
    return {name: run.table(name) for name in ("pulls", "requests", "phases")}


def ratios(run: Run) -> pd.DataFrame:
    """Return every quantity relative to the first arm, with intervals (analysis.relative)."""
    return analysis.relative(_tables(run), baseline(run))


def sentence(run: Run) -> str:
    """Answer a sceptic in a line: repetitions, bytes and descriptors, cold or warm, who shared the machine."""
    pulls = warm(run.table("pulls"))
    phases = run.table("phases")
    rounds = phases[~phases["warmup"].astype(bool)].groupby("arm")["repetition"].nunique()
    starts = int(phases["start"].nunique())
    per = pulls.groupby(["prompt_tokens", "arm"])[["bytes", "descriptors"]].median().groupby("prompt_tokens").nunique()
    words = " and ".join(c for c in ("bytes", "descriptors") if (per[c] <= 1).all())
    equal = f"same {words} in every arm" if words else "bytes and descriptors differ between arms"
    return (
        f"{equal}; {build.span(rounds.min(), rounds.max(), 'd')} rounds in each of {starts} start"
        f"{'s' if starts > 1 else ''} of each arm's engines, warm-up left out; same prompts in every arm; {run.id}; "
        "machine possibly shared"
    )


def ratio_table(found: pd.DataFrame, run: Run) -> gt.GT:
    """Show the ratios, a row a quantity, prompt length and arm."""
    ends = found[["low", "high"]].to_numpy()
    interval = [f"{low:.2f} to {high:.2f}" if low == low else "too few rounds" for low, high in ends]
    frame = found.assign(interval=interval, resolved=found["different"].map({True: "yes", False: "no"}))
    title, note = f"Relative to {baseline(run)}", f"Ratios of medians of rounds; {sentence(run)}."
    columns = "quantity prompt_tokens arm ratio interval resolved n"
    return build.table(frame, "relative", title, columns, note, n="Rounds")


def ratio_chart(found: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the ratios with intervals, a panel a quantity."""
    case = found["quantity"] + ", " + found["prompt_tokens"].map(charts.lengths)
    frame = charts.ratio_points(found).assign(case=case)
    text = (f"Relative to {baseline(run)}", sentence(run), "ratio", "low", "high")
    how = {"x_title": "Ratio (log scale, 95 % interval)", "text": "text"}
    return build.intervals(frame, run, "relative", *text, log=True, reference=1.0, **how)


def published_table() -> gt.GT:
    """Show the published ratios of RoCE to NVLink."""
    frame = published.load("roce_vs_nvlink")
    frame = frame[frame["quantity"].isin(PUBLISHED)].copy()
    frame["quantity"] = frame["quantity"].map(PUBLISHED)
    frame["length"] = frame["prompt_tokens"].map(lambda n: f"t{n:.0f}")
    keys = ["quantity", "transport"]
    wide = frame.pivot_table(index=keys, columns="length", values="value", sort=False).reset_index()
    lengths = {f"t{n:.0f}": charts.lengths(n) for n in frame["prompt_tokens"].unique()}
    return build.table(
        wide.assign(status="published"),
        "published",
        "The same table as published: one B300 node, relative to NVLink (cuda_ipc)",
        f"quantity transport {' '.join(lengths)} status",
        "RoCE vs NVLink notes (B300); vLLM 0.23, NIXL 1.3.1, Gemma 4 31B at TP4. See data/published.",
        dict.fromkeys(lengths, 2),
        **lengths,
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
            size, count, post = own[["bytes", "descriptors", "post_us"]].median()
            share = (own["post_us"] / own["xfer_us"]).median()
            between = f"{low:.3g} to {high:.3g}" if low == low else "too few pulls"
            row = (arm, int(tokens), len(own), size / 1e6, count, post / 1e3, pull, between, share)
            rows.append((*row, ask["ttft_ms"].median()))
    columns = "arm prompt_tokens n mb descriptors post_ms pull_ms interval post_share ttft_ms"
    return build.table(
        pd.DataFrame(rows, columns=columns.split()),
        "absolute",
        "One request at a time, medians",
        columns,
        "Descriptors: vLLM's own sum over its pulls. Post and pull: NIXL's times, from its telemetry ring.",
        {"post_ms": 2, "pull_ms": 2, "ttft_ms": 1},
        interval="95 % interval (ms)",
    )


def rate_table(run: Run) -> gt.GT | str:
    """Show what the link carried with several requests at once, beside what vLLM's log calls throughput."""
    pulls = warm(run.table("pulls"))
    pulls = pulls[pulls["concurrency"] > 1]
    rows = []
    for (arm, tokens), own in pulls.groupby(["arm", "prompt_tokens"], sort=False):
        blocks = [analysis.rate_in_flight(b) for _, b in analysis.with_blocks(own).groupby("block")]
        # Pulls of one round can overlap, rounds cannot.
        each = pd.DataFrame([b for b in blocks if b]).median()
        if len(each):
            ends = f"{each['low']:.3g} to {each['high']:.3g}"
            row = (arm, tokens, len(own), each["in_flight"], each["per_pull_gb_per_s"], each["gb_per_s"], ends)
            rows.append(row)
    if not rows:
        return "no pulls with several requests at once"
    columns = "arm prompt_tokens n in_flight per_pull rate bounds"
    return build.table(
        pd.DataFrame(rows, columns=columns.split()),
        "rates",
        "Several requests at once: what the link carried (GB/s)",
        columns,
        "Medians of rounds. Bounds: a pull's start is known to about 15 ms.",
        {"in_flight": 1, "per_pull": 2, "rate": 2},
        in_flight="In flight, mean",
        per_pull="Bytes / summed pull times (vLLM's Throughput)",
        rate="Bytes / time in which any pull ran",
        bounds="Bounds",
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
    losses = "; ".join(run.manifest.get("ring_losses") or ["none"])
    title = "Every pull caught? NIXL's ring against vLLM's counters"
    note = f"Over all phases, warm-up included. Losses reported by the ring: {losses}."
    columns = "arm pulls vllm_transfers mb vllm_mb byte_difference"
    return build.table(frame, "reconciled", title, columns, note, mb="MB by the ring")


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


def user(run: Run, found: pd.DataFrame) -> str:
    """Say whether the difference between arms reaches the user: by first token, throughput, and the pull's part."""
    ttft, rate = (found[found["quantity"] == q] for q in (TTFT, RATE))
    said = []
    for rows, name in ((ttft, "first token"), (rate, "throughput")):
        if len(rows) and rows["low"].notna().all():
            said.append(f"{name} {rows['low'].min():.2f} to {rows['high'].max():.2f} times")
    matters = "it matters to the user" if ttft["different"].any() or rate["different"].any() else "not resolved"
    pulls, requests = (analysis.with_blocks(warm(run.table(n))) for n in ("pulls", "requests"))
    alone = (t[t["concurrency"] == 1].groupby(["prompt_tokens", "arm"]) for t in (pulls, requests))
    pull, first = (g[c].median().unstack() for g, c in zip(alone, ("xfer_us", "ttft_ms"), strict=True))
    part = pull.div(first[baseline(run)] * 1e3, axis=0)
    more = part.drop(columns=baseline(run)).sub(part[baseline(run)], axis=0).stack().dropna()
    # A run that broke off may lack the pulls of an arm.
    one = f"{more.max():.1%}" if len(more) else "an unknown part"
    span = f"{more.min():.1%} to {more.max():.1%}" if len(more) > 1 else one
    limits = f" (intervals of the ratio: {', '.join(said)})" if said else " (too few rounds for intervals)"
    return f"by first token and throughput {matters}{limits}; the pulls differ by {span} of the baseline's first token"


def at_once(runs: Sequence[Run]) -> pd.DataFrame:
    """Return a row for each phase of several requests at once: first tokens, rate until the last one, pulls, gaps.

    Pulls and posts are means by vLLM's own sums over a phase; ``post_median_ms`` and ``post_max_ms`` are of the
    telemetry ring, nan where the ring was not read to the end.
    """
    rows = []
    for run in runs:
        requests, metrics, pulls = warm(run.table("requests")), run.table("engine_metrics"), warm(run.table("pulls"))
        for (arm, phase), own in requests[requests["concurrency"] > 1].groupby(["arm", "phase"], sort=False):
            sums = vllm.summary(metrics[(metrics["arm"] == arm) & (metrics["phase"] == phase)])
            last_s = own["ttft_ms"].max() / 1e3
            posts = pulls.loc[(pulls["arm"] == arm) & (pulls["phase"] == phase), "post_us"] / 1e3
            row = {"run": run.path.name, "arm": arm, "prompt_tokens": own["prompt_tokens"].max()}
            row |= {"p50_s": own["ttft_ms"].median() / 1e3}
            row |= {"last_s": last_s, "rate": sums["bytes"] / own["repetition"].nunique() / last_s / 1e9}
            row |= {"pull_ms": sums["mean_xfer_ms"], "post_ms": sums["mean_post_ms"]}
            row |= {"post_median_ms": posts.median(), "post_max_ms": posts.max()}
            rows.append(row | {"gap_median_ms": own["longest_gap_ms"].median()})
    return pd.DataFrame(rows).sort_values(["arm", "prompt_tokens"], ascending=[False, True], ignore_index=True)


def at_once_table(runs: Sequence[Run]) -> gt.GT:
    """Show the table of :func:`at_once`."""
    return build.table(
        at_once(runs),
        "at_once",
        "Several requests at once: first tokens and pulls",
        "run arm prompt_tokens p50_s last_s rate pull_ms post_ms post_median_ms post_max_ms gap_median_ms",
        "Pulls and posts: means by vLLM's own sums over a phase; median and longest post: the telemetry ring. First "
        "tokens count the wait for the prefill too.",
        {"rate": 3, "pull_ms": 0, "post_ms": 0, "post_median_ms": 0, "post_max_ms": 0},
        run="Run",
        p50_s="First token, median (s)",
        last_s="Last first token (s)",
        rate="Bytes over that (GB/s)",
        pull_ms="Pull, mean (ms)",
        post_ms="Post, mean (ms)",
        post_median_ms="Post, median (ms)",
        post_max_ms="Longest post (ms)",
    )


def at_once_predictions(found: pd.DataFrame) -> str:
    """Hold what h200_tcp.yaml predicted of 30 at a time to :func:`at_once` of cuda_ipc and TCP."""
    first, other = (found[found["arm"] == arm].set_index(["run", "prompt_tokens"]) for arm in ("cuda_ipc", "TCP"))
    # A phase that one arm lacks is compared with nothing.
    longer = (first["gap_median_ms"] / other["gap_median_ms"]).dropna().droplevel("run")
    rate = other["rate"].droplevel("run")
    return "\n".join(
        (
            "30 at a time over TCP the last first token comes after all bytes at 0.3 to 0.45 GB/s: "
            f"{_all(rate.between(0.3, 0.45))} ({_each(rate, '{:.3f}')})",
            "the longest gap of running requests is longer over cuda_ipc than over TCP: "
            f"{_all(longer > 1)} ({_each(longer, '{:.1f} times')}; medians)",
        )
    )


def predictions(run: Run, found: pd.DataFrame) -> list[str]:
    """Hold the notebook's predictions of TCP against shared memory to the ratios; none where the arms are others."""
    over, said = build.transports(run), []
    for arm in arms(run)[1:]:
        if not (agrees(over.get(baseline(run), ""), "shared memory") and agrees(over.get(arm, ""), "tcp")):
            continue
        own = found[found["arm"] == arm].set_index(["quantity", "prompt_tokens"])[["low", "high"]]
        pull, post, ttft = (own.loc[q] for q in (PULL, POST, TTFT))
        checks = {
            "the pull is longer": (pull["low"] > 1, pull["high"] < 1),
            "its post is shorter": (post["high"] < 1, post["low"] > 1),
            "the first token differs by less than the pull": (ttft["high"] < pull["low"], ttft["low"] > pull["high"]),
        }
        for what, (holds, refuted) in checks.items():
            word = "holds" if holds.all() else "is REFUTED" if refuted.any() else "is not resolved"
            said.append(f"{arm}: the prediction that {what} {word}")
    return said


def tcp_predictions(run: Run) -> str:
    """Hold what params/relative_to_nvlink/h200_tcp.yaml predicted of one request at a time to medians of its pulls."""
    pulls, asked = (warm(run.table(n)).query("concurrency == 1") for n in ("pulls", "requests"))
    pulls = pulls.assign(share=100 * pulls["post_us"] / pulls["xfer_us"])
    keys, (first, other) = ["arm", "prompt_tokens"], arms(run)[:2]
    xfer, share = (pulls.groupby(keys)[c].median() for c in ("xfer_us", "share"))
    ttft = asked.groupby(keys)["ttft_ms"].median()
    checks = (
        ("the pull over TCP takes 20 to 30 times as long", xfer[other] / xfer[first], 20, 30, "times"),
        ("the post is more than half of a cuda_ipc pull", share[first], 50, 100, "percent"),
        ("the post is less than 2 percent of a TCP pull", share[other], 0, 2, "percent"),
        ("the first token comes 5 to 9 times later over TCP", ttft[other] / ttft[first], 5, 9, "times"),
    )
    said = []
    for what, seen, low, high, unit in checks:
        word = "holds" if seen.between(low, high).all() else "does NOT hold at every length"
        said.append(f"{what}: {word} ({_each(seen, '{:.3g}')}; {unit})")
    return "\n".join(said)


def conclude(run: Run, found: pd.DataFrame) -> str:
    """Say what the ratios say, and whether the pull's difference reaches the user; write summary.json."""
    said = []
    for arm in arms(run)[1:]:
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
                span = build.span(sure["ratio"].min(), sure["ratio"].max())
                lengths = ", ".join(map(charts.lengths, sorted(sure["prompt_tokens"])))
                said.append(f"{arm}: {quantity} {span} times {baseline(run)}'s (at {lengths})")
    said += [*predictions(run, found), f"does it matter to the user: {user(run, found)}", answers_text(run)]
    verdict = "\n".join([*build.contradiction(run), *said])
    run.conclude(verdict, ratios=found.to_dict("records"))
    return verdict


def _together(engines: Sequence[Run], name: str) -> pd.DataFrame:
    """Return the warm rows of a table of several runs of the same arms, as of one run with all their starts."""
    # A run's starts are numbered apart from another's by its place, so that all of its tables agree.
    frames = [run.table(name) for run in engines]
    frames = [own.assign(start=own["start"].fillna(0).astype(int) + 100 * i) for i, own in enumerate(frames)]
    return analysis.with_blocks(warm(pd.concat(frames, ignore_index=True)))


def _settings(engines: Sequence[Run]) -> dict[str, dict[str, Any]]:
    each = [{a["label"]: a for a in run.manifest["parameters"]["arms"]} for run in engines]
    return {label: arm for label, arm in each[0].items() if all(label in other for other in each)}


def block_sizes(engines: Sequence[Run], agents: Run, agents_arm: str) -> pd.DataFrame:
    """Return engine pulls by arm and descriptor count, beside what the cost model of two bare agents predicts.

    ``descriptors`` is the mean of a phase, as vLLM counts them; ``predicted_ms`` is of the model's part from NIXL's
    split up where ``split`` is set, else of its part below; ``ttft_ratio`` (with ``_low``, ``_high``) is to the largest
    block of the arms without cross-layer blocks.

    :param engines: runs of the same arms, which differ in block size or in cross-layer blocks; each run brings
        starts of their engines; an arm that one of them lacks is left out
    :param agents: a descriptor-shape run on such a machine, whose model of arm ``agents_arm`` with threads predicts
    """
    settings = _settings(engines)
    usual = {
        n: a["block_size"]
        for n, a in settings.items()
        if not (a.get("kv_connector_extra_config") or {}).get("enable_cross_layers_blocks")
    }
    largest = max(usual, key=lambda n: usual[n])
    pulls, asked = (_together(engines, name) for name in ("pulls", "requests"))
    pulls = pulls[pulls["arm"].isin(settings) & pulls["descriptors"].notna()]
    keys = ["arm", "start", "request"]
    # A request's pull tells its descriptors: neighbouring blocks are merged in a fresh cache and not in a used one.
    asked = asked[asked["ttft_ms"].notna()].merge(pulls[[*keys, "descriptors"]], on=keys)
    kind = asked["arm"] + "|" + asked["descriptors"].astype(int).astype(str)
    kinds = asked.assign(arm=kind.where(asked["arm"] != largest, largest))
    ratios = compare.ratios(kinds, baseline=largest, value="ttft_ms", block="block")
    to_largest = {(r["arm"], r["prompt_tokens"]): (r["ratio"], r["low"], r["high"]) for r in ratios.to_dict("records")}
    bare = agents.table("pulls")
    # vLLM gives NIXL four threads, as many as the agents had.
    threads = int(bare.loc[bare["arm"] == agents_arm, "nixl_threads"].max())
    # From the split up NIXL shares a pull out among its threads.
    models = shape.models(agents)
    above, below = (
        models[f"{agents_arm}{shape.PART}{n}"] for n in (f"{shape.SPLIT_AT:,} and up", f"below {shape.SPLIT_AT:,}")
    )
    rows = []
    by = ["arm", "prompt_tokens", "descriptors"]
    firsts = {key: own["ttft_ms"] for key, own in asked.groupby(by)}
    for (arm, tokens, count), own in pulls.groupby(by, sort=False):
        n, size = int(float(str(count))), int(own["bytes"].median())
        split = n >= shape.SPLIT_AT
        guess = cost.predict(above if split else below, [n], [size]).iloc[0]
        ttft = firsts[arm, tokens, count]
        pull, first = median_interval(own["xfer_us"] / 1e3), median_interval(ttft)
        same = (1.0, 1.0, 1.0) if arm == largest else to_largest.get((f"{arm}|{n}", tokens), (np.nan,) * 3)
        row = {"arm": arm, "prompt_tokens": round(float(str(tokens))), "n": len(own), "usual": arm in usual}
        row |= {"block_size": settings[str(arm)]["block_size"], "descriptors": n, "kib": size / n / 1024}
        row |= {"post_ms": own["post_us"].median() / 1e3, "gb_per_s": size / (pull[0] * 1e6)}
        row |= {f"{q}{e}": v for q, x in (("pull", pull), ("ttft", first)) for e, v in zip(ENDS, x, strict=True)}
        row |= {f"ttft_ratio{e}": v for e, v in zip(("", "_low", "_high"), same, strict=True)}
        row |= {"predicted_ms": guess["xfer_us"] / 1e3, "extrapolated": bool(guess["extrapolated"]), "split": split}
        row |= {"every_thread": n >= threads * shape.SPLIT_AT, "pull_share": pull[0] / first[0]}
        rows.append(row | {"post_per_descriptor_us": (own["post_us"] / n).median()})
    order = ["prompt_tokens", "usual", "descriptors"]
    return pd.DataFrame(rows).sort_values(order, ascending=[True, False, False], ignore_index=True)


def _ends(row: dict[Any, Any], name: str, form: str) -> str:
    low, high = (row[name.format(end)] for end in ("_low", "_high"))
    return f"{low:{form}} to {high:{form}}" if low == low else "too few"


def block_size_table(found: pd.DataFrame, title: str, note: str) -> gt.GT:
    """Show a table of :func:`block_sizes`."""
    frame = found.assign(
        arm=found["arm"].str.removeprefix("cuda_ipc, "),
        interval=[_ends(r, "pull{}_ms", ".3g") for r in found.to_dict("records")],
        ratio=[
            f"{r['ttft_ratio']:.2f} ({_ends(r, 'ttft_ratio{}', '.2f')})" if r["ttft_ratio_low"] != 1 else "1"
            for r in found.to_dict("records")
        ],
        marked=found["extrapolated"].map({True: "extrapolated", False: ""}),
        percent=found["pull_share"] * 100,
    )
    return build.table(
        frame,
        "blocks",
        title,
        "arm prompt_tokens n descriptors kib post_ms post_per_descriptor_us pull_ms interval predicted_ms marked "
        "gb_per_s ttft_ms percent ratio",
        "Predicted: the cost model fitted to two bare NIXL agents with four threads on one H200 "
        f"(descriptor-shape), which never saw these pulls. {note}",
        {"ratio": None},
        interval="95 % interval (ms)",
        ratio="TTFT ratio",
    )


def beside(first: pd.DataFrame, again: pd.DataFrame) -> pd.DataFrame:
    """Return two tables of :func:`block_sizes`, of the same arms, as one; the second's columns end in ``_again``."""
    keys = ["arm", "prompt_tokens", "descriptors", "block_size", "usual"]
    frame = first.merge(again, on=keys, suffixes=("", "_again"))
    return frame.assign(**{f"{c}_ratio": frame[f"{c}_again"] / frame[c] for c in ("pull_ms", "ttft_ms")})


def starts_table(each: Sequence[pd.DataFrame]) -> gt.GT:
    """Show tables of :func:`block_sizes`, one of each run alone, beside each other: pulls and first tokens."""
    frame = beside(*each)
    return build.table(
        frame.assign(arm=frame["arm"].str.removeprefix("cuda_ipc, ")),
        "starts",
        "The same arms on two occasions, medians",
        "arm prompt_tokens pull_ms pull_ms_again pull_ms_ratio ttft_ms ttft_ms_again ttft_ms_ratio",
        "Two machines of one kind, the arms in one order and in the reversed one.",
        {"pull_ms_again": 2, "ttft_ms_again": 1, "pull_ms_ratio": 2, "ttft_ms_ratio": 2},
        pull_ms_again="Pull, again (ms)",
        pull_ms_ratio="Pull, ratio",
        ttft_ms_again="First token, again (ms)",
        ttft_ms_ratio="First token, ratio",
    )


def block_size_chart(found: pd.DataFrame, engines: Sequence[Run], run: Run) -> charts.Shown:
    """Draw pull and first token by descriptors, the prediction and the hand-made series too; saved with ``run``."""
    names = ["first token", "pull", "pull, predicted from bare agents"]
    hand = published.load("h200_vllm_pulls").query("payload_transport == 'cuda_ipc' and in_flight == 1")
    hand = hand.assign(
        descriptors=hand["descriptors_per_pull"], ttft_ms=hand["ttft_p50_s"] * 1e3, pull_ms=hand["xfer_ms"]
    )
    kinds, panels = ["these recordings, 95 % interval", "series made by hand"], list[Any]()
    log = alt.Scale(type="log", domain=[0.3, 1500], nice=False)
    for tokens, own in found.groupby("prompt_tokens"):
        own = own.assign(text=own["block_size"].astype(str) + own["usual"].map({True: "", False: " ×"}))
        parts = [
            frame.assign(series=name, ms=frame[f"{key}_ms"], kind=kind)
            for frame, kind in ((own, kinds[0]), (hand[hand["prompt_tokens"] == tokens], kinds[1]))
            for key, name in (("ttft", names[0]), ("pull", names[1]))
        ]
        for part, key in zip(parts, ("ttft", "pull"), strict=False):
            part["low"], part["high"] = part[f"{key}_low_ms"], part[f"{key}_high_ms"]
        kept = ["descriptors", "ms", "low", "high", "series", "kind", "arm", "n", "text"]
        points = pd.concat(parts, ignore_index=True)[kept]
        guess = own.assign(series=names[2], ms=own["predicted_ms"], part=own["split"])
        guess = guess[["descriptors", "ms", "series", "part"]]
        base = alt.Chart(points).encode(
            x=alt.X(
                "descriptors:Q",
                title="Descriptors of the pull (log scale)",
                scale=alt.Scale(type="log", domain=[0.7, 100_000]),
                axis=alt.Axis(values=[1, 32, 1024, 8192, 65536], format=",d"),
            ),
            y=alt.Y("ms:Q", title="Time (ms, log scale)", scale=log, axis=alt.Axis(format=",~g", tickCount=6)),
            color=alt.Color(
                "series:N", title="", scale=alt.Scale(domain=names, range=[*charts.PALETTE[1::-1], "#000"])
            ),
        )
        shapes = alt.Shape("kind:N", title="", scale=alt.Scale(domain=kinds, range=["circle", "diamond"]))
        firsts = base.transform_filter(f"datum.kind == '{kinds[0]}' && datum.series == '{names[0]}'")
        sizes = base.transform_filter(f"datum.kind == '{kinds[0]}' && datum.series == '{names[1]}'")
        panels.append(
            alt.layer(
                base.mark_line(strokeDash=[5, 4], point=alt.OverlayMarkDef(shape="cross", size=60))
                .encode(detail="part:N")
                .properties(data=guess),
                base.mark_rule(strokeWidth=2).encode(y="low:Q", y2="high:Q"),
                base.mark_point(size=40, filled=False).encode(shape=shapes, tooltip=kept),
                firsts.mark_text(dy=-12, fontSize=9).encode(text=alt.Text("ms:Q", format=".0f")),
                sizes.mark_text(dy=14, align="left", dx=3).encode(text="text:N"),
            ).properties(width=370, height=320, title=f"{charts.lengths(float(str(tokens)))} prompt")
        )
    n = f"{found['n'].min()} to {found['n'].max()}"
    caption = (
        "At the pulls: tokens a block; at the first tokens: ms. Same bytes in every arm; one request at a time, warm, "
        f"{n} pulls a point, two starts of the engines an arm; ×: cross-layer blocks, with another model runner; "
        f"{', '.join(e.id for e in engines)}; machine possibly shared"
    )
    heading = charts.title("Pull and first token by number of descriptors: vLLM on one H200", engines[0], caption)
    return charts.show(alt.hconcat(*panels).resolve_scale(y="shared").properties(title=heading), "block_sizes", run)


def stops_mattering(found: pd.DataFrame) -> dict[int, int]:
    """Return, for each prompt length, the least block from which on no first token is resolved to be longer."""
    usual = found[found["usual"]]
    # Past the last block whose first token is resolved to be longer; all of them where none is (its maximum is nan).
    longer = usual[usual["ttft_ratio_low"] > 1].groupby("prompt_tokens")["block_size"].max()
    past = usual[~(usual["block_size"] <= usual["prompt_tokens"].map(longer))]
    least = past.groupby("prompt_tokens")["block_size"].min()
    return dict(zip(map(int, least.index), map(int, least), strict=True))


def block_size_findings(found: pd.DataFrame) -> str:
    """Say whether pulls follow the prediction, and where the block size stops mattering."""
    usual, said = found[found["usual"]], list[str]()
    off = usual["pull_ms"] / usual["predicted_ms"] - 1
    worst = usual["descriptors"].iloc[int(off.abs().argmax())]
    ends = usual.groupby("prompt_tokens").agg(few=("pull_high_ms", "last"), many=("pull_low_ms", "first"))
    word = "is not refuted: larger blocks shorten the pull" if (ends["few"] < ends["many"]).all() else "is REFUTED"
    said.append(
        f"the prediction {word}; pulls in {usual['descriptors'].min():,} descriptors and more lie "
        f"{off.min():+.0%} to {off.max():+.0%} off "
        f"the prediction, half of them within {off.abs().median():.0%}, the worst at {worst:,}"
    )
    for every, rows in usual.groupby("every_thread", sort=False):
        cost_us, counts = rows["post_per_descriptor_us"], rows["descriptors"]
        said.append(
            f"post of a descriptor with {'all' if every else 'some'} of NIXL's threads at work ({counts.min():,} to "
            f"{counts.max():,} descriptors of {rows['kib'].min():.0f} to {rows['kib'].max():.0f} KiB): "
            f"{cost_us.min():.1f} to {cost_us.max():.1f} µs"
        )
    for tokens, block in stops_mattering(found).items():
        rows = usual[usual["prompt_tokens"] == tokens]
        first, last = rows.iloc[0], rows.iloc[-1]
        at = rows[rows["block_size"] == block].iloc[0]
        said.append(
            f"{charts.lengths(tokens)}: from {first['block_size']} to {last['block_size']} tokens a block the pull "
            f"goes from {first['pull_ms']:.0f} to {last['pull_ms']:.0f} ms and the first token from "
            f"{first['ttft_ms']:.0f} to {last['ttft_ms']:.0f} ms; from {block} tokens on (pull {at['pull_share']:.0%} "
            f"of the first token) none is resolved to be longer than with {last['block_size']}"
        )
        for r in rows[rows["ttft_ratio_high"] < 1].to_dict("records"):
            said.append(
                f"{charts.lengths(tokens)}: {r['block_size']} tokens a block even gave {r['ttft_ratio']:.2f} times the "
                f"first token of {last['block_size']}, with a longer pull: starts of the engines differ by as much"
            )
    return "\n".join(said)


def again_predictions(first: pd.DataFrame, again: pd.DataFrame) -> str:
    """Hold what params/relative_to_nvlink/h200_block_sizes_again.yaml predicted to :func:`block_sizes` of both runs."""
    both = beside(first, again)
    off = both["pull_ms_ratio"] - 1
    inside = int((off.abs() <= 0.1).sum())
    said = [
        f"each pull within a tenth of the first start's: {_word(inside == len(off))} ({inside} of {len(off)} are; "
        f"{off.min():+.0%} to {off.max():+.0%})"
    ]
    moved = (both["ttft_ms_again"] - both["ttft_ms"]).abs().groupby(both["prompt_tokens"]).max()
    rows = {(r["prompt_tokens"], r["block_size"]): r for r in again.to_dict("records")}
    for tokens, by in moved.items():
        differ = rows[tokens, 64]["pull_ms"] - rows[tokens, 256]["pull_ms"]
        said.append(
            f"{charts.lengths(float(str(tokens)))}: first tokens of two starts differ by more than pulls of 64 and of "
            f"256 tokens a block: {_word(by > differ)} (by up to {by:.0f} ms; those pulls by {differ:.0f})"
        )
    at_16k = [rows[16384, size]["ttft_ms"] for size in (16, 32, 64)]
    falls = at_16k[0] > at_16k[1] > at_16k[2]
    said.append(f"16k: the first token falls from 16 to 32 to 64 tokens a block: {_word(falls)}")
    out = sorted(size for (tokens, size), r in rows.items() if tokens == 4096 and r["ttft_ratio_low"] > 1)
    said.append(
        f"4k: only 16 tokens a block stand out against 256: {_word(out == [16])} ({', '.join(map(str, out))} do)"
    )
    return "\n".join(said)


def cross_layer_findings(each: Sequence[pd.DataFrame]) -> str:
    """Hold what params/relative_to_nvlink/h200_cross_layers.yaml predicted to :func:`block_sizes` of each run.

    Cross-layer pulls into a fresh cache have one descriptor, because NIXL merged all neighbours; those into a used one
    are spoken of apart.  Where an interval of the ratio reaches over the bound, it is not resolved.
    """
    said = []
    for i, found in enumerate(each, 1):
        plain = found[found["usual"]].set_index("prompt_tokens")
        other = found[~found["usual"]]
        fresh = other[other["descriptors"] == 1].set_index("prompt_tokens")
        used = other[other["descriptors"] > other["prompt_tokens"] / other["block_size"] / 2].set_index("prompt_tokens")
        times, later = (rows["pull_ms"] / plain["pull_ms"] for rows in (fresh, used))
        low, high = fresh["pull_low_ms"] / plain["pull_high_ms"], fresh["pull_high_ms"] / plain["pull_low_ms"]
        across = (low < 1 / 30) & (high > 1 / 30)
        sure = "is not resolved at every length" if across.any() else _all(high < 1 / 30)
        less = (plain["ttft_ms"] - fresh["ttft_ms"]) / (plain["pull_ms"] - fresh["pull_ms"])
        long = plain["pull_ms"].to_dict()[16384]
        said += [
            f"run {i}: without them 16k are pulled in 200 to 260 ms: {_word(200 <= long <= 260)} ({long:.0f} ms)",
            f"run {i}: with them, in a fresh cache, in less than a thirtieth: {sure} ({_each(1 / times, '1/{:.1f}')})",
            f"run {i}: with them, in a used cache: {_each(1 / later.dropna(), '1/{:.1f}')}, nothing predicted",
            f"run {i}: the first token, fresh, comes earlier by what the pull takes less, within a third: "
            f"{_all(less.between(2 / 3, 4 / 3))} ({_each(less, '{:.2f} times that')})",
        ]
    return "\n".join(said)


def _word(holds: Any) -> str:
    return "holds" if holds else "does NOT hold"


def _all(checks: pd.Series) -> str:
    """Word a prediction of every case; without a case it is open."""
    return _word(checks.all()) if len(checks) else "is open"


def _each(values: pd.Series, form: str) -> str:
    return ", ".join(f"{form.format(v)} at {charts.lengths(float(str(n)))}" for n, v in values.items())


def block_size_advice(found: pd.DataFrame) -> str:
    """Say in one line what to set."""
    block, rows = max(stops_mattering(found).values()), found[found["usual"]]
    rows = rows[rows["prompt_tokens"] == rows["prompt_tokens"].max()].set_index("block_size")
    a, b = rows.iloc[0], rows.loc[block]
    return (
        f"Set --block-size {block} or more on both engines instead of {rows.index[0]}: at "
        f"{charts.lengths(a['prompt_tokens'])} the pull takes {b['pull_ms']:.0f} ms instead of {a['pull_ms']:.0f}, "
        f"the first token {b['ttft_ms']:.0f} instead of {a['ttft_ms']:.0f}."
    )
