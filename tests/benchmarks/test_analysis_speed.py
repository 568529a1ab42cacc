"""Split, comparison and cost model of 10 million pulls in 60 s and 4 GB or less (run by hand: -m slow -s)."""

from __future__ import annotations

import resource
import time

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis import compare, cost, split

PULLS = 10_000_000


def table(rounds: int | None) -> pd.DataFrame:
    """Two arms taking turns; ``rounds`` None: an engine's pulls, without rounds."""
    rng = np.random.default_rng(1)
    second, size = rng.integers(0, 2, PULLS).astype(bool), 2.0 ** rng.integers(27, 32, PULLS)
    n = size / 2.0 ** rng.integers(15, 24, PULLS)
    post = (20 + np.where(second, 2.7, 0.19) * n) * rng.lognormal(0, 0.1, PULLS)
    wire = (100 + np.where(second, 0.9, 0.05) * n + size / np.where(second, 1e5, 25e3)) * rng.lognormal(0, 0.1, PULLS)
    columns = {"descriptors": n.astype(np.int64), "bytes": size.astype(np.int64), "post_us": post}
    columns |= {"xfer_us": np.maximum(post, wire), "poll_interval_us": np.zeros(PULLS)}
    if rounds:
        columns["repetition"] = np.arange(PULLS) * rounds // PULLS
    arm = pd.Categorical.from_codes(second.astype(np.int8), ["rdma", "ipc"]).astype(str)
    return pd.DataFrame({"arm": arm, "prompt_tokens": (size / 2**15).astype(np.int64), **columns})


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rounds", [20_000, None], ids=["rounds", "no rounds"])
def test_ten_million_pulls(rounds: int | None) -> None:
    pulls, seconds, start = table(rounds), {}, time.perf_counter()
    for name, what in {
        "split": lambda: split.summary(pulls),
        "compare": lambda: compare.ratios(pulls, baseline="rdma"),
        "cost": lambda: [cost.fit(g) for _, g in pulls.groupby("arm", sort=False)],
    }.items():
        found = what()
        seconds[name] = time.perf_counter() - start - sum(seconds.values())
        if name == "compare":
            assert set(found["method"]) == {"paired blocks" if rounds else "order statistics"}
            assert (found["blocks"] == (compare.MOST_BLOCKS if rounds else 0)).all() and found["different"].all()
        if name == "cost":
            theta = {f.arm: f.theta for f in found}
            assert theta["ipc"][1] == pytest.approx(2.7, rel=0.01) and theta["rdma"][1] == pytest.approx(0.19, rel=0.01)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    whole = sum(seconds.values())
    each = ", ".join(f"{name} {s:.1f}" for name, s in seconds.items())
    print(
        f"\n{rounds or 'no'} rounds: {whole:.1f} s ({each}); peak {peak:.2f} GiB, the table of {PULLS:,} pulls included"
    )
    assert whole <= 60 and peak <= 4
