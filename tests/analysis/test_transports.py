import pandas as pd
import pytest

from kvlab.analysis.transports import additions, queues


def test_additions_are_taken_at_equal_concurrency_on_the_same_host():
    ttft = pd.DataFrame(
        [("base", "a", 4, 100), ("base", "a", 8, 300), ("x", "a", 4, 150), ("x", "a", 8, 250), ("x", "b", 4, 999)],
        columns=["arrangement", "host", "concurrency", "ttft_median_ms"],
    )
    assert additions(ttft, "base")["extra_ms"].tolist() == [50, -50]


def _rows(firsts, alone_s):
    base = {"road": "r", "prompt_tokens": 1024, "mib_per_pull": 1e9 / 2**20}
    one = base | {"in_flight": 1, "pulls": 5, "xfer_ms": alone_s * 500, "ttft_p50_s": alone_s, "ttft_max_s": alone_s}
    worse = one | {"pulls": 1, "ttft_p50_s": 99.0}
    firsts = pd.Series(firsts)
    many = base | {"in_flight": len(firsts), "pulls": len(firsts), "xfer_ms": 0.0}
    many |= {"ttft_p50_s": firsts.median(), "ttft_max_s": firsts.max()}
    return pd.DataFrame([worse, one, many])


def test_a_first_come_queue_and_a_shared_road_end_alike_and_differ_in_the_median():
    queue = queues(_rows([2.0 * k for k in range(1, 11)], 2.0)).iloc[0]
    road = queues(_rows([20.0] * 10, 2.0)).iloc[0]
    for found in (queue, road):
        assert found["predicted_s"] == 20 and found["last_ratio"] == 1 and found["queue_share"] == 0.55
        assert found["rate_alone_gb_s"] == pytest.approx(1.0) and found["rate_n_gb_s"] == pytest.approx(0.5)
        assert found["pull_share"] == 0.5
    assert queue["p50_share"] == pytest.approx(0.55) and road["p50_share"] == 1
