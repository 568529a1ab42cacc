"""Longest gaps, pass rates and the ranking, with numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from kvlab.analysis import stalls


def chunked(*parts):
    return pa.chunked_array([pa.array(p, pa.list_(pa.float64())) for p in parts])


def made(arm="a", n=100, ttft=100.0, gap=20.0, **more):
    return pd.DataFrame(
        {"arm": arm, "request": [str(i) for i in range(n)], "ttft_ms": ttft, "gaps_ms": [[5.0, gap, 5.0]] * n, **more}
    )


def test_longest_of_odd_lists():
    gaps = chunked([[1, 3, 2], [], None, [7]], [[]], [], [[4, float("nan"), 6], [None, 2.0]])
    assert stalls.longest(gaps) == pytest.approx([3, np.nan, np.nan, 7, np.nan, 6, 2], nan_ok=True)
    assert stalls.longest(gaps.slice(3, 3)) == pytest.approx([7, np.nan, 6], nan_ok=True)
    assert len(stalls.longest(chunked([]))) == 0


def test_longest_and_p99_against_plain_python():
    rng = np.random.default_rng(1)
    lists = [list(rng.exponential(10, rng.integers(0, 9))) for _ in range(500)]
    gaps = chunked(lists[:200], lists[200:])
    assert stalls.longest(gaps) == pytest.approx([max(x, default=np.nan) for x in lists], nan_ok=True)
    assert stalls.p99(gaps) == pytest.approx(np.percentile([v for x in lists for v in x], 99))
    assert stalls.p99(gaps.slice(150, 100)) == pytest.approx(np.percentile([v for x in lists[150:250] for v in x], 99))
    assert np.isnan(stalls.p99(chunked([[]])))


def test_the_p99_hides_one_stall_in_each_request():
    # One gap of 200 in 200 is half a percent of all gaps: the p99 says 10 ms, and every request stalls for 48.
    frame = made(n=50).assign(gaps_ms=[[10.0] * 199 + [48.0]] * 50)
    row = stalls.summary(frame).iloc[0]
    assert (row["itl_p99_ms"], row["gap_median_ms"], row["gap_p10_ms"], row["gap_p90_ms"]) == (10, 48, 48, 48)
    assert row["hidden"] == 1.0
    # One in 50 is two percent: it shows.
    shown = stalls.summary(frame.assign(gaps_ms=[[10.0] * 49 + [48.0]] * 50)).iloc[0]
    assert (shown["itl_p99_ms"], shown["hidden"]) == (48, 0.0)


def test_summary_leaves_out_warm_up_and_failures_and_counts_them():
    good = made(n=20, start_s=[i * 1.0 for i in range(20)], e2e_ms=1000.0, output_tokens=4, repetition=1)
    warm = made(n=3, gap=900.0, warmup=True, start_s=0.0, e2e_ms=1e6, output_tokens=4)
    bad = made(n=2, gap=800.0, error="refused", start_s=0.0, e2e_ms=1e6, output_tokens=0)
    row = stalls.summary(pd.concat([warm, good.assign(warmup=False), bad], ignore_index=True)).iloc[0]
    assert (row["n"], row["failed"], row["gap_p90_ms"], row["itl_p99_ms"]) == (22, 2, 20, 20)
    # 20 requests of 4 tokens, the last ends at 20 s
    assert row["output_tokens_per_s"] == pytest.approx(4)


def test_frame_and_arrow_table_say_the_same():
    both = pd.concat([made("a", 30, gap=20), made("b", 40, gap=30)], ignore_index=True).sample(frac=1, random_state=1)
    table = pa.Table.from_pandas(both, preserve_index=False)
    pd.testing.assert_frame_equal(stalls.summary(both), stalls.summary(table))
    by_arm = stalls.summary(table).set_index("arm")
    assert by_arm["gap_median_ms"].to_dict() == {"a": 20, "b": 30}
    assert by_arm["n"].to_dict() == {"a": 30, "b": 40}


def test_without_lists_the_longest_gap_column_serves():
    frame = made(n=10).drop(columns="gaps_ms").assign(longest_gap_ms=33.0)
    row = stalls.summary(frame).iloc[0]
    assert row["gap_median_ms"] == 33 and np.isnan(row["itl_p99_ms"]) and np.isnan(row["hidden"])


def test_wilson():
    # 9 of 10 by hand: (0.9 + 0.192073 -+ 1.959964 * sqrt(0.009 + 0.0096036)) / 1.384146
    low, high = stalls.wilson([9, 0, 0], [10, 10, 0])
    assert (low[0], high[0]) == pytest.approx((0.595850, 0.982124), abs=1e-4)
    assert low[1] == pytest.approx(0, abs=1e-9) and high[1] == pytest.approx(0.277533, abs=1e-4)
    assert (low[2], high[2]) == pytest.approx((0, 1), abs=1e-6)


def test_a_load_is_judged_by_request():
    # 100 requests: 95 keep 50 ms, 5 stall for 80. The p99 of their gaps is 80 or 20, whatever: 95 percent pass.
    good = [made(n=95, gap=20), made(n=5, gap=80)]
    frame = pd.concat(good, ignore_index=True).assign(rate_rps=1.0)
    cells = stalls.grid(frame, [50, 1000], [10, 50, 100]).set_index(["ttft_limit_ms", "gap_limit_ms"])
    assert cells["passed"].to_dict() == {
        (50, 10): 0,
        (50, 50): 0,
        (50, 100): 0,
        (1000, 10): 0,
        (1000, 50): 95,
        (1000, 100): 100,
    }
    # Wilson for 95 of 100: 0.888 to 0.978, so 90 percent is not settled; 100 of 100: 0.963 up.
    assert cells.loc[(1000, 50), "state"] == "unresolved"
    assert cells.loc[(1000, 100), "state"] == "supported"
    assert cells.loc[(1000, 10), "state"] == "not supported"


def test_failures_pass_nowhere_and_single_tokens_have_no_gap():
    frame = pd.concat([made(n=60, error="x"), made(n=60).assign(gaps_ms=[[]] * 60)]).assign(rate_rps=1.0)
    cell = stalls.grid(frame, [1e9], [0.001]).iloc[0]
    assert (cell["n"], cell["passed"], cell["state"]) == (120, 60, "not supported")


def rows(config, states):
    return pd.DataFrame(
        [(1000, 50, config, load, s) for load, s in states.items()],
        columns=["ttft_limit_ms", "gap_limit_ms", "config", "load", "state"],
    )


S, N, U = "supported", "not supported", "unresolved"


@pytest.mark.parametrize(
    ("a", "b", "outcome"),
    [
        ({1: S, 2: S, 4: N}, {1: S, 2: N, 4: N}, "A"),
        ({1: S, 2: N}, {1: S, 2: S}, "B"),
        ({1: S, 2: S, 4: N}, {1: S, 2: S, 4: N}, "tie"),
        ({1: S, 2: U}, {1: S, 2: N}, "unresolved"),
        ({1: S, 2: S}, {1: S, 2: U}, "unresolved"),
        ({1: S, 2: S, 4: U}, {1: S, 2: N, 4: N}, "A"),
        ({1: N, 2: N}, {1: N, 2: N}, "none supports it"),
        ({1: U, 2: N}, {1: N, 2: N}, "unresolved"),
    ],
)
def test_rank(a, b, outcome):
    found = stalls.rank(pd.concat([rows("A", a), rows("B", b)]))
    assert found["outcome"].tolist() == [outcome]


def test_rank_of_three_ties_at_the_top_only():
    three = pd.concat([rows("A", {1: S, 2: S}), rows("B", {1: S, 2: S}), rows("C", {1: S, 2: N})])
    found = stalls.rank(three).iloc[0]
    assert (found["outcome"], found["detail"]) == ("tie", "A 2, B 2, C 1")


def test_grid_and_rank_together():
    quick = pd.concat([made("tuned", 60, gap=25, rate_rps=r) for r in (1.0, 2.0)])
    slow = pd.concat(
        [made("1P1D", 60, ttft=600, gap=8, rate_rps=1.0), made("1P1D", 60, ttft=3000, gap=8, rate_rps=2.0)]
    )
    cells = stalls.grid(pd.concat([quick, slow]), [500, 1000, 5000], [10, 50])
    found = stalls.rank(cells).set_index(["ttft_limit_ms", "gap_limit_ms"])["outcome"].to_dict()
    none = "none supports it"
    assert found == {(500, 10): none, (500, 50): "tuned", (1000, 10): "1P1D", (1000, 50): "tuned",
                     (5000, 10): "1P1D", (5000, 50): "tie"}  # fmt: skip
