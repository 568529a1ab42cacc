"""A Ray cluster of two nodes on one machine, each raylet in a network namespace of its own, joined by a veth pair."""

from __future__ import annotations

import contextlib
import os
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
#: a lost node is noticed after about 2 s instead of half a minute
_QUICK = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_enable_metrics_collection": "0",
    # A busy machine takes longer than the 30 s that Ray waits for a node.
    "RAY_raylet_start_wait_time_s": "120",
    # Each is a Python of its own, on two cores.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}


class Cluster:
    """``link`` joins the two; ``address`` is what ``--address`` takes in the first node's namespace."""

    def __init__(self, link: Link, folder: Path) -> None:
        self.link, self.folder = link, folder
        self.address = f"{link.places[0].address}:{PORT}"
        #: packages in here are installed on the second node alone
        self.packages = folder / "packages"
        self.packages.mkdir()
        self._lifelines, self.nodes = {}, {}

    def start(self, side: int, *words: str, **env: str) -> None:
        place = self.link.places[side]
        reading, self._lifelines[side] = os.pipe()
        # The guard takes the whole node with it, as the loss of a machine does.
        argv = [sys.executable, "-S", "-E", str(Path(guard.__file__)), str(reading), "5"]
        argv += [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
        argv += [f"--node-ip-address={place.address}", "--num-cpus=2", "--object-store-memory=80000000", *words]
        env = {**os.environ, **_QUICK, **env}
        log = self.folder / f"node-{side}.log"
        self.nodes[side] = local.start(argv, env=env, log=log, place=place, pass_fds=(reading,))
        os.close(reading)

    def wait(self, side: int, words: str, limit_s: float = 90) -> None:
        log, deadline = self.folder / f"node-{side}.log", time.monotonic() + limit_s
        while words not in log.read_text():
            assert self.nodes[side].poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def kvlab(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a kvlab command on the first node."""
        argv = [*self.link.places[0].prefix, sys.executable, "-m", "kvlab.cli", *words]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            cwd=Path(__file__).parents[2],
            **options,
        )

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
            cluster.wait(0, "Ray runtime started")
            cluster.start(1, f"--address={cluster.address}", PYTHONPATH=str(cluster.packages))
            cluster.wait(1, "Ray runtime started")
            yield cluster
        finally:
            cluster.close()
            shutil.rmtree(folder, ignore_errors=True)
