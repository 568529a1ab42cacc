"""Views of chunk-first: stalls by prefill chunk, what a p99 hides, tuned replicas against 1P1D over pairs of limits."""

from __future__ import annotations

import altair as alt
import great_tables as gt
import pandas as pd

from kvlab import charts
from kvlab.analysis import compare, stalls
from kvlab.errors import BadInput
from kvlab.runs import Run
from kvlab.views import build

BY = ("arm", "chunk_tokens", "rate_rps")
TUNED = "tuned replicas"
GAPS = ["gap_p10_ms", "gap_median_ms", "gap_p90_ms"]


def _disaggregated(run: Run) -> str:
    return str(run.manifest["parameters"]["pd_arm"]["label"])


def requests(run: Run) -> pd.DataFrame:
    """Return the run's requests; an offered rate that is not known (imported runs) is what was served a second."""
    rows = run.table("requests")
    if not run.manifest.get("imported") or rows["rate_rps"].notna().all():
        return rows
    own = rows.assign(end_s=rows["start_s"] + rows["e2e_ms"] / 1e3).groupby(
        ["arm", "chunk_tokens", "concurrency", "phase", "repetition"], dropna=False
    )
    seconds = own["end_s"].transform("max") - own["start_s"].transform("min")
    return rows.assign(rate_rps=rows["rate_rps"].fillna(own["end_s"].transform("count") / seconds.where(seconds > 0)))


def summary(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.stalls.summary` by configuration and rate: chunks from large to small, then 1P1D."""
    rows = stalls.summary(requests(run), BY)
    rows["replicas"] = rows["arm"] != _disaggregated(run)
    rows = rows.sort_values(["rate_rps", "replicas", "chunk_tokens"], ascending=[True, False, False])
    rows["case"] = rows["rate_rps"].map(lambda r: f"{r:.4g} requests/s" if r == r else "rate not known")
    return rows.reset_index(drop=True)


def _caption(run: Run, rows: pd.DataFrame) -> str:
    p = run.manifest["parameters"]
    arrivals = "the same Poisson arrivals everywhere"
    if run.manifest.get("imported"):
        arrivals = "imported: arrivals not known, a rate that was not told is requests served a second"
        arrivals += "" if rows["gap_median_ms"].notna().any() else ", gaps not known and not judged"
    return (
        f"{p['prompt_tokens']:,} tokens in, {p['output_tokens']} out, {arrivals}; "
        f"{rows['n'].min()} requests each; {run.id}; machine possibly shared"
    )


def stall_table(rows: pd.DataFrame, name: str = "stalls") -> gt.GT:
    """Show stalls, first token and throughput beside the system-wide p99, and whose stall that p99 hides."""
    return build.table(
        rows,
        name,
        "Longest gap of each request, beside the p99 of all gaps",
        f"arm rate_rps n failed {' '.join(GAPS)} itl_p99_ms hidden ttft_ms output_tokens_per_s",
        "ITL p99 pools the gaps of all requests. Stalls above p99: share of requests whose longest gap is longer "
        "than it, so that it says nothing of them. 1P1D: what its decode engine does while it pulls.",
        arm="Configuration",
        n="Requests",
        ttft_ms="TTFT, median (ms)",
    )


def stall_chart(rows: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw p10, median and p90 of the longest gaps by configuration, with the ITL p99 as a tick."""
    order = list(dict.fromkeys(rows["arm"]))
    base = alt.Chart().encode(y=alt.Y("arm:N", title=None, sort=order, axis=alt.Axis(labelLimit=220)))
    x = alt.X("gap_p10_ms:Q", title="Longest gap of a request (ms, log scale)", scale=alt.Scale(type="log"))
    span = base.mark_rule(strokeWidth=3, color=charts.DRAIN).encode(x=x, x2="gap_p90_ms:Q")
    middle = base.mark_point(filled=True, size=90, opacity=1, color=charts.DRAIN).encode(
        x="gap_median_ms:Q", tooltip=["arm", "rate_rps", *GAPS, "itl_p99_ms", "hidden", "n"]
    )
    p99 = base.mark_tick(thickness=3, size=22, color=charts.POST).encode(x="itl_p99_ms:Q")
    heading = charts.title(
        "Stalls by prefill chunk",
        run,
        "blue: p10, median, p90 of the requests' longest gaps; red: ITL p99 over all gaps; " + _caption(run, rows),
    )
    chart = (
        alt.layer(span, middle, p99, data=rows)
        .properties(width=charts.WIDTH, height=28 * len(order))
        .facet(row=alt.Row("case:N", title=None, header=alt.Header(labelAngle=0, labelAlign="left")))
        .properties(title=heading)
    )
    return charts.show(chart, "stalls", run)


def ttft_chart(rows: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw the median TTFT of every configuration with its interval."""
    frame = rows.assign(text=rows["output_tokens_per_s"].map(lambda v: f"{v:.0f} tokens/s out"))
    words = ("What the chunk does to the first token", _caption(run, rows))
    ends, title = (
        ("ttft_ms", "ttft_low_ms", "ttft_high_ms"),
        "Median time to first token (ms, log scale, 95 % interval)",
    )
    return build.intervals(frame, run, "ttft", *words, *ends, x_title=title, log=True, text="text")


def ranking(run: Run) -> pd.DataFrame:
    """Rank over the run's pairs of limits; tuned replicas (at each pair their best chunk) against 1P1D, if it ran.

    Columns of :func:`kvlab.analysis.stalls.rank`, and ``chunk``: the largest one that serves the replicas' best load.
    """
    p = run.manifest["parameters"]
    rows = requests(run)
    cells = stalls.grid(rows, p["ttft_limits_ms"], p["gap_limits_ms"])
    chunk = rows.dropna(subset="chunk_tokens").groupby("arm")["chunk_tokens"].first()
    own = cells[(cells["state"] == "supported") & (cells["config"] != _disaggregated(run))]
    own = own.assign(chunk=own["config"].map(chunk)).sort_values(["load", "chunk"])
    best = own.groupby(["ttft_limit_ms", "gap_limit_ms"])["chunk"].last()
    disaggregated = cells["config"] == _disaggregated(run)
    if disaggregated.any():
        cells["config"] = cells["config"].where(disaggregated, TUNED)
    return stalls.rank(cells).merge(best.reset_index(), how="left")


def heat_map(ranked: pd.DataFrame, run: Run) -> charts.Shown | str:
    """Draw who serves the largest load at each pair of limits; ties, unresolved and unserved pairs are marked."""
    if ranked.empty:
        return "no load is known, so who serves the larger one cannot be said"
    disaggregated, marks = _disaggregated(run), {stalls.TIE: "=", stalls.UNRESOLVED: "?", stalls.NOBODY: ""}
    won = [o for o in (TUNED, disaggregated) if o in set(ranked["outcome"])]
    others = sorted(set(ranked["outcome"]) - set(won) - set(marks))
    domain = [*won, *others, *marks]
    colours = {TUNED: "#0072B2", disaggregated: "#E69F00", stalls.TIE: "#8FC6A9"}
    colours |= {stalls.UNRESOLVED: "#d9d9d9", stalls.NOBODY: "#f7f7f7"} | dict(
        zip(others, charts.PALETTE[2:] * 2, strict=False)
    )
    palette = [colours[o] for o in domain]
    chunks = ranked["chunk"].map(lambda c: "" if c != c else f"{c:.0f}")
    text = ranked["outcome"].map(marks | {disaggregated: ""}).fillna(chunks)
    rows = ranked.assign(text=text, n=ranked["outcome"].map(ranked["outcome"].value_counts()))
    base = alt.Chart(rows).encode(
        x=alt.X("ttft_limit_ms:O", title="TTFT limit (ms)", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("gap_limit_ms:O", title="Limit of the longest gap (ms)", sort="descending"),
    )
    tiles = base.mark_rect(stroke="white").encode(
        color=alt.Color("outcome:N", title="", scale=alt.Scale(domain=domain, range=palette)),
        tooltip=["ttft_limit_ms", "gap_limit_ms", "outcome", "detail", "chunk"],
    )
    words = base.mark_text(fontSize=9).encode(
        text="text:N",
        color=alt.condition(alt.FieldOneOfPredicate("outcome", [TUNED]), alt.value("white"), alt.value("#333")),
    )
    caption = (
        "colour: who serves the larger load with 90 % of requests inside both limits (Wilson's interval); number: "
        f"the replicas' chunk; limits scaled to this machine; {_caption(run, summary(run))}"
    )
    who = "Configurations" if others else f"Tuned replicas against {_disaggregated(run)}"
    heading = charts.title(f"{who} over pairs of limits", run, caption)
    size = {"width": charts.WIDTH, "height": 22 * rows["gap_limit_ms"].nunique()}
    return charts.show((tiles + words).properties(**size, title=heading), "ranking", run)


def conclude(run: Run, rows: pd.DataFrame, ranked: pd.DataFrame) -> str:
    """Hold both predictions against the numbers, in words; write summary.json."""
    own = rows[rows["replicas"]]
    if run.manifest.get("imported") and own["chunk_tokens"].nunique() < 2:
        verdict = "The imported files tell fewer than two prefill chunks apart, so neither prediction is tested."
        run.conclude(verdict, stalls=rows.to_dict("records"))
        return verdict
    large, small = (own["arm"][getattr(own["chunk_tokens"], end)()] for end in ("idxmax", "idxmin"))
    judged = stalls.load(run.table("requests"))[0]
    both = judged[judged["arm"].isin([large, small])]
    ratios = compare.ratios(both, baseline=large, value="longest_gap_ms", by=["rate_rps"])
    if ratios.empty:
        raise BadInput("one chunk only: nothing to compare; give chunk_tokens two or more")
    shorter = bool((ratios["different"] & (ratios["ratio"] < 1)).any())
    longer = bool((ratios["different"] & (ratios["ratio"] > 1)).any())
    first = "REFUTED" if longer else "holds" if shorter else "not resolved"
    span = ", ".join(
        f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f}) at "
        + (f"{r['rate_rps']:g} requests/s" if r["rate_rps"] > 0 else "a rate not known")
        for r in ratios.to_dict("records")
    )
    parts = [f"longest gaps of {small} are to those of {large} as {span}: prediction of shorter stalls {first}"]
    hidden = own["hidden"]
    parts.append(f"the p99 of all gaps hides the stall of {hidden.min():.0%} to {hidden.max():.0%} of requests")
    counts = {str(k): int(n) for k, n in ranked["outcome"].value_counts().items()}
    parts.append(f"of {len(ranked)} pairs of limits: " + ", ".join(f"{k} {n}" for k, n in counts.items()))
    second = "not tested"
    if (~rows["replicas"]).any():
        won, lost = counts.get(TUNED, 0), counts.get(_disaggregated(run), 0)
        second = "holds" if won > lost else "REFUTED" if lost > won else "not resolved"
        parts.append(f"prediction that tuned replicas win more pairs than they lose {second}")
    verdict = "On this machine " + "; ".join(parts) + "."
    if run.manifest["outcome"] not in ("completed", "running", "contradicted"):
        verdict = f"The run is not whole ({run.manifest['outcome']}). " + verdict
    verdict = ". ".join([*build.contradiction(run), verdict])
    numbers = {"stalls": rows.to_dict("records"), "ratios": ratios.to_dict("records"), "ranking": counts}
    run.conclude(verdict, **numbers, predictions={"shorter stalls": first, "replicas win": second})
    return verdict
