"""A Ray cluster of two nodes on one machine, each raylet in a network namespace of its own, joined by a veth pair.

Where the kernel has time namespaces the second node's monotonic clock is hours ahead, as another machine's is.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab.engines import guard
from kvlab.placement import local
from kvlab.placement.link import Link

PORT = 6379
#: a lost node is noticed after a few seconds instead of half a minute, a busy one is given 15 s to answer
_QUICK = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    # A busy machine takes longer than the 30 s that Ray waits for a node.
    "RAY_raylet_start_wait_time_s": "60",
    # Each is a Python of its own, on two cores.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
#: words before a command whose monotonic clock is to be ahead
_AHEAD = ["unshare", "--time", "--monotonic", "5000", "--boottime", "5000"]


def own_clock() -> list[str]:
    """Return words that give the second node a clock of its own; none where the kernel does not."""
    code = "import time; print(time.monotonic())"
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run([*_AHEAD, sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
        if float(done.stdout) - time.monotonic() > 4000:
            return _AHEAD
    return []


def _hurry(pid: int, nice: int) -> None:
    """Give a session a share of the CPU as this niceness would; Ray gives a node up whose agents take 15 s to start."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))


class Cluster:
    """``link`` joins the two; ``address`` is what ``--address`` takes in the first node's namespace."""

    def __init__(self, link: Link, folder: Path) -> None:
        self.link, self.folder = link, folder
        self.address = f"{link.places[0].address}:{PORT}"
        #: packages in here are installed on the second node alone
        self.packages = folder / "packages"
        self.packages.mkdir()
        self._lifelines, self.nodes, self.ahead, self._commands = {}, {}, own_clock(), []

    def start(self, side: int, *words: str, attempts: int = 3, **env: str) -> None:
        """Start a node and wait for it; once more where Ray has given it up, as it does on a busy machine."""
        place = self.link.places[side]
        reading, self._lifelines[side] = os.pipe()
        # The guard takes the whole node with it, as the loss of a machine does.
        argv = [*(self.ahead if side else []), sys.executable, "-S", "-E", str(Path(guard.__file__)), str(reading), "5"]
        argv += [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        argv += [f"--node-ip-address={place.address}", "--num-cpus=4", "--object-store-memory=80000000", *words]
        given, env = env, {**os.environ, **_QUICK, **env}
        log = self.folder / f"node-{side}-{len(list(self.folder.glob('node-*')))}.log"
        self.nodes[side] = local.start(argv, env=env, log=log, place=place, pass_fds=(reading,))
        os.close(reading)
        _hurry(self.nodes[side].pid, -12)
        deadline = time.monotonic() + 120
        while "Ray runtime started" not in log.read_text():
            assert time.monotonic() < deadline, log.read_text()
            if self.nodes[side].poll() is not None:
                assert attempts > 1, log.read_text()
                self.lose(side)
                return self.start(side, *words, attempts=attempts - 1, **given)
            time.sleep(0.1)
        _hurry(self.nodes[side].pid, 0)

    def join(self) -> None:
        """Start the second node, unless it is there."""
        if 1 not in self._lifelines:
            self.start(1, f"--address={self.address}", PYTHONPATH=str(self.packages))

    def processes(self) -> dict[int, str]:
        """Return process id -> command line of kvlab's actors on both nodes and of what they started."""
        spaces = {os.stat(f"/proc/{holder.pid}/ns/net").st_ino for holder in self.link._holders}
        found = {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                ours = (
                    re.search(r"pull_agent|vllm|VLLM|kvlab.engines|ray::Keeper", words) and "ray.scripts" not in words
                )
                if ours and os.stat(f"/proc/{name}/ns/net").st_ino in spaces:
                    found[int(name)] = words
        return found

    def kvlab(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a kvlab command on the first node."""
        argv = [*self.link.places[0].prefix, sys.executable, "-m", "kvlab.cli", *words]
        pipe = subprocess.PIPE
        root = Path(__file__).parents[2]
        self._commands += [
            subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, cwd=root, **options)
        ]
        return self._commands[-1]

    def stop(self) -> None:
        """Kill the commands that run yet."""
        for command in self._commands:
            if command.poll() is None:
                command.kill()
                command.communicate()
        self._commands = []

    def lose(self, side: int) -> None:
        """Kill everything of a node at once."""
        os.close(self._lifelines.pop(side))
        self.nodes[side].wait(20)

    def close(self) -> None:
        for side in list(self._lifelines):
            self.lose(side)


@contextlib.contextmanager
def two_nodes(rate_gbps: float | None = None) -> Iterator[Cluster]:
    """Yield a cluster whose two nodes have answered; every process of it is gone afterwards."""
    # Ray makes sockets below its folder, and their paths may not be long.
    folder = Path(tempfile.mkdtemp(prefix="kvray-", dir="/tmp"))
    with Link(rate_gbps, fallback=False) as link:
        cluster = Cluster(link, folder)
        try:
            head = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
            cluster.start(0, *head, f"--temp-dir={folder}")
            # One after the other: both choose names of sockets in the same folder.
            cluster.join()
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)
