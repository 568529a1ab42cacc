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

from collections.abc import Hashable, Mapping
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
#: link, what was found here, answer
Answer = tuple[str, str, str]


def rates(pulls: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return a row an arm, link and case: median rate with interval, and shares of the plain flows.

    Columns: ``arm``, ``link``, ``case``, ``n``, ``descriptors``; ``gbps`` and ``share`` (of ``one_gbps``), each with
    ``_low`` and ``_high``; ``one_gbps`` and ``four_gbps``: median plain flow over one and over four connections.
    """
    rows = split.summary(pulls, by=("arm", "link", "case"))
    rows[["gbps", "gbps_low", "gbps_high"]] = rows[["rate_gb_s", "rate_low_gb_s", "rate_high_gb_s"]] * 8
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
    rows = compare.ratios(pulls, baseline=baseline, by=by)
    rows[["speedup", "high", "low"]] = 1 / rows[["ratio", "low", "high"]]
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
    pulls: pd.DataFrame, cells: pd.DataFrame, limits: pd.DataFrame, published: Mapping[Any, float], base: str
) -> pd.DataFrame:
    """Answer the published claims: ``claim``, ``published``, ``link``, ``here``, ``answer``.

    :param published: quantity of the published table -> its value (rates in Gbps)
    :param base: label of the arm at whose segment size the other knobs were turned
    """
    rows, p = rates(pulls, limits), published
    gain = p["rate_256k_segments"] / p["rate_default_segments"]
    used = p["rate_default_segments"] / p["per_flow_cap"]
    most = p["nixl_pieces_per_transfer_max"]
    four = [p[f"aggregate_31b_all_four_busy_{end}"] for end in ("low", "high")]
    loss = [p[f"pinned_socket_buffers_effect_{end}"] for end in ("low", "high")]
    caps = [p[f"per_flow_cap{where}"] for where in ("", "_placement_group")]
    no_split, given = "no link with a cap per flow, or no pull of two pieces", "the link is given its cap"
    found = (
        ("segment size alone speeds the pull up", f"{gain:.1f}x", _segments(pulls, gain, base)),
        ("UCX's own sizes leave part of a flow's cap unused", f"{used:.0%} of the cap", _unused(rows)),
        ("a transfer goes over four connections at most", f"{most:g}", _pieces(pulls, cells, most)),
        (
            "the split lifts a pull over the cap of one flow",
            f"{four[0]:g} to {four[1]:g} Gbps, half of four flows",
            _split_pays(rows) or [("", no_split, UNTESTED)],
        ),
        (
            "pinned socket buffers make it slower",
            f"{loss[0]:g} to {loss[1]:g} %",
            _buffers(pulls, quantities(cells), loss[0], base),
        ),
        ("a cloud caps one flow", f"{caps[0]:g} and {caps[1]:g} Gbps", [("", given, UNTESTED)]),
    )
    told = [(claim, said, *one) for claim, said, answers in found for one in answers or [("", "", UNTESTED)]]
    return pd.DataFrame(told, columns=["claim", "published", "link", "here", "answer"])


def _speedups(pulls: pd.DataFrame, baseline: str, arm: str) -> list[dict[Hashable, Any]]:
    found = speedups(pulls[pulls["arm"].isin([baseline, arm])], baseline)
    return found[found["arm"] == arm].to_dict("records")


def _threads(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows["arm"].str.contains(r"\d threads$")]


def _segments(pulls: pd.DataFrame, gain: float, base: str) -> list[Answer]:
    out, half = [], 1 + (gain - 1) / 2
    for r in _speedups(pulls, DEFAULT, base):
        faster = r["different"] and r["speedup"] > 1
        answer = (HOLDS if r["speedup"] >= half else DIRECTION) if faster else NOT if r["high"] < half else UNRESOLVED
        out.append((r["link"], f"{base}: {r['speedup']:.2f}x ({r['low']:.2f} to {r['high']:.2f})", answer))
    return out


def _unused(rows: pd.DataFrame) -> list[Answer]:
    out = []
    for link, g in rows[(rows["arm"] == DEFAULT) & rows["share"].notna()].groupby("link", sort=False):
        # Shares at one link are alike for all descriptor counts: the range covers them all.
        low, high = g["share_low"].min(), g["share_high"].max()
        answer = HOLDS if high < FULL else NOT if low >= FULL else UNRESOLVED
        out.append((str(link), f"{g['share'].median():.0%} of a plain flow ({low:.0%} to {high:.0%})", answer))
    return out


def _pieces(pulls: pd.DataFrame, cells: pd.DataFrame, most: float) -> list[Answer]:
    counts = pulls.drop_duplicates("case").set_index("case")["descriptors"]
    used = _threads(cells[cells["quantity"] == "connections"])
    seen = (
        used.assign(n=used["case"].map(counts)).dropna(subset="n").groupby("n")["value"].agg(["median", "min", "max"])
    )
    if seen.empty:
        return []
    parts = [
        f"{int(r['n']):,} descriptors: {r['median']:g} ({r['min']:g} to {r['max']:g})"
        for r in seen.reset_index().to_dict("records")
    ]
    return [("all", "; ".join(parts), HOLDS if 1 < seen["max"].max() <= most else NOT)]


def _split_pays(rows: pd.DataFrame) -> list[Answer]:
    out = []
    far = rows[rows["link"].str.endswith("per flow") & (rows["descriptors"] >= 2 * PIECE)]
    for r in _threads(far).to_dict("records"):
        here = f"{r['arm']}: {r['gbps']:.2f} Gbps; plain flows: one {r['one_gbps']:.2f}, four {r['four_gbps']:.2f}"
        here += f" ({r['gbps'] / r['four_gbps']:.0%} of four)"
        out.append((r["link"], here, HOLDS if r["gbps_low"] > r["one_gbps"] else NOT))
    return out


def _buffers(pulls: pd.DataFrame, seen: pd.DataFrame, least_percent: float, base: str) -> list[Answer]:
    out = []
    scales = dict(seen.groupby("arm")["window_scale"].median().dropna()) if "window_scale" in seen else {}
    for arm in [a for a in pulls["arm"].unique() if "buffers" in a]:
        scale = f", receiver's window scale {scales[arm]:.0f}" if arm in scales else ""
        for r in _speedups(pulls, base, arm):
            slower = r["different"] and r["speedup"] < 1
            answer = HOLDS if slower else NOT if r["low"] > 1 + least_percent / 100 else UNRESOLVED
            here = f"{arm}: {r['speedup'] - 1:+.0%} ({r['low'] - 1:+.0%} to {r['high'] - 1:+.0%}){scale}"
            out.append((r["link"], here, answer))
    return out
