"""The published study's table from a run with engines: every quantity relative to the baseline arm."""

from __future__ import annotations

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
        found.append(ratios(rows, baseline=baseline, value=value, block="block").assign(quantity=quantity))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def reconciled(phases: pd.DataFrame) -> pd.DataFrame:
    """Hold the rings' pulls against vLLM's own counters, arm by arm: transfers and bytes of both."""
    kept = phases[phases["pulls"].notna()]
    sums = (
        kept.groupby("arm", sort=False)[["pulls", "vllm_transfers", "pulled_bytes", "vllm_bytes"]].sum().reset_index()
    )
    sums["byte_difference"] = sums["pulled_bytes"] - sums["vllm_bytes"]
    return sums
