import json
import os
import subprocess
import sys

import pandas as pd
import pytest

from kvlab import experiments, params, runs
from kvlab.errors import BadInput
from kvlab.views import ttft_by_transport as view

NAME = "ttft-by-transport"


@pytest.fixture
def own(tmp_path):
    run = runs.create(NAME, {}, run_dir=tmp_path / "own")
    ttft = [1.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, None]
    requests = {"arm": "mine", "request": [str(i) for i in range(9)], "concurrency": 4, "ttft_ms": ttft}
    requests |= {"warmup": [True] + [False] * 8, "error": [None] * 8 + ["refused"]}
    run.write("requests", pd.DataFrame(requests))
    run.write("verdicts", pd.DataFrame({"arm": ["mine"], "transport": ["tcp"]}))
    run.write("pulls", pd.DataFrame({"arm": ["mine"], "bytes": [8], "post_us": [1.0], "xfer_us": [98e6]}))
    return run.path


def test_rows_are_marked_as_their_source_gives_them():
    marks = view.guide().set_index("transport")["mark"]
    assert set(marks.index[marks == "measured"]) == {
        "EFA libfabric + GDRCopy/GPUDirect",
        "EFA through UCX without GPUDirect",
        "TCP fallback",
    }
    points = view.placed(params.TtftByTransport())
    assert set(points["mark"]) == {"expected", "measured"}
    assert (points["x_s"] > 0).all(), "a log scale has no place for the rest"
    tcp = points[(points["row"] == "TCP, 1 in flight")]["x_s"]
    assert (tcp.min(), tcp.max()) == (1.488, 6.146)
    tcp = points[(points["row"] == "TCP, 8 to 30 in flight")]["x_s"]
    assert (tcp.min(), tcp.max()) == (44.759, 114.472)


def test_the_98_seconds_are_taken_apart():
    case = view.apart().set_index("arm")["x_s"].iloc[:3]
    assert case.to_dict() == {
        "one alone": pytest.approx(10.5),
        "N x one alone": pytest.approx(105),
        "N at a time, median to last": 98,
    }


def test_own_run_is_placed_with_its_evidence(own):
    rows = view.own(str(own))
    ttft, pull = rows[rows["panel"] == view.TTFT].iloc[0], rows[rows["panel"] == view.ADDED].iloc[0]
    assert ttft["row"] == "yours: mine (tcp)" and ttft["x_s"] == 0.04, "neither warm-up nor errors count"
    assert pull["x_s"] == 98
    points = view.placed(params.TtftByTransport(own_run=str(own)))
    assert (points["mark"] == view.OWN).sum() == 2
    run = runs.load("ttft_by_transport/published")
    text = view.conclude(run, params.TtftByTransport(own_run=str(own)))
    assert "nearest to TCP fallback (measured), 1.0 times apart" in text
    assert "queue holds" in text and "range is REFUTED" in text


def test_own_run_without_anything_to_place(tmp_path):
    run = runs.create(NAME, {}, run_dir=tmp_path / "empty")
    with pytest.raises(BadInput, match="no request with a TTFT and no pull"):
        view.own(str(run.path))
    with pytest.raises(BadInput, match="no run at 'nowhere'"):
        params.validate(NAME, {"own_run": "nowhere"})


def test_run_replays_with_one_s_own_run(own, tmp_path):
    words = [sys.executable, "-m", "kvlab.cli", "run", NAME, "-p", f"own_run={own}"]
    root = str(experiments.shared_dir("notebooks").parent)
    done = subprocess.run(
        words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root}, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["outcome"] == "completed" and "yours: mine (tcp)" in document["verdict"]
    charts = {p.name for p in (tmp_path / "runs").rglob("charts/*.svg")}
    assert charts == {"placed.svg", "apart.svg"}
