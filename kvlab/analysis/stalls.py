"""Stalls of requests: the longest gap of each, what a system-wide p99 hides, and which loads are supported.

A gap is the time between two tokens of one request.  The system-wide ITL p99 pools the gaps of all requests:
with hundreds of gaps a request, one stall in each is far less than a hundredth, and the p99 does not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from scipy import stats

from kvlab.analysis.split import CONFIDENCE, median_interval

Floats = NDArray[np.float64]

#: share of requests that must keep both limits for a load to count as supported (Chunk First's rule)
NEEDED = 0.9
TIE, UNRESOLVED, NOBODY = "tie", "unresolved", "none supports it"


def _flat(gaps: pa.ChunkedArray) -> list[tuple[Floats, NDArray[np.int64]]]:
    """Return values and list starts of every chunk, without copying the values (a null list is an empty one)."""
    return [(c.values.to_numpy(zero_copy_only=False), c.offsets.to_numpy().astype(np.int64)) for c in gaps.chunks]


def longest(gaps: pa.ChunkedArray) -> Floats:
    """Return the longest gap of each request; nan for a request without gaps."""
    found = [np.empty(0)]
    for values, offsets in _flat(gaps):
        starts, some = offsets[:-1], offsets[1:] > offsets[:-1]
        out = np.full(len(starts), np.nan)
        if some.any():
            # reduceat reads from one start to the next: lists without values must not be among them.
            out[some] = np.fmax.reduceat(values[: offsets[-1]], starts[some])
        found.append(out)
    return np.concatenate(found)


def p99(gaps: pa.ChunkedArray) -> float:
    """Return the 99th percentile of all gaps pooled; nan without any."""
    parts = [values[offsets[0] : offsets[-1]] for values, offsets in _flat(gaps)]
    pooled = np.concatenate(parts) if parts else np.empty(0)
    if np.isnan(np.add.reduce(pooled)):
        pooled = pooled[~np.isnan(pooled)]
    return float(np.percentile(pooled, 99, overwrite_input=True)) if len(pooled) else np.nan


def load(requests: pd.DataFrame | pa.Table) -> tuple[pd.DataFrame, pa.ChunkedArray | None]:
    """Split table ``requests`` into a frame (``longest_gap_ms`` filled in, warm-up left out) and the gaps beside it.

    Give a pyarrow Table (``pyarrow.parquet.read_table``) where there are many: its lists are never unpacked.
    ``failed`` marks requests with an error or without a first token.
    """
    table: Any = requests
    if isinstance(requests, pd.DataFrame):
        frame = requests.drop(columns="gaps_ms", errors="ignore")
        lists = {c: pa.array(requests[c], pa.list_(pa.float64()), from_pandas=True) for c in requests if c == "gaps_ms"}
        table = pa.table(lists)
    else:
        frame = table.select([c for c in table.column_names if c != "gaps_ms"]).to_pandas()
    gaps = table["gaps_ms"] if "gaps_ms" in table.column_names else None
    frame = frame.reset_index(drop=True)
    measured = longest(gaps) if gaps is not None else np.full(len(frame), np.nan)
    given = frame["longest_gap_ms"].to_numpy(float) if "longest_gap_ms" in frame else np.nan
    error = frame["error"].notna() if "error" in frame else False
    frame = frame.assign(longest_gap_ms=np.where(np.isnan(measured), given, measured))
    frame["failed"] = error | frame["ttft_ms"].isna()
    warm = frame["warmup"].fillna(False).astype(bool) if "warmup" in frame else pd.Series(False, frame.index)
    if warm.any():
        gaps = gaps.filter(pa.array(~warm)) if gaps is not None else None
        frame = frame[~warm].reset_index(drop=True)
    return frame, gaps


def summary(requests: pd.DataFrame | pa.Table, by: Sequence[str] = ("arm",)) -> pd.DataFrame:
    """Return a row for each group of ``by``: stalls, TTFT and throughput beside the system-wide p99.

    Columns: the group, ``n``, ``failed`` (counted, left out of the rest), ``gap_p10_ms``, ``gap_median_ms`` (with
    ``_low`` and ``_high``), ``gap_p90_ms`` of the requests' longest gaps, ``ttft_ms`` (with ``_low``, ``_high``),
    ``output_tokens_per_s`` (from the first start to the last end, summed over repetitions), ``itl_p99_ms``, and
    ``hidden``: the share of requests whose longest gap is above that p99.
    """
    frame, gaps = load(requests)
    rows = []
    for key, g in frame.groupby(list(by), sort=False, dropna=False):
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | {"n": len(g), "failed": int(g["failed"].sum())}
        g = g[~g["failed"]]
        stall = g["longest_gap_ms"].dropna()
        row |= dict(zip(("gap_p10_ms", "gap_p90_ms"), stall.quantile([0.1, 0.9]), strict=True))
        for name, values in (("gap_median", stall), ("ttft", g["ttft_ms"])):
            row |= dict(zip((f"{name}_ms", f"{name}_low_ms", f"{name}_high_ms"), median_interval(values), strict=True))
        row["output_tokens_per_s"] = _throughput(g)
        all_of_them = gaps is not None and len(g) == len(frame)
        own = gaps if gaps is None or all_of_them else gaps.take(pa.array(g.index))
        row["itl_p99_ms"] = np.nan if own is None else p99(own)
        row["hidden"] = float((stall > row["itl_p99_ms"]).mean()) if row["itl_p99_ms"] > 0 else np.nan
        rows.append(row)
    return pd.DataFrame(rows)


def _throughput(g: pd.DataFrame) -> float:
    if not {"start_s", "e2e_ms", "output_tokens"} <= set(g) or g.empty:
        return np.nan
    # Every phase and repetition has a clock of its own.
    clocks = [c for c in ("arm", "chunk_tokens", "rate_rps", "concurrency", "phase", "repetition") if c in g]
    parts = g.assign(end_s=g["start_s"] + g["e2e_ms"] / 1e3).groupby(clocks, dropna=False)
    seconds = (parts["end_s"].max() - parts["start_s"].min()).sum()
    return float(g["output_tokens"].sum() / seconds) if seconds > 0 else np.nan


def wilson(passed: Any, n: Any) -> tuple[Floats, Floats]:
    """Return the two ends of Wilson's 95 percent interval of a share; (0, 1) of none.

    Source: Wilson 1927, as in Brown, Cai and DasGupta 2001.  It takes requests as independent; requests of one run
    share its luck, so repeat a load before trusting a close call.
    """
    z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))
    k, m = np.asarray(passed, float), np.maximum(np.asarray(n, float), 1e-9)
    middle, half = (k + z * z / 2) / (m + z * z), z / (m + z * z) * np.sqrt(k * (m - k) / m + z * z / 4)
    return np.clip(middle - half, 0, 1), np.clip(middle + half, 0, 1)


def grid(
    requests: pd.DataFrame | pa.Table, ttft_limits_ms: Sequence[float], gap_limits_ms: Sequence[float]
) -> pd.DataFrame:
    """Judge every request by its own TTFT and longest gap; a row a configuration (arm), load (rate) and pair of limits.

    Columns: ``config``, ``load``, ``ttft_limit_ms``, ``gap_limit_ms``, ``n``, ``passed``, ``low``, ``high`` (Wilson),
    ``state``: supported (90 percent pass, the whole interval says so), not supported, or unresolved.  A failed
    request passes nowhere; one without gaps (a single token) keeps any gap limit.  A group without a load is left out.
    """
    frame, _ = load(requests)
    first, gap = np.asarray(ttft_limits_ms, float), np.asarray(gap_limits_ms, float)
    parts = [pd.DataFrame(columns=["config", "load", "ttft_limit_ms", "gap_limit_ms", "n", "passed"])]
    for (name, at), g in frame.groupby(["arm", "rate_rps"], sort=True):
        ttft = g["ttft_ms"].where(~g["failed"], np.inf).to_numpy(float)
        stall = g["longest_gap_ms"].fillna(0).to_numpy(float)
        # Counts as a product of two truth matrices; float64 so that they stay whole.
        passed = (ttft[:, None] <= first).astype(float).T @ (stall[:, None] <= gap).astype(float)
        cells = pd.MultiIndex.from_product([first, gap], names=["ttft_limit_ms", "gap_limit_ms"]).to_frame(index=False)
        parts.append(cells.assign(config=str(name), load=float(str(at)), n=len(g), passed=passed.ravel().astype(int)))
    every = pd.concat(parts[1:] or parts, ignore_index=True)
    every["low"], every["high"] = wilson(every["passed"], every["n"])
    known = [every["low"] >= NEEDED, every["high"] < NEEDED]
    return every.assign(state=np.select(known, ["supported", "not supported"], UNRESOLVED))


def rank(cells: pd.DataFrame) -> pd.DataFrame:
    """Say for each pair of limits which configuration supports the largest load.

    What a configuration serves lies between its largest supported load and its largest not refused (0: none).
    Columns: the limits, ``outcome`` (a configuration, tie, unresolved, or none supports it), ``detail``.
    """
    loads = cells["load"].astype(float)
    sure = loads.where(cells["state"] == "supported", 0.0)
    maybe = loads.where(cells["state"] != "not supported", 0.0)
    limits = ["ttft_limit_ms", "gap_limit_ms"]
    served = cells.assign(sure=sure, maybe=maybe).groupby([*limits, "config"])[["sure", "maybe"]].max()
    rows = []
    for key, g in served.groupby(level=limits):
        low, high = (g[c].droplevel([0, 1]) for c in ("sure", "maybe"))
        best = [c for c in low.index if low[c] > high.drop(c).max()] if len(low) > 1 else []
        top = low[high >= low.max()]
        if high.max() == 0:
            outcome = NOBODY
        elif best:
            outcome = str(best[0])
        else:
            outcome = TIE if (top == low.max()).all() and (high[top.index] == low.max()).all() else UNRESOLVED
        span = [f"{c} {low[c]:g}" + (f" to {high[c]:g}" if high[c] > low[c] else "") for c in low.index]
        rows.append((*key, outcome, ", ".join(span)))
    return pd.DataFrame(rows, columns=[*limits, "outcome", "detail"])
