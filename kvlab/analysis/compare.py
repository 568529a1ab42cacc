"""Ratios of medians between arms, with an interval and a rank test."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvlab.analysis.split import CONFIDENCE, warm


def ratios(
    pulls: pd.DataFrame, *, baseline: str, value: str = "xfer_us", by: Sequence[str] = ("prompt_tokens",), seed: int = 1
) -> pd.DataFrame:
    """Return, for every arm but the baseline, the ratio of medians with a bootstrap interval over rounds.

    Columns: ``arm``, ``by``, ``n``, ``ratio``, ``low``, ``high``, ``p_value``, ``different``.
    """
    rng = np.random.default_rng(seed)
    rows = []
    for key, g in warm(pulls).groupby(list(by), sort=False):
        base = g[g["arm"] == baseline].groupby("repetition")[value].median()
        for arm, own in g[g["arm"] != baseline].groupby("arm", sort=False):
            mine = own.groupby("repetition")[value].median()
            rounds = base.index.intersection(mine.index)
            a, b = mine[rounds].to_numpy(), base[rounds].to_numpy()
            draws = rng.integers(0, len(rounds), (4000, len(rounds)))
            boot = np.median(a[draws], axis=1) / np.median(b[draws], axis=1)
            low, high = np.quantile(boot, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
            p = float(stats.wilcoxon(a, b).pvalue) if len(rounds) > 5 else np.nan
            different = bool(p < 1 - CONFIDENCE and not low <= 1 <= high)
            row = {"arm": arm, **dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))}
            row |= {"n": len(rounds), "ratio": np.median(a) / np.median(b), "low": low, "high": high}
            rows.append(row | {"p_value": p, "different": different})
    return pd.DataFrame(rows)
