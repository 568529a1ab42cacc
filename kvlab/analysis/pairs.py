"""Several pairs of agents pulling at once: the rate of each, and of all together against the slowest link."""

from __future__ import annotations

import pandas as pd

TOTAL = "all together"


def rates(pulls: pd.DataFrame, limits: pd.DataFrame) -> pd.DataFrame:
    """Return medians over the rounds, a row an arm, prompt length and pair, then one for all pairs together.

    A pair's rate in a round is its bytes over the time from its start to its last pull's end.  All together: the bytes
    of all over the time from the first start to the last end; starts are the controller's clock at the sending,
    durations the nodes' own, so no two nodes' clocks are compared (a message to a node takes about a millisecond).

    :param pulls: table ``pulls`` with ``pair`` and ``start_s``; warm-up is left out
    :param limits: table ``limits``; the slowest link is the least median of its ``plain TCP socket`` rows by ``link``
    :returns: arm, prompt_tokens, pair (``all together`` for the total), link, rounds, gb_per_s, link_gb_per_s (of the
        pair's own link, or the slowest) and share, the rate over it
    """
    own = pulls[~pulls["warmup"].astype(bool)]
    own = own.assign(end_s=own["start_s"] + own["xfer_us"] / 1e6, pair=own["pair"].astype(str))
    if "link" not in own:
        own["link"] = None
    sockets = limits[limits["name"] == "plain TCP socket"] if len(limits) else limits
    links = sockets.groupby("link")["gb_per_s"].median() if "link" in sockets else pd.Series(dtype=float)
    keys = ["arm", "prompt_tokens", "repetition", "pair"]
    rows = []
    for pulled in (own, own.assign(pair=TOTAL, link=None)):
        rounds = pulled.groupby(keys, sort=False).agg(
            bytes=("bytes", "sum"), first=("start_s", "min"), last=("end_s", "max"), link=("link", "first")
        )
        rounds["gb_per_s"] = rounds["bytes"] / (rounds["last"] - rounds["first"]) / 1e9
        each = rounds.reset_index().groupby(["arm", "prompt_tokens", "pair"], sort=False)
        rows.append(each.agg(link=("link", "first"), rounds=("bytes", "size"), gb_per_s=("gb_per_s", "median")))
    out = pd.concat(rows).reset_index()
    slowest = links.min() if len(links) else float("nan")
    out["link_gb_per_s"] = out["link"].map(links).where(out["pair"] != TOTAL, slowest).astype(float)
    return out.assign(share=out["gb_per_s"] / out["link_gb_per_s"])
