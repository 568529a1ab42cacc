"""vllm-router in front of the engines: 1P1D, xPyD, or round robin over replicas.

Its limits, seen with 0.1.17: the first request of each prefill/decode pair carries NIXL's handshake (seconds on two
cores), so kvlab sends one before it says ready; it looks for workers every 30 s unless told; its policies choose the
prefill and the decode engine apart from each other, so with xPyD the pair of a request is not in its answer; it
tries failed requests again unless ``--disable-retries`` is there, which would hide a failed pull.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from kvlab.engines.vllm import Command
from kvlab.errors import BadInput
from kvlab.params import Env, Strict, Text, Whole, _structured
from kvlab.placement.local import LOCAL, Place


class Router(Strict):
    """vllm-router; prefill and decode engines among the specs make it disaggregate, replicas round robin."""

    policy: Text = "round_robin"
    #: the address of the place it runs at by default
    host: Text = ""
    port: Whole = 0
    env: Env = Field(default_factory=dict)
    extra: Annotated[list[Text], BeforeValidator(_structured)] = Field(default_factory=list)


def is_pair(engines: Sequence[Command], what: str) -> bool:
    """Tell prefill and decode engines from replicas; BadInput for roles that do not go together behind ``what``."""
    roles = {e.role for e in engines}
    if roles not in ({"prefill", "decode"}, {"replica"}):
        raise BadInput(f"{what} needs prefill and decode engines, or replicas alone; it cannot mix them")
    return "replica" not in roles


def command(
    router: Router, engines: Sequence[Command], ports: Iterator[int], logs: Path, place: Place = LOCAL
) -> Command:
    """Return the router's command for the engines' commands; BadInput for roles that do not go together."""
    ports, host = place.node.ports() if place.node else ports, router.host or place.address
    urls = {role: [e.url for e in engines if e.role == role] for role in ("prefill", "decode", "replica")}
    words = [sys.executable, "-m", "vllm_router.launch_router", "--host", host]
    port = router.port or next(ports)
    words += ["--port", str(port), "--policy", router.policy, "--prometheus-port", str(next(ports))]
    words += ["--worker-startup-check-interval", "1", "--disable-retries", "--log-level", "warning"]
    if is_pair(engines, "a router"):
        words += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
        words += [word for role in ("prefill", "decode") for url in urls[role] for word in (f"--{role}", url)]
    else:
        words += ["--worker-urls", *urls["replica"]]
    return Command(
        name="router",
        role="router",
        argv=(*words, *router.extra),
        env={"NO_COLOR": "1", "PYTHONUNBUFFERED": "1", **router.env},
        url=f"http://{host if host != '0.0.0.0' else place.address}:{port}",
        log=logs / "router.log",
        model=engines[0].model,
        place=place,
    )
