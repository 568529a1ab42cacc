"""Post, drain and poll of pulls: medians with intervals, shares, and what a pull is bound by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

#: two-sided confidence of every interval in this package
CONFIDENCE = 0.95


def warm(pulls: pd.DataFrame) -> pd.DataFrame:
    """Return the pulls that count: no warm-up, no error; with ``drain_us`` = xfer - post, never below 0."""
    keep = ~pulls["warmup"].fillna(False).astype(bool) if "warmup" in pulls else pd.Series(True, pulls.index)
    if "error" in pulls:
        keep &= pulls["error"].isna()
    kept = pulls[keep]
    return kept.assign(drain_us=(kept["xfer_us"] - kept["post_us"]).clip(lower=0))


def median_interval(values: Sequence[float] | np.ndarray | pd.Series) -> tuple[float, float, float]:
    """Return median, low and high: the distribution-free 95 percent interval from order statistics.

    Below six values no two order statistics reach 95 percent, and the interval is (nan, nan).
    Source: Conover, Practical Nonparametric Statistics, as in scipy.stats.quantile_test.
    """
    x = np.sort(np.asarray(values, dtype=float))
    n = len(x)
    if n == 0:
        return (np.nan, np.nan, np.nan)
    k = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    # The pair (k-th, n+1-k-th) covers with at least the confidence wanted; ppf gives the next one in.
    k = k if stats.binom.cdf(k - 1, n, 0.5) <= (1 - CONFIDENCE) / 2 and k >= 1 else k - 1
    if k < 1:
        return (float(np.median(x)), np.nan, np.nan)
    return (float(np.median(x)), float(x[k - 1]), float(x[n - k]))


def summary(pulls: pd.DataFrame, by: Sequence[str] = ("arm", "prompt_tokens")) -> pd.DataFrame:
    """Return a row for each group of ``by`` with medians and 95 percent intervals.

    Columns: the group, ``n``, ``descriptors``, ``bytes``, ``post_us``, ``drain_us``, ``xfer_us`` (each with
    ``_low`` and ``_high``), ``post_share`` (median of each pull's own share), ``post_per_descriptor_us``,
    ``rate_gb_s`` (bytes over pull time; 10^9 bytes), ``verdict``.
    """
    rows = []
    for key, g in warm(pulls).groupby(list(by), sort=False, dropna=False):
        row: dict[str, object] = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        row |= {"n": len(g), "descriptors": int(g["descriptors"].median()), "bytes": int(g["bytes"].median())}
        for name in ("post", "drain", "xfer"):
            middle, low, high = median_interval(g[f"{name}_us"])
            row |= {f"{name}_us": middle, f"{name}_low_us": low, f"{name}_high_us": high}
        row["post_share"] = float((g["post_us"] / g["xfer_us"]).median())
        middle, low, high = median_interval(g["post_us"] / g["descriptors"])
        row |= {
            "post_per_descriptor_us": middle,
            "post_per_descriptor_low_us": low,
            "post_per_descriptor_high_us": high,
        }
        middle, low, high = median_interval(g["bytes"] / g["xfer_us"] / 1e3)
        row |= {"rate_gb_s": middle, "rate_low_gb_s": low, "rate_high_gb_s": high}
        row["verdict"] = "post" if float(str(row["post_share"])) > 0.5 else "drain"
        rows.append(row)
    return pd.DataFrame(rows)
