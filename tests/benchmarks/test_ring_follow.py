"""The ring's consumer against its budget: 10,000 transfers a second, none lost, under 5 percent of a core."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvlab.capture import nixl

PAIR = Path(__file__).parents[1] / "capture" / "nixl_pair.py"


@pytest.mark.slow
@pytest.mark.live
def test_ten_thousand_transfers_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nixl")
    cpu_s: list[float] = []
    run = nixl.Follower._run

    def timed(self: nixl.Follower) -> None:
        began = time.thread_time()
        run(self)
        cpu_s.append(time.thread_time() - began)

    monkeypatch.setattr(nixl.Follower, "_run", timed)
    env = {
        **os.environ,
        **nixl.environment(tmp_path),
        "UCX_TLS": "tcp,sm,self,cma",
        "NIXL_LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, str(PAIR), "12500", "8", "1", "4096", "10000"]
    with nixl.Follower(tmp_path) as follower:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    seconds = json.loads(done.stdout.splitlines()[-1])["seconds"]
    rows = follower.take()
    share = cpu_s[0] / seconds
    print(f"{len(rows)} transfers in {seconds:.2f} s, {share:.2%} of one core")
    assert len(rows) == 100_000 and follower.losses() == []
    assert 9_000 < len(rows) / seconds < 11_000, "the load itself must hold its rate"
    assert share < 0.05
