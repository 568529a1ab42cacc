"""Bytes pulled against bytes that a device counted: the check on a transport that needs no word of UCX."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd

#: counters of what a device received: a pull arrives at the side that reads
RECEIVED = re.compile(r"^rx|rcv|recv|read_bytes|^in|inoct", re.IGNORECASE)


def explained(counters: pd.DataFrame, pulled: Mapping[str, float]) -> pd.DataFrame:
    """Return, for each arm and device, which share of the bytes pulled its receiving counter explains.

    :param counters: the run's table ``counters``
    :param pulled: arm -> bytes pulled in the same turns, warm-up included
    :returns: arm, device, kind, counter, pulled_bytes, counted_bytes (background taken off), share and its
        95 percent bounds ``low`` and ``high`` (two standard deviations of the background alone), usable,
        note.  A share a little above 1 is protocol overhead; near 0 on every device: no device that counts
        carried the payload.  Unusable counters have no share.  Bytes may pass several interfaces of one
        path (bond, bridge), so shares of devices are not added.
    """
    frame = counters[counters["counter"].astype(str).str.contains(RECEIVED) & counters["arm"].isin(list(pulled))].copy()
    frame["pulled_bytes"] = frame["arm"].map(pulled).astype(float)
    expected = frame["background_bytes"].astype(float).fillna(0)
    spread = 2 * frame["background_uncertainty_bytes"].astype(float).fillna(0)
    frame["counted_bytes"] = frame["delta_bytes"].astype(float) - expected
    for name, shift in (("share", 0), ("low", -spread), ("high", spread)):
        share = (frame["counted_bytes"] + shift) / frame["pulled_bytes"].where(frame["pulled_bytes"] > 0)
        frame[name] = share.where(frame["usable"].astype(bool))
    columns = ["arm", "device", "kind", "counter", "pulled_bytes", "counted_bytes", "share", "low", "high"]
    return frame[[*columns, "usable", "note"]].reset_index(drop=True)


def sentence(shares: pd.DataFrame, arm: str) -> str:
    """Say what the counters say of one arm: the devices that explain a tenth or more, or that none does."""
    own = shares[shares["arm"] == arm]
    known = own.dropna(subset=["share"]).sort_values("share", ascending=False)
    if known.empty:
        return f"{arm}: no usable counter"
    carried = known[known["share"] >= 0.1]
    if len(carried):
        return f"{arm}: " + ", ".join(f"{r.device} counted {r.share:.0%} of the bytes" for r in carried.itertuples())
    most = known.iloc[0]
    blind = sorted(own.loc[own["share"].isna(), "device"].unique())
    besides = f" ({', '.join(blind)} cannot tell)" if blind else ""
    share = f"{max(most['share'], 0):.2g} of them on {most['device']}"
    return f"{arm}: no device counted the bytes; the most is {share}{besides}"
