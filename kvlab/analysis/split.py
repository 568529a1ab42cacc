"""Post, drain and poll of pulls: medians with intervals, shares, and what a pull is bound by.

*Post* is issuing the reads; *drain* is the rest, until the caller sees completion.  *Poll* is the end of the drain
that may be nothing but waiting for the next look: ``poll_us = min(drain_us, poll_interval_us)``, a bound from
above, missing where the interval is.  (Where only looks make progress a pull takes many; the last one counts.)

**Rules of the verdict**, on the medians of each pull's own shares:

- the largest of post, poll, and drain less poll names it: ``post-bound``, ``poll-bound`` or ``drain-bound``;
- ``synchronous`` instead of post-bound: the post is :data:`SYNCHRONOUS_SHARE` of the pull or more *and* follows
  the bytes, not the count of descriptors (:func:`post_costs`).  Such a transport (cma) copies inside the call that
  posts, and fewer descriptors would not help it.  Seeing that takes descriptors of different sizes in the arm;
  without, ``post_bytes_share`` is missing, and post-bound says only where the time went.

The drain's P90 is the P90 of each pull's own drain: no P90 is ever subtracted from another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import optimize, stats

from kvlab.errors import BadInput

#: two-sided confidence of every interval in this package
CONFIDENCE = 0.95
#: share of the pull from which a post that follows bytes is called synchronous
SYNCHRONOUS_SHARE = 0.9
#: largest over smallest descriptor size from which cost per byte and per descriptor can be told apart
SIZE_SPREAD = 4.0


def groups(frame: pd.DataFrame, by: Sequence[str]) -> Iterator[tuple[dict[str, Any], pd.DataFrame]]:
    """Yield ({column: value}, rows) for each group of ``by`` in order of first appearance; () is one group."""
    grouped = frame.groupby(list(by), sort=False, dropna=False, observed=True) if by else [((), frame)]
    for key, rows in grouped:
        yield dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True)), rows


def take(frame: pd.DataFrame, names: Sequence[str], optional: Sequence[str] = ()) -> pd.DataFrame:
    """Return the columns ``names`` and those of ``optional`` that exist; BadInput names what is missing."""
    missing = [n for n in names if n not in frame]
    if missing:
        raise BadInput(f"the table has no column {missing[0]!r}; it has {', '.join(map(str, frame.columns))}")
    return frame[[*dict.fromkeys(names), *(n for n in optional if n in frame and n not in names)]]


def warm(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that count: no warm-up, no error; pulls with ``drain_us`` = xfer - post, never below 0."""
    keep = ~rows["warmup"].fillna(False).astype(bool) if "warmup" in rows else pd.Series(True, rows.index)
    if "error" in rows:
        keep &= rows["error"].isna()
    kept = rows if keep.all() else rows[keep]
    pulls = {"xfer_us", "post_us"} <= set(kept)
    return kept.assign(drain_us=(kept["xfer_us"] - kept["post_us"]).clip(lower=0)) if pulls else kept


def parts(pulls: pd.DataFrame) -> pd.DataFrame:
    """Return :func:`warm` pulls with ``poll_us`` and each one's ``post_share``, ``drain_share``, ``poll_share``."""
    p = warm(pulls)
    whole = p["post_us"] + p["drain_us"]
    interval = p["poll_interval_us"].astype(float) if "poll_interval_us" in p else np.nan
    p = p.assign(poll_us=np.minimum(p["drain_us"], interval))
    return p.assign(**{f"{name}_share": p[f"{name}_us"] / whole for name in ("post", "drain", "poll")})


def median_interval(values: Sequence[float] | np.ndarray | pd.Series) -> tuple[float, float, float]:
    """Return median, low and high: the distribution-free 95 percent interval from order statistics.

    Below six values it is (nan, nan); missing values are left out; values are taken for independent.
    Source: Conover, Practical Nonparametric Statistics, as in scipy.stats.quantile_test.
    """
    x = np.asarray(values, dtype=float)
    x = np.sort(x[~np.isnan(x)])
    n = len(x)
    if not n:
        return (np.nan, np.nan, np.nan)
    # The pair (k-th, n+1-k-th) covers with at least the confidence wanted.
    k = int(stats.binom.ppf((1 - CONFIDENCE) / 2, n, 0.5))
    middle = float((x[(n - 1) // 2] + x[n // 2]) / 2)
    return (middle, np.nan, np.nan) if k < 1 else (middle, float(x[k - 1]), float(x[n - k]))


def post_costs(shapes: np.ndarray) -> tuple[float, float]:
    """Return the post's cost per descriptor (us) and per byte (us) over shapes; (nan, nan) if not separable.

    Least squares of the relative residuals of ``post_us = p * descriptors + s * bytes``, p and s >= 0 (scipy nnls).
    ``shapes``: a row a shape, columns descriptors, bytes, post_us; where sizes differ by less than
    :data:`SIZE_SPREAD` count and bytes rise together.
    """
    rows = shapes[(shapes > 0).all(axis=1)]
    length = rows[:, 1] / rows[:, 0]
    if len(length) < 2 or length.max() < SIZE_SPREAD * length.min():
        return (np.nan, np.nan)
    x = rows[:, :2] / rows[:, 2:]
    scale = x.max(axis=0)
    p, s = optimize.nnls(x / scale, np.ones(len(x)))[0] / scale
    return (float(p), float(s))


def summary(pulls: pd.DataFrame, by: Sequence[str] = ("arm", "prompt_tokens")) -> pd.DataFrame:
    """Return a row for each group of ``by`` with medians and 95 percent intervals.

    Columns: the group, ``n``, ``descriptors``, ``bytes``; ``post_us``, ``drain_us``, ``xfer_us``, ``poll_us`` (each
    with ``_low``, ``_high`` and ``_p90``), ``post_share``, ``drain_share``, ``poll_share`` (medians of each pull's own;
    ``post_share_low``, ``_high``), ``post_per_descriptor_us``, ``rate_gb_s`` (bytes over pull time; 10^9 bytes),
    ``post_bytes_share`` (part of the post that bytes account for), ``verdict`` (rules: this module's docstring).
    """
    names = [*dict.fromkeys([*by, "descriptors", "bytes", "post_us", "xfer_us"])]
    p = parts(take(pulls, names, ("arm", "poll_interval_us", "warmup", "error")))
    # All shapes of an arm tell what its post is paid for, whatever groups are asked for.
    arms = [c for c in ("arm",) if c in p]
    shapes = p.groupby([*arms, "descriptors", "bytes"], observed=True)["post_us"].median().reset_index()
    values = ["descriptors", "bytes", "post_us"]
    costs = {key.get("arm"): post_costs(cells[values].to_numpy(float)) for key, cells in groups(shapes, arms)}
    rows = []
    for key, g in groups(p, by):
        counts = {c: float(g[c].median()) for c in ("descriptors", "bytes")}
        row = {**key, "n": len(g), **{c: int(v) if v == v else v for c, v in counts.items()}}
        for name in ("post", "drain", "xfer", "poll"):
            row |= _with_interval(f"{name}{{}}_us", g[f"{name}_us"])
            row[f"{name}_p90_us"] = float(g[f"{name}_us"].quantile(0.9))
        row |= _with_interval("post_share{}", g["post_share"])
        row |= {f"{name}_share": float(g[f"{name}_share"].median()) for name in ("drain", "poll")}
        row |= _with_interval("post_per_descriptor{}_us", g["post_us"] / g["descriptors"])
        row |= _with_interval("rate{}_gb_s", g["bytes"] / g["xfer_us"] / 1e3)
        own = {costs.get(a, (np.nan, np.nan)) for a in (g["arm"].unique() if arms else [None])}
        per_descriptor, per_byte = own.pop() if len(own) == 1 else (np.nan, np.nan)
        by_bytes, whole = per_byte * row["bytes"], per_descriptor * row["descriptors"] + per_byte * row["bytes"]
        row["post_bytes_share"] = by_bytes / whole if whole > 0 else np.nan
        rest = float((g["drain_share"] - g["poll_share"].fillna(0)).median())
        shares = {"post-bound": row["post_share"], "poll-bound": np.nan_to_num(row["poll_share"]), "drain-bound": rest}
        row["verdict"] = max(shares, key=lambda name: shares[name]) if row["post_share"] >= 0 else "not known"
        if row["verdict"] == "post-bound" and row["post_share"] >= SYNCHRONOUS_SHARE and row["post_bytes_share"] > 0.5:
            row["verdict"] = "synchronous"
        rows.append(row)
    return pd.DataFrame(rows)


def _with_interval(name: str, values: pd.Series) -> dict[str, float]:
    return {name.format(end): v for end, v in zip(("", "_low", "_high"), median_interval(values), strict=True)}
