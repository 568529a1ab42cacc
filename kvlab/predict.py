"""What UCX should take for a READ on this machine under an environment: the transports that are left, and their order.

Pure functions of a machine's facts (:func:`kvlab.capture.machine.facts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.capture.carrier import ALIASES

Facts = Mapping[str, Any]
#: transports of a network, best first for a READ; those that can READ at all
_RDMA = ("rc_gda", "rc_mlx5", "dc_mlx5", "rc_verbs", "srd", "ud_mlx5", "ud_verbs")
_RDMA_READS = _RDMA[:-2]
#: transports that carry active messages and report a dead peer, which NIXL asks for
MESSAGES = (*_RDMA, "tcp")
#: what UCX_TLS may name besides transports (ucp_tl_aliases in src/ucp/core/ucp_context.c)
TLS_ALIASES: dict[str, tuple[str, ...]] = {
    **{n: ALIASES[n] for n in ("sm", "shm", "mm", "ib", "rc", "rc_x", "rc_v", "ud", "ud_x", "ud_v", "dc", "dc_x")},
    "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
    "rocm": ("rocm_copy", "rocm_ipc"),
    "ze": ("ze_copy", "ze_ipc"),
}
#: transport -> the module of the build that has it (tcp, self, sysv and posix are in the core)
MODULE = {
    "cma": "cma", "knem": "knem", "xpmem": "xpmem", "cuda_copy": "cuda", "cuda_ipc": "cuda",
    "gdr_copy": "cuda_gdrcopy", "rocm_copy": "rocm", "rocm_ipc": "rocm", "ze_copy": "ze", "ze_ipc": "ze",
    "rc_verbs": "ib", "ud_verbs": "ib", "rc_mlx5": "ib_mlx5", "dc_mlx5": "ib_mlx5", "ud_mlx5": "ib_mlx5",
    "rc_gda": "ib_mlx5_gda", "srd": "ib_efa",
}  # fmt: skip


def on(value: str | None) -> bool:
    """Whether UCX reads the value of a switch as yes."""
    return (value or "").strip().lower() in ("y", "yes", "on", "1", "true")


def off(value: str | None) -> bool:
    """Whether UCX reads the value of a switch as no."""
    return (value or "").strip().lower() in ("n", "no", "off", "0", "false")


@dataclass(frozen=True)
class Prediction:
    """What UCX should take: any of ``transports`` (none: the pull cannot work), and why."""

    transports: tuple[str, ...]
    emulated: bool | None
    why: str

    def __str__(self) -> str:
        name = " or ".join(self.transports) or "nothing"
        return f"{name}{' by software emulation' if self.emulated else ''}"


def named(tls: str) -> list[str]:
    """Return the transports and aliases in a UCX_TLS value, without negation, strictness and ``:aux`` marks."""
    return [n for w in tls.lstrip("^").split(",") if (n := w.strip().lstrip("\\").split(":")[0])]


def members(name: str) -> tuple[str, ...]:
    """Return the transports that a name in UCX_TLS stands for."""
    return TLS_ALIASES.get(name) or (name,)


def allowed(tls: str, here: Iterable[str]) -> set[str]:
    """Return those of the transports ``here`` that a UCX_TLS value lets through."""
    names = named(tls)
    chosen = {t for n in names for t in members(n)}
    if tls.startswith("^"):
        return set(here) - chosen
    return set(here) if not names or "all" in names else set(here) & chosen


def usable(facts: Facts, env: Mapping[str, str]) -> set[str]:
    """Return the transports that UCX has here and that UCX_TLS and UCX_NET_DEVICES let through."""
    devices = env.get("UCX_NET_DEVICES", "all")
    wanted = {d.strip() for d in devices.lstrip("^").split(",")}
    here = set()
    for transport, device in (t.split("/", 1) for t in facts["ucx"]["transports"]):
        listed = device in wanted or device.split(":")[0] in wanted
        if transport not in MESSAGES or "all" in wanted or listed != devices.startswith("^"):
            here.add(transport)
    return allowed(env.get("UCX_TLS", "all"), here)


def gpu_reads(facts: Facts, env: Mapping[str, str]) -> tuple[bool, str]:
    """Tell whether cuda_ipc may READ, and why: UCX asks whether all NVLinks of the first GPU are up."""
    value = env.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    first = (facts["gpus"] or [{}])[0]
    if on(value):
        return True, "UCX_CUDA_IPC_ENABLE_GET_ZCOPY is on"
    if first.get("nvlinks") and first["nvlinks"] == first["nvlinks_up"]:
        return True, f"NVLink, {first['nvlinks_up']} links up"
    if value is None and (facts["nixl"] or {}).get("gpu_reads_on"):
        return True, "this NIXL turns GPU reads on itself"
    return False, "UCX turns cuda_ipc reads off where not all NVLinks of the first GPU are up"


def vmm(env: Mapping[str, str]) -> bool:
    """Tell whether PyTorch allocates GPU memory that cannot be exported by cuda_ipc."""
    settings = env.get("PYTORCH_ALLOC_CONF", "") + env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return re.search(r"expandable_segments\s*:\s*true", settings, re.IGNORECASE) is not None


def predict(facts: Facts, env: Mapping[str, str], memory: str) -> Prediction:
    """Say what UCX should take for a READ between two processes of this machine (descriptors above 64 bytes).

    The order is what UCX's own estimates come to; where two are close, both are named.  Seen for DRAM with
    UCX 1.22 here; for VRAM in the logs of cases and of one H200 (data/).
    """
    able = usable(facts, env)
    messages = [t for t in MESSAGES if t in able]
    if not messages:
        return Prediction((), None, "no transport is left that carries active messages and reports a dead peer")
    rdma = tuple(t for t in _RDMA_READS if t in able)[:1]
    last = Prediction(tuple(messages[:1]), True, "no transport is left that reads remote memory, UCX emulates it")
    if off(env.get("UCX_PROTO_EMULATION_ENABLE")):
        last = Prediction((), None, "no transport is left that reads remote memory, and emulation is switched off")
    if memory == "DRAM":
        copies = tuple(t for t in ("xpmem", "cma", "knem") if t in able)[:1]
        if copies and facts["ucx"]["cma"] is False:
            copies = tuple(t for t in copies if t != "cma")
        return Prediction(copies + rdma, False, "reads the peer's memory") if copies + rdma else last
    if "cuda_copy" not in able:
        return Prediction((), None, "cuda_copy is not there, without which UCX cannot tell GPU memory")
    reads, why = gpu_reads(facts, env)
    direct = facts["peermem"] or facts["open_driver"]
    if "cuda_ipc" in able and reads and not vmm(env):
        return Prediction(("cuda_ipc", *(rdma if "NVLink" not in why else ())), False, why)
    if rdma and direct:
        return Prediction(rdma, False, "GPUDirect RDMA")
    return last
