"""Each CPU engine on its own cores and nothing of it elsewhere.

vLLM's NIXL connector (0.30, ``nixl/base_worker.py``) moves a CPU worker's main thread to the last core of each NUMA
node.  With one thread an engine that thread computes the model, so on two cores the prefill and the decode engine
both compute on the last one, whatever VLLM_CPU_OMP_THREADS_BIND says, and take turns with each other's busy waiting.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab.engines import guard

if TYPE_CHECKING:
    from kvlab.engines.launch import Cluster


def parse(text: str) -> set[int]:
    """Return the cores of a list such as ``0-3,8`` or, for ranks, ``0-3|4-7``; empty for other words."""
    found: set[int] = set()
    for part in re.split(r"[,|]", text):
        ends = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not ends:
            return set()
        found |= set(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return found


def move(pid: int, cores: set[int]) -> None:
    """Move every thread of ``pid`` and of what is below it to ``cores``."""
    for task in [t for one in guard.descendants(pid) for t in Path(f"/proc/{one}/task").glob("*")]:
        # A thread that has ended meanwhile needs no core.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)


def keep(cluster: Cluster) -> None:
    """Move every thread of every CPU engine that was started by kvlab to the engine's own cores."""
    for command in cluster.commands:
        cores = parse(command.env.get("VLLM_CPU_OMP_THREADS_BIND", ""))
        for one in cluster.engines:
            if one.name == command.name and cores and one.process and one.process.poll() is None:
                there = command.place.node.do if command.place.node else lambda f, *args: f(*args)
                there(move, one.process.pid, cores)
