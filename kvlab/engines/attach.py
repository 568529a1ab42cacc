"""Engines that run already, somewhere: known by address and log file, never started and never stopped.

For a cluster where somebody else runs the engines (Kubernetes: forward the ports, copy the logs)::

    with attach.to([Endpoint(role="prefill", url="http://10.0.0.1:8000", log="prefill.log"), ...]) as cluster:
        ...

It yields the same :class:`kvlab.engines.launch.Cluster` as :func:`kvlab.engines.launch.up`.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from kvlab.engines.launch import Cluster, Running
from kvlab.engines.vllm import Role
from kvlab.errors import BadInput
from kvlab.params import Strict, Text

_Url = Annotated[Text, Field(pattern=r"^https?://[^/]+/?$")]


class Endpoint(Strict):
    """One engine: its address, and what can be read of it here."""

    role: Role
    url: _Url
    #: its log file on this machine, for UCX's tables; empty: the transport cannot be told
    log: Text = ""
    #: its NIXL_TELEMETRY_DIR on this machine; empty: no per-pull rows
    telemetry_dir: Text = ""


def _model(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/v1/models", timeout=10) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadInput(f"{url}: no vLLM engine answers there: {error}") from None


@contextlib.contextmanager
def to(endpoints: Sequence[Endpoint], router_url: str = "") -> Iterator[Cluster]:
    """Yield the cluster of engines that run already; BadInput when one does not answer or a file is not there."""
    count: dict[str, int] = {}
    engines = []
    for end in endpoints:
        number = count[end.role] = count.get(end.role, -1) + 1
        paths = [Path(p) if p else None for p in (end.log, end.telemetry_dir)]
        for path in paths:
            if path and not path.exists():
                raise BadInput(f"{end.role} engine at {end.url}: {path} is not there")
        url = end.url.rstrip("/")
        engines.append(Running(f"{end.role}-{number}", end.role, url, paths[0], paths[1], _model(url)))
    if not engines:
        raise BadInput("no engines to attach to")
    router = Running("router", "router", router_url.rstrip("/"), model=engines[0].model) if router_url else None
    yield Cluster(engines, router)
