"""The rate while any pull was in flight, by hand: 100 and 200 bytes x 10^9 over half-overlapping seconds."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlab.analysis.relative import rate_in_flight

PULLS = pd.DataFrame(
    {
        "start_s": [0.0, 0.5, 3.0, None],
        "xfer_us": [1e6, 1e6, 1e6, 1e6],
        "bytes": [100e9, 100e9, 100e9, 100e9],
    }
)


def test_overlapping_pulls_count_their_time_once():
    # 0 to 1.5 and 3 to 4: 2.5 s for 300 GB; summed 3 s.
    rate = rate_in_flight(PULLS)
    assert rate == pytest.approx({"gb_per_s": 120, "low": 120, "high": 120, "per_pull_gb_per_s": 100, "in_flight": 1.2})


def test_unsure_starts_give_bounds():
    # At the longest -0.1 to 1.6 and 2.9 to 4.1: 2.9 s; at the surest 0.1 to 0.9, 0.6 to 1.4 and 3.1 to 3.9: 2.1 s.
    rate = rate_in_flight(PULLS.assign(start_uncertainty_s=0.1))
    assert (rate["low"], rate["high"]) == pytest.approx((300 / 2.9, 300 / 2.1))


def test_a_pull_inside_another_adds_no_time():
    nested = pd.DataFrame({"start_s": [0.0, 0.1], "xfer_us": [1e6, 1e5], "bytes": [1e9, 1e9]})
    assert rate_in_flight(nested)["gb_per_s"] == pytest.approx(2)
    assert rate_in_flight(PULLS.iloc[3:]) is None
