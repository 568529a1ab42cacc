"""Rates of pairs that pull at once, worked by hand."""

import pandas as pd
import pytest

from kvlab.analysis import pairs


def row(pair, start_s, xfer_ms, repetition=0, warmup=False, link="a"):
    return {
        "arm": "TCP", "prompt_tokens": 1024, "pair": pair, "bytes": 10**9, "start_s": start_s,
        "xfer_us": xfer_ms * 1e3, "repetition": repetition, "warmup": warmup, "link": link,
    }  # fmt: skip


LIMITS = pd.DataFrame(
    [
        {"name": "plain TCP socket", "link": link, "gb_per_s": rate}
        for link, rates in {"a": [3.0, 4.0, 5.0], "b": [2.0]}.items()
        for rate in rates
    ]
    + [{"name": "memory copy", "link": "b", "gb_per_s": 0.1}]
)


def test_each_pair_and_all_together():
    pulls = pd.DataFrame(
        [
            row(0, 10.0, 500),
            row(1, 10.5, 1000, link="b"),  # begins when the other has ended
            row(0, 20.0, 500, 1),
            row(1, 20.0, 1000, 1, link="b"),
            row(0, 1.0, 9000, -1, warmup=True),
        ]
    )
    found = pairs.rates(pulls, LIMITS).set_index("pair")
    assert found["gb_per_s"].to_dict() == pytest.approx({"0": 2.0, "1": 1.0, pairs.TOTAL: (2 / 1.5 + 2 / 1.0) / 2})
    # Each against its own link, all together against the slowest.
    assert found["link_gb_per_s"].to_dict() == {"0": 4.0, "1": 2.0, pairs.TOTAL: 2.0}
    assert found["share"].to_dict() == pytest.approx({"0": 0.5, "1": 0.5, pairs.TOTAL: 5 / 6})
    assert found["rounds"].eq(2).all()


def test_several_pulls_of_a_pair_in_flight_are_one_round():
    found = pairs.rates(pd.DataFrame([row(0, 0.0, 1000), row(0, 0.0, 2000)]), pd.DataFrame())
    assert found["gb_per_s"].tolist() == pytest.approx([1.0, 1.0]) and found["link_gb_per_s"].isna().all()
