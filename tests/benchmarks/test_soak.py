"""The same again and again in one process: nothing may be left, nothing may grow.

By hand: ``pytest -m slow tests/benchmarks/test_soak.py``; KVLAB_SOAK_RUNS and KVLAB_SOAK_PAIRS set how often
(200 and 20).
"""

import os
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from kvlab import cli

RUNS, PAIRS = int(os.environ.get("KVLAB_SOAK_RUNS", "200")), int(os.environ.get("KVLAB_SOAK_PAIRS", "20"))
#: first turns fill caches and import modules; growth counts from here
SETTLED = 0.2

pytestmark = [pytest.mark.slow, pytest.mark.live, pytest.mark.timeout(7200)]


def left() -> dict[str, object]:
    """What a run may leave behind on the machine and in this process."""
    me = psutil.Process()
    links = Path("/sys/class/net")
    spaces = Path("/run/netns")
    return {
        "children": sorted(p.name() for p in me.children(recursive=True)),
        "file descriptors": me.num_fds(),
        "threads": me.num_threads(),
        "shared memory": sorted(os.listdir("/dev/shm")),
        "links": sorted(os.listdir(links)),
        "namespaces": sorted(os.listdir(spaces)) if spaces.is_dir() else [],
        "listening": sorted(c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN),
    }


def growth(often: int, turn) -> None:
    """Do ``turn`` so often; compare what is left, and memory, after a fifth and at the end."""
    settled, memory = None, 0
    for number in range(often):
        turn(number)
        if number == max(1, round(often * SETTLED)):
            settled, memory = left(), psutil.Process().memory_info().rss
    assert left() == settled
    grown = psutil.Process().memory_info().rss - memory
    # 50 MiB is what allocators may keep; a leak of one pull's 16 MiB a turn would be far above.
    assert grown < 50 * 2**20, f"{grown / 2**20:.0f} MiB more after {often} turns"


def test_pulls(tmp_path, capsys):
    pytest.importorskip("nixl")
    few = {"prompt_tokens": "[256]", "repetitions": 1, "warmup": 1, "limits": "false"}
    words = [w for key, value in few.items() for w in ("-p", f"{key}={value}")]

    def turn(number):
        out = tmp_path / str(number)
        code = cli.main(["run", "post-vs-completion", *words, "--measure-only", "--out", str(out)])
        assert code == 0, capsys.readouterr().err
        shutil.rmtree(out)

    growth(RUNS, turn)


def test_engine_pairs(tmp_path):
    pytest.importorskip("vllm")
    from kvlab.engines import launch
    from kvlab.engines.model import StandIn
    from kvlab.engines.router import Router
    from kvlab.engines.vllm import Engine

    model = str(StandIn(layers=2).path(tmp_path / "model"))

    def turn(number):
        specs = [Engine(role=role, model=model, max_model_len=1024) for role in ("prefill", "decode")]
        with launch.up(specs, folder=tmp_path / str(number), router=Router()) as cluster:
            ports = [int(one.url.rsplit(":", 1)[1]) for one in cluster.all]
            assert cluster.complete({"prompt": "Hello", "max_tokens": 2})["choices"][0]["text"]
            pids = [pid for one in cluster.all for pid in one.pids()]
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        assert not alive
        for port in ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        shutil.rmtree(tmp_path / str(number))

    growth(PAIRS, turn)
