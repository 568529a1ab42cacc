"""What experiments with engines share: evidence however a run ends, phases in time, and the order of starts."""

import time
from types import SimpleNamespace

import pandas as pd
import pytest

from kvlab import runs
from kvlab.analysis.join import pulls_to_phases
from kvlab.engines.launch import Cluster
from kvlab.engines.load import Load
from kvlab.errors import RunFailed
from kvlab.measures.engines import Bench, Engines, in_turn
from kvlab.params import EngineArm

ARM = EngineArm(label="TCP", expect="tcp")


def test_a_failure_before_the_first_phase_keeps_its_own_error(tmp_path):
    run = runs.create("relative-to-nvlink", {}, run_dir=tmp_path / "run")
    log = run.logs / "decode-0.log"
    log.write_text("nothing of UCX in here\n")
    # Pulled in the answer check, before any phase: no descriptor count is known.
    run.write("pulls", pd.DataFrame([{"arm": "TCP", "bytes": 1, "post_us": 1.0, "xfer_us": 2.0, "warmup": True}]))
    bench = Bench(run, None, 0.0, logs={"TCP": {"decode-0": log}})
    with pytest.raises(RunFailed, match="answer check"), bench.evidence([ARM], "host"):
        raise RunFailed("answer check failed")
    assert run.table("verdicts")["transport"].isna().all()


def test_a_phase_is_on_the_clock_of_its_requests_and_pulls(tmp_path):
    began = time.time() - 100

    class Generator:
        def phase(self, load, target, arm):
            self.start_s = time.time() - began  # as the benchmark and the ring's follower reckon
            time.sleep(0.01)
            rows = pd.DataFrame([{"arm": arm, "start_s": self.start_s, "ttft_ms": 1.0, "error": None}])
            return rows, {"duration": 0.01, "request_throughput": 100.0, "output_throughput": 100.0}

    generator = Generator()
    bench = Bench(runs.create("relative-to-nvlink", {}, run_dir=tmp_path / "run"), generator, began)
    decode = SimpleNamespace(name="decode-0", metrics_text=lambda: "")
    Engines(bench, ARM, Cluster([decode]), [], 0).phase(Load(1, 8, 1, concurrency=1, phase="one"))
    (phase,) = bench.phases
    assert 99 < phase["start_s"] <= generator.start_s <= phase["start_s"] + phase["span_s"]
    pulls = pd.DataFrame([{"arm": "TCP", "start": 0, "start_s": generator.start_s, "start_uncertainty_s": 0.0}])
    assert pulls_to_phases(pulls, pd.DataFrame(bench.phases))["phase"].tolist() == ["one"]


def test_starts_go_to_and_fro():
    arms = [EngineArm(label=x) for x in "ab"]
    assert [(s, a.label) for s, a in in_turn(arms, 3)] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
