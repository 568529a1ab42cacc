"""The split on recorded pulls, on tables worked by hand, and its invariances."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import recorded_pulls as recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.analysis import split
from kvlab.errors import BadInput


def table(**columns: object) -> pd.DataFrame:
    return pd.DataFrame({"arm": "a", "prompt_tokens": 1, "descriptors": 10, "bytes": 1000, **columns})


def test_verdicts_of_the_h200_pulls() -> None:
    found = split.summary(recorded.h200(), by=["arm", "descriptors"]).set_index(["arm", "descriptors"])["verdict"]
    # cuda_ipc: 64 of 8 MiB post 586 of 1040 us, 8 of 64 MiB 57 of 421.
    ipc = found["VRAM cuda_ipc on"]
    assert ipc.to_dict() == {n: "post-bound" for n in (16384, 4279, 512, 64)} | {8: "drain-bound", 2: "drain-bound"}
    # cma copies inside the post: 110 ms for 8 descriptors, 151 for 2,048 times as many of the same bytes.
    assert set(found["DRAM shared memory (cma) auto"]) == {"synchronous"}
    # TCP's post is 82 percent at 16,384 descriptors, and follows their count.
    assert found["DRAM tcp (software emulation) auto"].to_dict() == {
        16384: "post-bound",
        4279: "drain-bound",
        512: "drain-bound",
        8: "drain-bound",
    }
    assert set(found["VRAM tcp (software emulation) auto"]) == {"drain-bound"}


def test_verdicts_inside_an_engine() -> None:
    found = split.summary(recorded.vllm(), by=["config", "prompt_tokens"]).set_index("config")
    assert set(found.loc[["cuda_ipc", "blk128", "xlayer"], "verdict"]) == {"post-bound"}
    assert set(found.loc[["tcp", "tcp2", "ipc_noget"], "verdict"]) == {"drain-bound"}
    assert found.loc["cuda_ipc", "post_share"].to_numpy() == pytest.approx([39.8 / 55.3, 78.3 / 105.7, 161.3 / 213.5])


def test_a_pull_that_one_look_decides_is_poll_bound() -> None:
    found = split.summary(recorded.polled(), by=["arm", "repetition"]).set_index(["arm", "repetition"])
    tcp = found.loc["TCP"]
    # Round 2: 15,993 us posting, then 52,556 until seen, of which 50,000 may be waiting for the look.
    assert tcp.loc[2, "poll_share"] == pytest.approx(50_000 / 68_549)
    assert tcp.loc[2, "drain_share"] == pytest.approx(52_556 / 68_549)
    # With more looks only the last interval may be waiting: of round 4's drain 50,000 of 95,896, less in the others.
    assert tcp["verdict"].to_dict() == {
        **dict.fromkeys([0, 1, 3, 6], "drain-bound"),
        **dict.fromkeys([2, 4, 5], "poll-bound"),
    }
    # One descriptor size: nobody can tell whether the post follows bytes, so it is not called synchronous.
    assert found.loc[("shared memory", 0), "verdict"] == "post-bound"
    assert found["post_bytes_share"].isna().all()


def test_an_unknown_poll_interval_is_not_called_poll() -> None:
    found = split.summary(table(post_us=[1.0], xfer_us=[10.0])).iloc[0]
    assert np.isnan(found["poll_us"]) and found["verdict"] == "drain-bound"
    known = split.summary(table(post_us=[1.0], xfer_us=[10.0], poll_interval_us=100.0)).iloc[0]
    assert known["poll_us"] == 9 and known["verdict"] == "poll-bound"


def test_p90_is_of_each_pulls_own_drain() -> None:
    # Long posts go with short drains: the P90s of post and pull differ by next to nothing.
    post, drain = np.arange(0.0, 101), np.arange(100.0, -1, -1)
    row = split.summary(table(post_us=post, xfer_us=post + drain)).iloc[0]
    assert (row["post_p90_us"], row["drain_p90_us"], row["xfer_p90_us"]) == pytest.approx((90, 90, 100))
    assert row["xfer_p90_us"] - row["post_p90_us"] == pytest.approx(10)


def test_warm_ups_and_errors_do_not_count() -> None:
    d = table(post_us=[1.0, 2, 3], xfer_us=[2.0, 4, 2.5], warmup=[True, False, None], error=[None, None, None])
    assert split.warm(d)["drain_us"].tolist() == [2, 0]
    assert len(split.warm(d.assign(error=[None, "lost", None]))) == 1
    assert "drain_us" not in split.warm(pd.DataFrame({"arm": ["a"], "ttft_ms": [1.0]}))


@pytest.mark.parametrize(("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (100, (40, 61))])
def test_median_interval_has_the_ranks_of_the_sign_test(n: int, ranks: tuple[int, int]) -> None:
    values = np.arange(1.0, n + 1)
    assert split.median_interval(values[::-1]) == ((n + 1) / 2, *ranks)


def test_median_interval_of_few_and_missing_values() -> None:
    middle, low, high = split.median_interval([3, 1, np.nan, 2, 5, 4])
    assert middle == 3 and np.isnan(low) and np.isnan(high)
    assert np.isnan(split.median_interval([])).all()


SHAPE = ["descriptors", "bytes", "post_us"]


def test_post_by_size_is_exact_and_says_when_it_cannot_tell() -> None:
    d = pd.DataFrame({"descriptors": [10, 1000, 50, 5], "bytes": [1e6, 1e6, 5e8, 1e9]})
    d["post_us"] = 2.7 * d["descriptors"] + 2e-4 * d["bytes"]
    assert split.post_costs(d[SHAPE].to_numpy(float)) == pytest.approx((2.7, 2e-4))
    assert np.isnan(split.post_costs(d.assign(bytes=d["descriptors"] * 131072)[SHAPE].to_numpy(float))).all()


def test_groups_without_a_prompt_and_a_missing_column() -> None:
    d = table(post_us=[1.0], xfer_us=[2.0])
    assert split.summary(d, by=[])["n"].tolist() == [1]
    with pytest.raises(BadInput, match="no column 'prompt_tokens'"):
        split.summary(d.drop(columns="prompt_tokens"))


pulls = st.lists(st.tuples(st.floats(1, 1e6), st.floats(0, 1e6), st.sampled_from([1, 8, 512])), min_size=1, max_size=30)


@given(pulls, st.floats(0.01, 100), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_scale_and_order_do_not_matter(made: list[tuple[float, float, int]], scale: float, random: object) -> None:
    post, drain, n = (np.array(v, dtype=float) for v in zip(*made, strict=True))
    d = table(post_us=post, xfer_us=post + drain).assign(descriptors=n, bytes=2**20, poll_interval_us=1e5)
    one = split.summary(d).iloc[0]
    mixed = split.summary(d.sample(frac=1, random_state=random.randrange(2**32))).iloc[0]  # type: ignore[attr-defined]
    pd.testing.assert_series_equal(one, mixed)
    times = ["post_us", "xfer_us", "poll_interval_us"]
    scaled = split.summary(d.assign(**{c: d[c] * scale for c in times})).iloc[0]
    for name in ("post", "drain", "xfer", "poll"):
        assert scaled[f"{name}_us"] == pytest.approx(one[f"{name}_us"] * scale, rel=1e-6, abs=1e-3 * scale)
        if name != "xfer":
            assert scaled[f"{name}_share"] == pytest.approx(one[f"{name}_share"], abs=1e-6)
    assert one["post_share"] <= 1 and 0 <= one["poll_share"] <= one["drain_share"] + 1e-12
