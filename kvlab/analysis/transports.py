"""TTFT by transport: what a transport adds over no hand-over, and what requests that share one road wait for."""

from __future__ import annotations

import pandas as pd


def additions(ttft: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the rows of other arrangements on the baseline's host, with ``extra_ms`` over it at equal concurrency.

    ``extra_ms`` is a difference of two medians, so it has no interval and may be negative.

    :param ttft: columns ``arrangement``, ``host``, ``concurrency``, ``ttft_median_ms``
    """
    keys = ["host", "concurrency"]
    base = ttft.loc[ttft["arrangement"] == baseline, [*keys, "ttft_median_ms"]]
    rows = ttft[ttft["arrangement"] != baseline].merge(base, on=keys, suffixes=("", "_base"))
    return rows.assign(extra_ms=rows["ttft_median_ms"] - rows["ttft_median_ms_base"])


def queues(pulls: pd.DataFrame) -> pd.DataFrame:
    """Hold N requests at a time against N times one request alone on the same road.

    If the road and the prefill before it serve N requests no faster together than one after another, the last of N
    gets its first token after N x alone.  Which of the two they wait for shows in the median: a first-come queue
    (prefill) puts it at (N + 1) / 2N of the last, a road that all share evenly near the last.

    :param pulls: columns ``road``, ``in_flight``, ``prompt_tokens``, ``pulls``, ``mib_per_pull``, ``xfer_ms``,
        ``ttft_p50_s``, ``ttft_max_s``; the alone row with the most pulls is taken
    :returns: a row for each road, prompt and N > 1: ``n``, ``alone_s``, ``predicted_s`` (N x alone), ``p50_s``,
        ``last_s``, ``last_ratio`` (last over predicted), ``p50_share`` (median over last), ``queue_share`` (what a
        first-come queue gives), ``pull_share`` (one pull over TTFT alone), ``rate_alone_gb_s``
        (one pull's bytes over its time) and ``rate_n_gb_s`` (all bytes until the last first token)
    """
    rows = []
    for (road, tokens), g in pulls.groupby(["road", "prompt_tokens"], sort=False):
        alone = g[g["in_flight"] == 1].sort_values("pulls", ascending=False).to_dict("records")[0]
        gb, alone_s = alone["mib_per_pull"] * 2**20 / 1e9, alone["ttft_p50_s"]
        for r in g[g["in_flight"] > 1].to_dict("records"):
            n, p50_s, last_s = r["in_flight"], r["ttft_p50_s"], r["ttft_max_s"]
            row = {"road": road, "prompt_tokens": tokens, "n": n, "alone_s": alone_s, "predicted_s": n * alone_s}
            row |= {"p50_s": p50_s, "last_s": last_s, "last_ratio": last_s / (n * alone_s), "p50_share": p50_s / last_s}
            row |= {"queue_share": (n + 1) / (2 * n), "pull_share": alone["xfer_ms"] / 1e3 / alone_s}
            rows.append(row | {"rate_alone_gb_s": gb / alone["xfer_ms"] * 1e3, "rate_n_gb_s": gb * n / last_s})
    return pd.DataFrame(rows)
