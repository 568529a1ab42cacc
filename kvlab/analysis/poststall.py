"""Does a post hold up running requests: the gap that a pull's post fell into, against the post.

The worker that posts a pull's reads also runs the engine's steps, so the prediction is ``gap = step + post``: a slope
of 1.  Where the transport copies inside the post (cma) the copy is part of it.

A pull's start is known within ``start_uncertainty_s`` only, so it gets the longest gap of a running request that its
post *may* have fallen into.  That is more than an ordinary step even where nothing happened; ``control_ms``, the same
window moved to the control phase, shows by how much.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvlab.analysis import compare
from kvlab.analysis.split import CONFIDENCE, warm
from kvlab.errors import BadInput

#: what one phase ``pull`` and its control share
KEY = ["arm", "start", "pulled_tokens", "repetition"]
DRAWS = 1000
#: a start known no better than this could be in anyone's gap
MOST_UNCERTAINTY_S = 0.1
#: a slope this near 1 counts as 1, and must be known this well
NEAR, KNOWN = 0.1, 0.5


def _keyed(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows[rows["phase"].notna()]
    kind = rows["phase"].astype(str).str.split().str[0]
    return rows.assign(kind=kind).astype(dict.fromkeys(KEY[1:], "int64")).reset_index(drop=True)


def gaps(requests: pd.DataFrame) -> pd.DataFrame:
    """Return all gaps of the steady requests: :data:`KEY`, ``kind``, ``request``, ``end_s`` ..."""
    rows = _keyed(warm(requests))[[*KEY, "kind", "request", "start_s", "ttft_ms", "gaps_ms"]]
    rows = rows.explode("gaps_ms").rename(columns={"gaps_ms": "gap_ms"}).dropna(subset="gap_ms")
    rows["gap_ms"] = rows["gap_ms"].astype(float)
    rows["end_s"] = rows["start_s"] + (rows["ttft_ms"] + rows.groupby(level=0)["gap_ms"].cumsum()) / 1e3
    rows["begin_s"] = rows["end_s"] - rows["gap_ms"] / 1e3
    return rows.drop(columns=["start_s", "ttft_ms"]).reset_index(drop=True)


def met(pulls: pd.DataFrame, requests: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Return a row for each gap that posts fell into: ``post_ms`` (their sum), ``gap_ms`` and ``control_ms``.

    Columns besides: :data:`KEY`, ``pulls`` (that fell into it), ``descriptors``, ``bytes``, ``uncertainty_ms``.  Pulls
    past the running requests' end or less certain than :data:`MOST_UNCERTAINTY_S` are left out; BadInput: none is left.
    """
    own = _keyed(warm(pulls).drop(columns="pulled_tokens", errors="ignore").rename(columns={"prompt_tokens": KEY[2]}))
    own = own[(own["kind"] == "pull") & (own["start_uncertainty_s"].fillna(0) <= MOST_UNCERTAINTY_S)]
    began = _keyed(warm(phases)).pivot_table(index=KEY, columns="kind", values="start_s")
    moved = began.get("control", np.nan) - began["pull"] if "pull" in began else pd.Series(dtype=float)
    own = own.merge(moved.rename("moved_s").reset_index(), on=KEY, how="left").assign(pull=range(len(own)))
    every = gaps(requests)
    spread = own["start_uncertainty_s"].fillna(0)
    own = own.assign(low_s=own["start_s"] - spread, high_s=own["start_s"] + own["post_us"] / 1e6 + spread)
    for kind in ("pull", "control"):
        shift = own["moved_s"] if kind == "control" else 0.0
        windows = own[[*KEY, "pull"]].assign(low_s=own["low_s"] + shift, high_s=own["high_s"] + shift)
        both = windows.merge(every[every["kind"] == kind], on=KEY)
        inside = both[(both["end_s"] > both["low_s"]) & (both["begin_s"] < both["high_s"])]
        longest = inside.loc[inside.groupby("pull")["gap_ms"].idxmax(), ["pull", "gap_ms", "end_s"]]
        longest.columns = pd.Index(["pull", f"{kind}_ms", f"{kind}_end_s"])
        own = own.merge(longest, on="pull", how="left")
    own = own.dropna(subset="pull_ms")
    if own.empty:
        raise BadInput("no pull's post fell into a gap of a running request: the steady load ended before the pulls")
    own = own.assign(post_ms=own["post_us"] / 1e3, uncertainty_ms=own["start_uncertainty_s"].fillna(0) * 1e3)
    sums, most = ("post_ms", "descriptors", "bytes"), ("pull_ms", "control_ms", "uncertainty_ms")
    how = {"pull": "size", **dict.fromkeys(sums, "sum"), **dict.fromkeys(most, "max")}
    out = own.groupby([*KEY, "pull_end_s"]).agg(how).reset_index().drop(columns="pull_end_s")
    return out.rename(columns={"pull_ms": "gap_ms", "pull": "pulls"})


def fit(found: pd.DataFrame, value: str = "gap_ms") -> dict[str, Any]:
    """Fit ``value = a_ms + b * post_ms`` to rows of :func:`met`: ``b`` and ``a_ms`` with ``_low`` and ``_high``, ``n``.

    Theil and Sen's line, which a few long gaps of another cause do not bend.  The interval resamples whole phases
    (:data:`KEY`), ``blocks`` of them; below six it is nan.  A phase is the unit because its pulls share prompts, a
    steady load and what the machine did meanwhile, while the next one begins all of these anew; :func:`contrast` pairs
    the same unit.  Changed after the first recordings: the unit had been an arm's whole repetition, of which the GPU
    run of that day, ended by a time limit, had five.
    """
    rows = found.dropna(subset=value)
    blocks = [g[["post_ms", value]].to_numpy(float) for _, g in rows.groupby(KEY)]
    names = ("b", "b_low", "b_high", "a_ms", "a_low_ms", "a_high_ms")
    if not blocks:
        return {**dict.fromkeys(names, np.nan), "n": 0, "blocks": 0}
    picks = np.random.default_rng(1).integers(0, len(blocks), (DRAWS, len(blocks)))
    drawn = [_line(np.concatenate([blocks[i] for i in pick])) for pick in picks]
    ends = np.nanquantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    ends = ends if len(blocks) >= compare.FEWEST else np.full_like(ends, np.nan)
    values = np.vstack([_line(np.concatenate(blocks)), ends]).T.ravel()
    return {**dict(zip(names, map(float, values), strict=True)), "n": len(rows), "blocks": len(blocks)}


def _line(xy: NDArray[np.float64]) -> tuple[float, float]:
    x, y = xy.T  # scipy's theilslopes warns where all y are the same, and is slow
    run, rise = (np.subtract.outer(v, v)[np.triu_indices(len(v), 1)] for v in (x, y))
    b = float(np.median(rise[run != 0] / run[run != 0])) if run.any() else np.nan
    return b, float(np.median(y) - b * np.median(x))


def contrast(requests: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return (a row a phase: ``longest_ms``, the median over its requests; ratios of pull to control for each arm).

    A phase counts once, since its requests meet the same stalls; phases of one repetition and length are paired."""
    rows = _keyed(warm(requests))
    phases = rows.groupby([*KEY, "kind"]).agg(longest_ms=("longest_gap_ms", "median")).reset_index()
    phases["block"] = phases.groupby(KEY[1:]).ngroup()
    swapped = phases.rename(columns={"arm": "case", "kind": "arm"})
    ratios = compare.ratios(swapped, baseline="control", value="longest_ms", by=["case"], block="block")
    return phases, ratios.drop(columns="arm").rename(columns={"case": "arm"})


def judge(line: dict[str, Any]) -> str:
    """Say of b = 1: refuted (its interval is clear of 1 +- :data:`NEAR`), holds (not so, and within :data:`KNOWN`)."""
    low, high = line["b_low"], line["b_high"]
    if low > 1 + NEAR or high < 1 - NEAR:
        return "refuted"
    return "holds" if low >= 1 - KNOWN and high <= 1 + KNOWN else "unresolved"
