import pandas as pd
import pytest

from kvlab import runs
from kvlab.analysis import split
from kvlab.views import published_split as view


@pytest.fixture
def run(tmp_path):
    arms = [{"label": "one"}, {"label": "two"}]
    run = runs.create("post-vs-completion", {"arms": arms}, run_dir=tmp_path / "run")
    rows = [
        {"arm": arm, "prompt_tokens": tokens, "descriptors": 100, "bytes": 10**6, "repetition": i, "case": "c"}
        | {"in_flight": 1, "warmup": False, "post_us": post, "xfer_us": xfer, "error": None}
        for tokens in (4096, 16384)
        for arm, post, xfer in (("one", 1000.0, 4000.0), ("two", 500.0, 10000.0))
        for i in range(8)
    ]
    run.write("pulls", pd.DataFrame(rows))
    return run


@pytest.fixture
def summary(run):
    return split.summary(run.table("pulls"))


def test_published_and_own_pulls_stand_side_by_side(summary, run):
    frame = view.pulls(summary, run).set_index(["prompt_tokens", "arm"])
    roce = frame.xs("B300, RoCE (rc_mlx5)", level="arm")
    assert roce["relative"].to_dict() == {4096: 0.66, 8192: 0.86, 16384: 0.73}
    assert set(roce["status"]) == {"published"}
    assert roce["pull_ms"].dropna().to_dict() == {16384: 20.9}, "milliseconds at 16k only, and those are derived"
    assert roce.loc[16384, "ms_status"] == "derived"
    assert frame.loc[(16384, "two"), "relative"] == 2.5 and frame.loc[(16384, "two"), "pull_ms"] == 10
    assert frame.loc[(4096, "one"), "status"] == "measured, this run"


def test_halves_with_their_status(summary, run):
    frame = view.halves(summary, run).set_index("arm")
    nvlink, roce = frame.loc["B300, NVLink (cuda_ipc)"], frame.loc["B300, RoCE (rc_mlx5)"]
    assert nvlink["post_share"] == pytest.approx(11.5 / 28.7) and nvlink["status"] == "derived"
    assert roce["post_share"] == pytest.approx(0.81 / 20.91) and roce["post_status"] == "published"
    assert frame.loc["H200, vLLM, cuda_ipc, 16-token blocks", "post_share"] == pytest.approx(161.3 / 213.5)
    assert frame.loc["H200, two agents, cuda_ipc, no threads", "post_per_descriptor_us"] == pytest.approx(46610 / 4279)
    assert frame.loc["this run, one", "post_share"] == 0.25
    assert frame.loc["this run, two", "post_per_descriptor_us"] == 5


def test_bounds_are_the_published_numbers_worked_through():
    b = view.bounds()
    assert b["copy_busy_us"] == pytest.approx(28700 / 4250)
    assert b["done_when_posted"] == pytest.approx(4250 * 11.5 / 28.7)
    assert b["copy_after_post_us"] == pytest.approx(17200 / 4250)
    assert b["lead_ms"] == pytest.approx(7.8)
    gb = 0.0287 * 19
    assert (b["link_fast_ms"], b["link_slow_ms"]) == (pytest.approx(gb / 0.9), pytest.approx(gb / 0.45))
    assert b["roce_after_gb_s"] == pytest.approx(gb / 0.0201)
    assert b["pull_by_rounded_bytes_ms"] == pytest.approx(600 / 19)
    assert b["thread_us"] == pytest.approx(10.8) and b["one_thread_us"] == pytest.approx(10.89, abs=0.01)


def test_what_is_not_shown_is_said_in_numbers():
    text = view.not_shown()
    assert "{" not in text and len(text.splitlines()) > 15
    for words in ("1,703 of 4,250", "between 0 and 40%", "polls 7.8 ms apart", "36% instead of 40%"):
        assert words in " ".join(text.split())


def test_table_and_charts_are_drawn(summary, run):
    assert "measured, this run" in view.pull_table(summary, run).as_raw_html()
    view.split_chart(summary, run), view.per_descriptor_chart(summary, run)
    assert {p.name for p in (run.path / "charts").glob("*.svg")} == {
        "published_split.svg",
        "published_per_descriptor.svg",
    }
