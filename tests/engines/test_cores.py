"""An engine's threads go to its cores, and only an engine's that has some."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvlab.engines import cores
from kvlab.engines.launch import Cluster, Running
from kvlab.engines.vllm import Command


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", {0}), ("0-2,5", {0, 1, 2, 5}), ("0-1|4-5", {0, 1, 4, 5}), ("nobind", set()), ("auto", set()), ("", set())],
)
def test_lists_of_cores(text: str, found: set[int]) -> None:
    assert cores.parse(text) == found


def test_threads_are_moved(tmp_path: Path) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    own = allowed[-1]
    words = {"bound": {"VLLM_CPU_OMP_THREADS_BIND": str(own)}, "free": {}}
    # The engine is a child of the process that was started, as under the guard.
    started = [subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True) for _ in words]
    try:
        for one in started:
            while not Path(f"/proc/{one.pid}/task/{one.pid}/children").read_text().split():
                pass
        engines = [Running(n, "replica", "", process=p) for n, p in zip(words, started, strict=True)]
        commands = [Command(n, "replica", (), env, "", tmp_path / "log") for n, env in words.items()]
        cores.keep(Cluster(engines, commands=commands))
        bound, free = (os.sched_getaffinity(one.pids()[0]) for one in engines)
        assert bound == {own} and free == set(allowed)
    finally:
        for one in started:
            os.killpg(one.pid, 9)
            one.wait()
