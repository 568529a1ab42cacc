"""Rates of pulls over TCP against a plain flow of the same link, and the published claims on TCP tuning.

Rules of the answers, per link:

- a gain *holds* when it is resolved (:mod:`kvlab.analysis.compare`) and at least half of the published one, and
  holds *in direction only* when it is resolved and smaller;
- a loss holds when it is resolved, whatever its size;
- a share of a limit holds when its whole interval lies on the side that the claim says;
- a claim *does not hold here* when the interval leaves out what the claim needs (half of the gain, the least
  published loss, the share); an interval that spans it is *not resolved*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from kvlab.analysis import compare, split

HOLDS, DIRECTION, NOT, UNTESTED = "holds", "in direction only", "does not hold here", "not tested here"
UNRESOLVED = "not resolved"
#: descriptors of one piece of a transfer that NIXL's UCX backend splits over its threads (split_batch_size)
PIECE = 1024
#: share of a plain flow up to which a rate counts as left unused: the published 4.45 of 4.97 is 0.90
FULL = 0.95
DEFAULT = "UCX default"


def rates(pulls: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return a row an arm, link and case: median rate with interval, and shares of the plain flows.

    Columns: ``arm``, ``link``, ``case``, ``n``, ``descriptors``; ``gbps`` and ``share`` (of ``one_gbps``), each with
    ``_low`` and ``_high``; ``one_gbps`` and ``four_gbps``: median plain flow over one and over four connections.
    """
    rows = split.summary(pulls, by=("arm", "link", "case"))
    for name, source in (("gbps", "rate_gb_s"), ("gbps_low", "rate_low_gb_s"), ("gbps_high", "rate_high_gb_s")):
        rows[name] = rows[source] * 8
    plain = limits.assign(gbps=limits["gb_per_s"] * 8).groupby(["link", "name"])["gbps"].median()
    for column, name in (("one_gbps", "plain TCP, 1 connection"), ("four_gbps", "plain TCP, 4 connections")):
        rows[column] = [plain.get((link, name), np.nan) for link in rows["link"]]
    for name in ("", "_low", "_high"):
        rows[f"share{name}"] = rows[f"gbps{name}"] / rows["one_gbps"]
    kept = ["arm", "link", "case", "n", "descriptors", "gbps", "gbps_low", "gbps_high", "one_gbps", "four_gbps"]
    return rows[[*kept, "share", "share_low", "share_high"]]


def speedups(pulls: pd.DataFrame, baseline: str, by: tuple[str, ...] = ("link",)) -> pd.DataFrame:
    """Return how many times as fast as ``baseline`` each arm is, the inverse of the ratio of pull times.

    All cases of a link together unless ``by`` names the case.  Columns: ``arm``, ``by``, ``n``, ``speedup``,
    ``low``, ``high``, ``different``.
    """
    names = ["arm", *by, "n", "speedup", "low", "high", "different"]
    if baseline not in set(pulls["arm"]) or pulls["arm"].nunique() < 2:
        return pd.DataFrame(columns=names)
    rows = compare.ratios(pulls, baseline=baseline, by=list(by))
    rows = rows.assign(speedup=1 / rows["ratio"], new_low=1 / rows["high"], new_high=1 / rows["low"])
    rows = rows.drop(columns=["low", "high"]).rename(columns={"new_low": "low", "new_high": "high"})
    return rows[names]


def first_piece(pulls: pd.DataFrame) -> pd.DataFrame:
    """Return, for arms with threads, how fast a pull of one piece is against one too small to be a piece.

    Both counts lie within a hundredth of each other (1,023 and 1,024), so that all that differs is the thread.
    Columns: ``arm``, ``link``, ``below``, ``case``, ``n``, ``speedup``, ``low``, ``high``, ``different``.
    """
    near = _threads(pulls[(pulls["descriptors"] / PIECE - 1).abs() < 0.01])
    below = near.loc[near["descriptors"] < PIECE, "case"].unique()[:1]
    out = [
        speedups(g.assign(arm=g["case"]), str(b)).rename(columns={"arm": "case"}).assign(arm=str(arm), below=str(b))
        for b in below
        for arm, g in near.groupby("arm", sort=False)
    ]
    return pd.concat(out, ignore_index=True) if out else pd.DataFrame(columns=["arm", "different"])


def quantities(cells: pd.DataFrame) -> pd.DataFrame:
    """Return medians of what the connections did, a row an arm, link and case, a column a quantity."""
    done = cells[(cells["outcome"] == "completed") & (cells["quantity"] != "rate")]
    if done.empty:
        return pd.DataFrame(columns=["arm", "link", "case", "connections", "retransmits", "cwnd", "window_scale"])
    wide = done.pivot_table(index=["arm", "link", "case"], columns="quantity", values="value", aggfunc="median")
    return wide.reset_index().rename_axis(columns=None)


def claims(
    pulls: pd.DataFrame, cells: pd.DataFrame, limits: pd.DataFrame, published: Callable[[str], float], base: str
) -> pd.DataFrame:
    """Answer the published claims: ``claim``, ``published``, ``link``, ``here``, ``answer``.

    :param published: quantity of the published table -> its value (rates in Gbps)
    :param base: label of the arm at whose segment size the other knobs were turned
    """
    rows = rates(pulls, limits)
    found = [
        *_segments(pulls, published, base),
        *_unused(rows, published),
        *_pieces(pulls, cells, published),
        *_split_pays(rows, published),
        *_buffers(pulls, quantities(cells), published, base),
    ]
    low, high = published("per_flow_cap"), published("per_flow_cap_placement_group")
    found.append(_row("a cloud caps one flow", f"{low:g} and {high:g} Gbps", "", "the link is given its cap", UNTESTED))
    return pd.DataFrame(found, columns=["claim", "published", "link", "here", "answer"])


def _row(*values: object) -> dict[str, Any]:
    return dict(zip(("claim", "published", "link", "here", "answer"), values, strict=True))


def _speedups(pulls: pd.DataFrame, baseline: str, arm: str) -> pd.DataFrame:
    found = speedups(pulls[pulls["arm"].isin([baseline, arm])], baseline)
    return found[found["arm"] == arm]


def _segments(pulls: pd.DataFrame, published: Callable[[str], float], base: str) -> list[dict[str, Any]]:
    claim, said = (
        "segment size alone speeds the pull up",
        published("rate_256k_segments") / published("rate_default_segments"),
    )
    out = []
    for r in _speedups(pulls, DEFAULT, base).to_dict("records"):
        faster = r["different"] and r["speedup"] > 1
        half = 1 + (said - 1) / 2
        answer = (HOLDS if r["speedup"] >= half else DIRECTION) if faster else NOT if r["high"] < half else UNRESOLVED
        here = f"{base}: {r['speedup']:.2f}x ({r['low']:.2f} to {r['high']:.2f})"
        out.append(_row(claim, f"{said:.1f}x", r["link"], here, answer))
    return out or [_row(claim, f"{said:.1f}x", "", "", UNTESTED)]


def _unused(rows: pd.DataFrame, published: Callable[[str], float]) -> list[dict[str, Any]]:
    claim = "UCX's own sizes leave part of a flow's cap unused"
    said = f"{published('rate_default_segments') / published('per_flow_cap'):.0%} of the cap"
    out = []
    for link, g in rows[(rows["arm"] == DEFAULT) & rows["share"].notna()].groupby("link", sort=False):
        low, high = g["share_low"].min(), g["share_high"].max()
        # Shares at one link are alike for all descriptor counts: the range covers them all.
        answer = HOLDS if high < FULL else NOT if low >= FULL else UNRESOLVED
        out.append(
            _row(claim, said, link, f"{g['share'].median():.0%} of a plain flow ({low:.0%} to {high:.0%})", answer)
        )
    return out or [_row(claim, said, "", "", UNTESTED)]


def _threads(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["arm"].str.contains(r"\d threads$")]


def _pieces(pulls: pd.DataFrame, cells: pd.DataFrame, published: Callable[[str], float]) -> list[dict[str, Any]]:
    claim, most = "a transfer goes over four connections at most", published("nixl_pieces_per_transfer_max")
    counts = pulls.drop_duplicates("case").set_index("case")["descriptors"].sort_values()
    used = _threads(cells[cells["quantity"] == "connections"])
    parts, largest = [], 0.0
    for case, count in counts.items():
        seen = used.loc[used["case"] == case, "value"]
        if len(seen):
            largest = max(largest, float(seen.max()))
            parts.append(f"{int(count):,} descriptors: {seen.median():g} ({seen.min():g} to {seen.max():g})")
    if not parts:
        return [_row(claim, f"{most:g}", "", "", UNTESTED)]
    return [_row(claim, f"{most:g}", "all", "; ".join(parts), HOLDS if 1 < largest <= most else NOT)]


def _split_pays(rows: pd.DataFrame, published: Callable[[str], float]) -> list[dict[str, Any]]:
    claim = "the split lifts a pull over the cap of one flow"
    low, high = published("aggregate_31b_all_four_busy_low"), published("aggregate_31b_all_four_busy_high")
    said, out = f"{low:g} to {high:g} Gbps, half of four flows", []
    split_ = _threads(rows[rows["link"].str.endswith("per flow") & (rows["descriptors"] >= 2 * PIECE)])
    for r in split_.to_dict("records"):
        share = r["gbps"] / r["four_gbps"]
        here = f"{r['arm']}: {r['gbps']:.2f} Gbps; plain flows: one {r['one_gbps']:.2f}, four {r['four_gbps']:.2f}"
        answer = HOLDS if r["gbps_low"] > r["one_gbps"] else NOT
        out.append(_row(claim, said, r["link"], f"{here} ({share:.0%} of four)", answer))
    return out or [_row(claim, said, "", "no link with a cap per flow, or no pull of two pieces", UNTESTED)]


def _buffers(
    pulls: pd.DataFrame, seen: pd.DataFrame, published: Callable[[str], float], base: str
) -> list[dict[str, Any]]:
    claim = "pinned socket buffers make it slower"
    low, high = published("pinned_socket_buffers_effect_low"), published("pinned_socket_buffers_effect_high")
    said, out = f"{low:g} to {high:g} %", []
    for arm in [a for a in pulls["arm"].unique() if "buffers" in a]:
        scales = (
            seen.loc[seen["arm"] == arm, "window_scale"].dropna() if "window_scale" in seen else pd.Series(dtype=float)
        )
        scale = f", receiver's window scale {scales.median():.0f}" if len(scales) else ""
        for r in _speedups(pulls, base, arm).to_dict("records"):
            here = f"{arm}: {r['speedup'] - 1:+.0%} ({r['low'] - 1:+.0%} to {r['high'] - 1:+.0%}){scale}"
            slower = r["different"] and r["speedup"] < 1
            answer = HOLDS if slower else NOT if r["low"] > 1 + low / 100 else UNRESOLVED
            out.append(_row(claim, said, r["link"], here, answer))
    return out or [_row(claim, said, "", "", UNTESTED)]
