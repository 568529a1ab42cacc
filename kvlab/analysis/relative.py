"""The published study's table from a run with engines: every quantity relative to the baseline arm."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvlab.analysis.compare import ratios

#: quantity -> (table, column, phases) ; throughput is the better the larger, all others the better the smaller
QUANTITIES = {
    "KV pull, one at a time": ("pulls", "xfer_us", "one at a time"),
    "post, one at a time": ("pulls", "post_us", "one at a time"),
    "TTFT p50, one at a time": ("requests", "ttft_ms", "one at a time"),
    "KV pull, several at once": ("pulls", "xfer_us", "at once"),
    "requests per second, several at once": ("phases", "requests_per_s", "at once"),
}


def with_blocks(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with ``block``: a round of one start of the engines; rows of no round are dropped."""
    rows = table[table["repetition"].notna()]
    start = rows["start"].fillna(0).astype(int)
    return rows.assign(block=start * 1000 + rows["repetition"].astype(int))


def relative(tables: dict[str, pd.DataFrame], baseline: str) -> pd.DataFrame:
    """Return ratios to the baseline arm: ``quantity``, ``arm``, ``prompt_tokens`` and the columns of ``ratios``.

    :param tables: ``pulls``, ``requests`` and ``phases`` of a run; what a quantity needs and is not there is left out
    """
    found = []
    for quantity, (name, value, when) in QUANTITIES.items():
        rows = with_blocks(tables[name])
        alone = rows["concurrency"].fillna(0).astype(float) == 1
        rows = rows[alone if when == "one at a time" else ~alone & rows["concurrency"].notna()]
        rows = rows[rows[value].notna()]
        if rows.empty or baseline not in set(rows["arm"]):
            continue
        rows = rows.assign(prompt_tokens=rows["prompt_tokens"].astype(int))
        own = ratios(rows, baseline=baseline, value=value, block="block").assign(quantity=quantity)
        # Requests of one round share what the machine did: a single round has no interval, however many they are.
        if len(own):
            single = own["method"] == "order statistics"
            own.loc[single, ["low", "high", "p_value"]] = np.nan
            own.loc[single, "different"], own.loc[single, "n"] = False, 1
        found.append(own)
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def reconciled(phases: pd.DataFrame) -> pd.DataFrame:
    """Hold the rings' pulls against vLLM's own counters, arm by arm: transfers and bytes of both."""
    kept = phases[phases["pulls"].notna()]
    sums = (
        kept.groupby("arm", sort=False)[["pulls", "vllm_transfers", "pulled_bytes", "vllm_bytes"]].sum().reset_index()
    )
    sums["byte_difference"] = sums["pulled_bytes"] - sums["vllm_bytes"]
    return sums


def _union_s(start: pd.Series, end: pd.Series) -> float:
    """Return the time that the intervals (s) cover together."""
    rows = pd.DataFrame({"start": start, "end": end}).sort_values("start")
    reached = rows["end"].cummax().shift(fill_value=-np.inf)
    return float((rows["end"] - np.maximum(rows["start"], reached)).clip(lower=0).sum())


def rate_in_flight(pulls: pd.DataFrame) -> dict[str, float] | None:
    """Return the rate while at least one pull was in flight: bytes over the union of the pulls' intervals.

    vLLM's ``Throughput`` is bytes over the *sum* of the intervals (``per_pull_gb_per_s``), which shrinks with every
    pull that shares the link.  Bounds: every interval at its longest, and at its surest.

    :param pulls: ``start_s``, ``xfer_us``, ``bytes`` and perhaps ``start_uncertainty_s`` (+-); rows without a start are
        left out
    :returns: ``gb_per_s``, ``low``, ``high``, ``per_pull_gb_per_s``, ``in_flight`` (mean); None without rows
    """
    known = pulls[pulls["start_s"].notna() & (pulls["xfer_us"] > 0)]
    if known.empty:
        return None
    start, span = known["start_s"], known["xfer_us"] * 1e-6
    unsure = known["start_uncertainty_s"].fillna(0) if "start_uncertainty_s" in known else 0 * span
    sure, total, busy = span > 2 * unsure, known["bytes"].sum() / 1e9, _union_s(start, start + span)
    surest = _union_s((start + unsure)[sure], (start + span - unsure)[sure])
    return {
        "gb_per_s": total / busy,
        "low": total / _union_s(start - unsure, start + span + unsure),
        "high": total / max(span.max(), surest),
        "per_pull_gb_per_s": total / span.sum(),
        "in_flight": span.sum() / busy,
    }
