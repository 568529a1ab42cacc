"""Ratios between arms: known ratios under drift, coverage, false alarms, invariances, the rule of both."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import recorded_pulls as recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.analysis import compare
from kvlab.errors import BadInput


def simulated(
    rng: np.random.Generator, *, ratio: float = 1.0, rounds: int = 20, pulls: int = 1, drift: float = 0.0, noise: float
) -> pd.DataFrame:
    """Two arms in interleaved rounds; ``drift`` moves a whole round, ``noise`` each pull (sigma of the logarithm)."""
    repetition = np.repeat(np.arange(rounds), pulls)
    moved = np.exp(rng.normal(0, drift, rounds)) if drift else np.ones(rounds)
    arms = []
    for arm, scale in (("base", 1000.0), ("other", 1000.0 * ratio)):
        xfer = scale * moved[repetition] * np.exp(rng.normal(0, noise, rounds * pulls))
        arms.append(pd.DataFrame({"arm": arm, "repetition": repetition, "xfer_us": xfer, "post_us": xfer / 2}))
    return pd.concat(arms, ignore_index=True)


def ratio(d: pd.DataFrame, **more: object) -> pd.Series:
    found = compare.ratios(d, **{"baseline": "base", "by": (), **more})  # type: ignore[arg-type]
    assert len(found) == 1
    return found.iloc[0]


def test_blocks_see_through_a_drift_that_hides_the_difference_from_single_pulls() -> None:
    # Rounds differ by a factor of two or so, arms by a tenth.
    d = simulated(np.random.default_rng(3), ratio=1.1, rounds=20, drift=0.7, noise=0.01)
    paired, single = ratio(d), ratio(d.drop(columns="repetition"))
    assert paired["method"] == "paired blocks" and paired["different"] and paired["low"] <= 1.1 <= paired["high"]
    assert single["method"] == "order statistics" and not single["different"]
    assert single["high"] / single["low"] > 1.5 > 1.2 > paired["high"] / paired["low"]


def test_recorded_rounds_against_numpy() -> None:
    d = recorded.polled()
    found = ratio(d, baseline="shared memory", by=["prompt_tokens"])
    kept = d[~d["warmup"]].set_index("repetition")
    tcp, shared = (kept.loc[kept["arm"] == a, "xfer_us"] for a in ("TCP", "shared memory"))
    # Medians of seven: 111,670 (TCP) and 24,119.
    assert found["ratio"] == pytest.approx(111_670 / 24_119) == pytest.approx(np.median(tcp) / np.median(shared))
    # One round is faster over TCP, third of seven in size: 5 of 2^7 sign patterns are as far out, on either side.
    assert found["p_value"] == pytest.approx(2 * 5 / 2**7) and found["n"] == 7
    assert not found["different"]


@pytest.mark.parametrize("interleaved", [True, False])
def test_coverage_and_false_alarms(interleaved: bool) -> None:
    rng, true, runs = np.random.default_rng(5), 1.3, 300
    inside = alarms = 0
    for _ in range(runs):
        d = simulated(rng, ratio=true, rounds=15, drift=0.1 if interleaved else 0, noise=0.1)
        same = d.assign(xfer_us=np.where(d["arm"] == "other", d["xfer_us"] / true, d["xfer_us"]))
        columns = [] if interleaved else ["repetition"]
        found = ratio(d.drop(columns=columns))
        inside += found["low"] <= true <= found["high"]
        alarms += ratio(same.drop(columns=columns))["different"]
    # 95 percent nominal; resampling 15 medians is a little narrow or wide, never far off.
    assert 0.91 <= inside / runs <= 0.995
    assert alarms / runs <= 0.06


def test_different_only_where_interval_and_test_agree() -> None:
    rng, seen = np.random.default_rng(11), set()
    for _ in range(300):
        found = ratio(simulated(rng, ratio=1.06, rounds=10, noise=0.06, drift=0.05))
        leaves_out, rejects = not found["low"] <= 1 <= found["high"], found["p_value"] < 0.05
        assert found["different"] == (leaves_out and rejects)
        seen.add((leaves_out, rejects))
    assert seen == {(True, True), (True, False), (False, True), (False, False)}


def test_below_six_blocks_nothing_is_called_different() -> None:
    found = ratio(simulated(np.random.default_rng(1), ratio=5, rounds=5, noise=0.01))
    assert found["ratio"] == pytest.approx(5, rel=0.05) and not found["different"]
    assert np.isnan([found["low"], found["high"], found["p_value"]]).all()
    assert ratio(simulated(np.random.default_rng(1), ratio=5, rounds=6, noise=0.01))["different"]


def test_method_says_what_was_resampled() -> None:
    d = simulated(np.random.default_rng(2), ratio=2, rounds=3000, pulls=2, noise=0.2)
    merged = ratio(d)
    assert (merged["method"], merged["blocks"], merged["pulls"]) == ("paired blocks", compare.MOST_BLOCKS, 6000)
    apart = ratio(d.assign(repetition=d["repetition"] % 20 + 20 * (d["arm"] == "other")))
    assert (apart["method"], apart["blocks"]) == ("separate blocks", 20)
    single = ratio(d.assign(repetition=0))
    assert (single["method"], single["blocks"], single["n"]) == ("order statistics", 0, 6000)
    for found in (merged, apart, single):
        assert found["different"] and found["low"] <= 2 <= found["high"]


def test_closed_form_equals_resampling() -> None:
    x = np.sort(np.random.default_rng(4).lognormal(0, 1, 51))
    rng = np.random.default_rng(6)
    plain = np.median(x[rng.integers(0, 51, (20_000, 51))], axis=1)
    closed = np.concatenate([compare._medians(x, np.random.default_rng(k)) for k in range(5)])
    for q in (0.025, 0.25, 0.5, 0.75, 0.975):
        # Within one order statistic of each other.
        assert abs(np.searchsorted(x, np.quantile(plain, q)) - np.searchsorted(x, np.quantile(closed, q))) <= 1


def test_medians_of_zero_and_missing_baseline_in_a_group() -> None:
    d = simulated(np.random.default_rng(1), rounds=8, noise=0.1)
    d.loc[d["arm"] == "base", "post_us"] = d["xfer_us"]
    found = ratio(d, value="drain_us")
    assert found["ratio"] == found["low"] == found["high"] == np.inf and found["different"]
    same = ratio(d.assign(xfer_us=7.0))
    assert same["ratio"] == same["low"] == 1 and same["p_value"] == 1 and not same["different"]
    d["prompt_tokens"] = np.where((d["arm"] == "other") & (d["repetition"] > 3), 2, 1)
    two = compare.ratios(d, baseline="base").set_index("prompt_tokens")
    assert two.loc[2, "baseline_pulls"] == 0 and np.isnan(two.loc[2, "ratio"]) and not two.loc[2, "different"]


def test_any_tidy_table_and_one_clear_line() -> None:
    d = simulated(np.random.default_rng(9), ratio=3, rounds=9, noise=0.1).rename(columns={"xfer_us": "ttft_ms"})
    assert ratio(d[["arm", "repetition", "ttft_ms"]], value="ttft_ms")["different"]
    with pytest.raises(BadInput, match=r"no pulls of the baseline arm 'TCP'; arms: base, other"):
        ratio(d, value="ttft_ms", baseline="TCP")
    with pytest.raises(BadInput, match="no column 'xfer_us'"):
        ratio(d)


@given(st.integers(0, 10**6), st.floats(0.01, 100))
@settings(deadline=None, max_examples=30)
def test_order_scale_and_sides_do_not_matter(seed: int, scale: float) -> None:
    d = simulated(np.random.default_rng(seed), ratio=1.2, rounds=12, pulls=2, drift=0.2, noise=0.2)
    one = ratio(d)
    pd.testing.assert_series_equal(one, ratio(d.sample(frac=1, random_state=seed)))
    numbers = ["ratio", "low", "high", "p_value"]
    scaled = ratio(d.assign(xfer_us=d["xfer_us"] * scale))
    assert scaled[numbers].tolist() == pytest.approx(one[numbers].tolist())
    other = compare.ratios(d, baseline="other", by=()).iloc[0]
    assert other[numbers].tolist() == pytest.approx([1 / one["ratio"], 1 / one["high"], 1 / one["low"], one["p_value"]])
