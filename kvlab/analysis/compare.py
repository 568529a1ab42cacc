"""Ratios of medians between arms, with an interval and a rank test.

Pulls close in time share what the machine did meanwhile and are no independent sample, so a round
(``repetition``) is a block, and whole blocks are resampled.  ``method`` says how:

- *paired blocks*, where the arms share two or more: drawn together; Wilcoxon's signed ranks of block medians.
  Where rounds differ by far more than pulls of one round the interval is wider than it need be;
- *separate blocks*, where each arm has two or more of its own: each arm's drawn; Mann-Whitney of block medians;
- *order statistics*, without blocks: pulls taken as independent (with drift too narrow); Mann-Whitney.  The median
  of a resample of n sorted values is the value at rank n * U, U from Beta((n+1)/2, (n+1)/2) (Maritz and Jarrett
  1978; exact for odd n), so ten million pulls cost one sort.

More than :data:`MOST_BLOCKS` blocks are merged, neighbours first; ``blocks`` says how many were resampled.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvlab.analysis.split import CONFIDENCE, groups, take, warm
from kvlab.errors import BadInput

DRAWS = 4000
MOST_BLOCKS = 1000
#: below six blocks neither a median's interval nor signed ranks can reach 95 percent
FEWEST = 6


def ratios(
    pulls: pd.DataFrame,
    *,
    baseline: str,
    value: str = "xfer_us",
    by: Sequence[str] = ("prompt_tokens",),
    block: str = "repetition",
) -> pd.DataFrame:
    """Return, for every arm but the baseline, the ratio of medians with a bootstrap interval and a rank test.

    Any tidy table with ``arm`` and ``value`` will do (pulls, or requests with ``ttft_ms``); ``block`` may be absent.
    Columns: ``arm``, ``by``, ``n`` (blocks, or pulls where there are none), ``ratio`` (of medians of block medians),
    ``low``, ``high``, ``p_value``, ``different``, ``method``, ``blocks``, ``pulls``, ``baseline_pulls``.
    ``different``: the interval leaves out 1 *and* the test rejects; below six blocks never; each row by itself.
    """
    values = ["post_us", "xfer_us"] if value == "drain_us" else [value]
    rows = warm(take(pulls, ["arm", *by, *values], (block, "warmup", "error")))
    if baseline not in set(rows["arm"].unique()):
        raise BadInput(f"no pulls of the baseline arm {baseline!r}; arms: {', '.join(map(str, rows['arm'].unique()))}")
    found = []
    for key, g in groups(rows, by):
        g = g[g[value].notna()]
        ids = block_ids(g, block)
        one = g["arm"] == baseline
        for arm in g.loc[~one, "arm"].unique():
            own = g["arm"] == arm
            mine, base = g.loc[own, value], g.loc[one, value]
            row = {"arm": arm, **key, **_ratio(mine, base, ids[own], ids[one], np.random.default_rng(1))}
            found.append(row | {"pulls": len(mine), "baseline_pulls": len(base)})
    return pd.DataFrame(found)


def block_ids(rows: pd.DataFrame, block: str = "repetition") -> pd.Series:
    """Number the blocks in order, neighbours merged to at most :data:`MOST_BLOCKS`; -1 where none is known."""
    if block not in rows:
        return pd.Series(-1, rows.index)
    codes, known = pd.factorize(rows[block], sort=True)
    merged = codes * MOST_BLOCKS // len(known) if len(known) > MOST_BLOCKS else codes
    return pd.Series(np.where(codes < 0, -1, merged), rows.index)


def _ratio(
    mine: pd.Series, base: pd.Series, my_ids: pd.Series, base_ids: pd.Series, rng: np.random.Generator
) -> dict[str, object]:
    a, b = (v[i >= 0].groupby(i[i >= 0]).median() for v, i in ((mine, my_ids), (base, base_ids)))
    shared = a.index.intersection(b.index)
    if len(shared) >= 2:
        method, x, y = "paired blocks", a[shared].to_numpy(float), b[shared].to_numpy(float)
        picked = rng.integers(0, len(x), (DRAWS, len(x)))
        drawn = (np.median(x[picked], axis=1), np.median(y[picked], axis=1))
        p = stats.wilcoxon(x, y).pvalue if len(x) >= FEWEST and (x != y).any() else 1.0
    else:
        separate = min(len(a), len(b)) >= 2
        method = "separate blocks" if separate else "order statistics"
        x, y = (np.sort(v.to_numpy(float)) for v in ((a, b) if separate else (mine, base)))
        drawn = (_medians(x, rng), _medians(y, rng)) if len(x) and len(y) else (np.empty(0), np.empty(0))
        p = stats.mannwhitneyu(x, y).pvalue if len(x) and len(y) else 1.0
    n, few = len(x), min(len(x), len(y)) < FEWEST
    ratio, low, high = np.nan, np.nan, np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        if len(x) and len(y):
            ratio = np.median(x) / np.median(y)
        if not few:
            # Each end is a value that occurred: no arithmetic between infinities where a median is 0.
            ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
            low, high = np.quantile(drawn[0] / drawn[1], ends, method="nearest")
    different = bool(not few and p < 1 - CONFIDENCE and not low <= 1 <= high and ratio == ratio)
    row: dict[str, object] = {"n": n, "ratio": ratio, "low": low, "high": high, "p_value": np.nan if few else float(p)}
    return row | {"different": different, "method": method, "blocks": 0 if method == "order statistics" else n}


def _medians(ordered: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    n = len(ordered)
    at = np.floor(rng.beta((n + 1) / 2, (n + 1) / 2, DRAWS) * n)
    return np.asarray(ordered[np.minimum(at, n - 1).astype(int)])
