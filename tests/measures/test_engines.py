"""What experiments with engines share: evidence however a run ends, phases in time, and the order of starts."""

import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from ring_writer import Writer

from kvlab import runs, views
from kvlab.capture import nixl
from kvlab.engines.launch import Cluster
from kvlab.engines.load import Generator, Load, rows
from kvlab.errors import RunFailed
from kvlab.measures.engines import Bench, Engines, in_turn
from kvlab.params import EngineArm
from kvlab.placement import ray
from kvlab.placement.local import Place

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


@pytest.mark.parametrize("step_s", [0, 3600, -3600])
def test_pulls_find_phase_and_request_though_the_wall_clock_is_set(tmp_path, monkeypatch, step_s):
    """A ring that is followed, a load process's answer, a phase: joined, with the clock set in mid-phase."""
    real = time.time
    began = time.monotonic()

    class Offering:
        off_by_s = 0.0

        def phase(self, load, target, arm):
            # As the process of the load answers: vLLM's own clock, and what to add to it (kvlab.engines.bench).
            zero_s, sent = time.monotonic() - time.perf_counter(), time.perf_counter()
            monkeypatch.setattr(time, "time", lambda: real() + step_s * (load.phase != "one"))
            time.sleep(0.05)  # the pull begins after its request was sent
            ring.pull(1_000, 10_000, 128 * 1024)
            # and seen before the first token comes
            while sum(r["reads"] for r in follower.report()) < len(bench.phases) + 1:
                time.sleep(0.01)
            answer = {"ttfts": [time.perf_counter() - sent], "itls": [[]], "errors": [""], "prefill_s": [0.0]}
            answer |= {"input_lens": [8], "output_lens": [1], "start_times": [sent], "zero_s": zero_s}
            totals = {"duration": 0.1, "request_throughput": 10.0, "output_throughput": 10.0}
            return rows(load, arm, answer, began), totals

    run = runs.create("relative-to-nvlink", {}, run_dir=tmp_path / "run")
    bench = Bench(run, Offering(), began)
    decode = SimpleNamespace(name="decode-0", metrics_text=lambda: "")
    with run.recording(), nixl.Follower(tmp_path, began_s=began) as follower:
        ring = Writer(tmp_path / "ring")
        time.sleep(0.15)  # until the ring is found
        engines = Engines(bench, ARM, Cluster([decode]), [follower], 0)
        for phase in ("one", "two", "three"):
            engines.phase(Load(1, 8, 1, concurrency=1, phase=phase))
        engines.collect()
    (pulls,) = bench.pulls
    assert pulls[["phase", "request"]].to_numpy().tolist() == [[p, f"{p}-0-0"] for p in ("one", "two", "three")]


class Elsewhere(ray.Node):
    """An actor whose monotonic clock is ahead by some seconds and runs a thousandth too fast."""

    def __init__(self, root, ahead_s):
        super().__init__(0, "x", None, root)
        self.ahead_s, self.began, self.slow, self.followers = ahead_s, time.monotonic(), 2, {}

    def there(self, here):
        return here + self.ahead_s + 1e-3 * (here - self.began)

    def call(self, method, *args, limit_s=0):
        if method == "do":  # only its clock is asked for; every third answer is on the way for long
            self.slow += 1
            told = self.there(time.monotonic())
            time.sleep(0 if self.slow % 3 else 0.08)
            return told
        if method == "follow":
            follower = self.followers[args[0]] = nixl.Follower(self.root / args[0], began_s=0)
            return follower.__enter__()
        assert method == "followed"
        follower = self.followers[args[0]]
        if args[1]:
            follower.stop()
        frame = follower.take()
        return frame.assign(start_s=frame["start_s"].map(self.there)), follower.losses()


def test_nodes_whose_clocks_differ_are_joined_on_the_controllers(tmp_path):
    """The decode engine's node is hours ahead of the controller, the load generator's behind it, and both drift."""
    began, events = time.monotonic(), []
    decode_node, load_node = Elsewhere(tmp_path, 10_000), Elsewhere(tmp_path, -3_000)

    class Process:  # the load generator's, on its node
        def send(self, message):
            sent = time.monotonic()
            time.sleep(0.05)
            events.append((sent, time.monotonic()))
            ring.pull(1_000, 10_000, 128 * 1024)
            time.sleep(0.15)
            self.answer = {"ttfts": [time.monotonic() - sent], "itls": [[]], "errors": [""], "prefill_s": [0.02]}
            self.answer |= {
                "input_lens": [8],
                "output_lens": [1],
                "start_times": [load_node.there(sent) - 7],
                "zero_s": 7,
            }
            self.answer |= {"duration": 0.1, "completed": 1, "request_throughput": 10.0, "output_throughput": 10.0}

        def poll(self, limit_s):
            return True

        def recv(self):
            return self.answer

    (tmp_path / "rings").mkdir()
    generator = Generator(tmp_path / "log", "t", began_s=began, place=Place(node=load_node))
    generator._end, generator._ready = Process(), True
    run = runs.create("relative-to-nvlink", {}, run_dir=tmp_path / "run")
    bench = Bench(run, generator, began)
    decode = SimpleNamespace(name="decode-0", metrics_text=lambda: "", url="http://d", model="m")
    with run.recording(), ray.Follower(decode_node, tmp_path / "rings", began) as follower:
        ring = Writer(tmp_path / "rings" / "ring")
        time.sleep(0.15)  # until the ring is found
        engines = Engines(bench, ARM, Cluster([decode]), [follower], 0)
        for phase in ("one", "two", "three"):
            engines.phase(Load(1, 8, 1, concurrency=1, phase=phase))
        engines.collect()
    (pulls,) = bench.pulls
    assert pulls[["phase", "request"]].to_numpy().tolist() == [[p, f"{p}-0-0"] for p in ("one", "two", "three")]
    sent, pulled = (np.array(column) - began for column in zip(*events, strict=True))
    # As far off as the pulls themselves say; the ring's events are of 10 ms before they were written.
    off = (pulls["start_s"] + 0.01 - pulled).abs()
    assert (off <= pulls["start_uncertainty_s"] + 0.03).all() and (pulls["start_uncertainty_s"] < 1).all()
    requests = pd.concat(bench.requests)
    assert (requests["start_s"] - sent).abs().max() <= generator.off_by_s + 0.005 < 1


def test_a_clock_that_was_set_is_told(tmp_path, monkeypatch):
    real = time.time
    run = runs.create("relative-to-nvlink", {}, run_dir=tmp_path / "run")
    with run.recording():
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
    assert run.manifest["clock_step_s"] == pytest.approx(-3600, abs=0.1)
    assert "clock    set by -3600 s in mid-run" in views.about(run)


def test_starts_go_to_and_fro():
    arms = [EngineArm(label=x) for x in "ab"]
    assert [(s, a.label) for s, a in in_turn(arms, 3)] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]
