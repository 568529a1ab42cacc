"""What experiments with engines share: evidence however a run ends, and the order of starts."""

import pandas as pd
import pytest

from kvlab import runs
from kvlab.errors import RunFailed
from kvlab.measures.engines import Bench, in_turn
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


def test_starts_go_to_and_fro():
    arms = [EngineArm(label=x) for x in "ab"]
    assert [(s, a.label) for s, a in in_turn(arms, 3)] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
