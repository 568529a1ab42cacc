"""What will carry a KV pull on this machine, and what is in the way: rules over the facts of a machine.

:mod:`kvlab.predict` says what UCX should choose for a READ under an arm's environment; :func:`probe` pulls a few
blocks and reads what UCX did choose; :func:`judge` applies the rules.  Rules are pure functions of recorded facts
(:func:`kvlab.capture.machine.facts`), so a machine that is not at hand can be judged too.
"""

from __future__ import annotations

import csv
import difflib
import importlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvlab.capture import ucx
from kvlab.capture.carrier import COPIES
from kvlab.capture.machine import LINKS
from kvlab.errors import KvlabError
from kvlab.params import Arm, Experiment, PullParams
from kvlab.predict import (
    MESSAGES,
    MODULE,
    TLS_ALIASES,
    Facts,
    Prediction,
    allowed,
    gpu_reads,
    members,
    named,
    off,
    predict,
    vmm,
)

#: a rule's test: what is wrong (nothing: the rule does not hold), of a machine's facts or of a :class:`View`
Test = Callable[[Any], str | list[str] | None]
#: names that NIXL reads (docs.nvidia.com/nixl/resources/environment-variables); compilers hide some in its libraries
_NIXL_NAMES = [f"NIXL_{n}" for n in (
    "LOG_LEVEL", "PLUGIN_DIR", "CONFIG_FILE", "DISABLE_CUDA_ADDR_WA", "ETCD_ENDPOINTS", "ETCD_NAMESPACE",
    "TELEMETRY_DIR", "TELEMETRY_ENABLE", "TELEMETRY_BUFFER_SIZE", "TELEMETRY_RUN_INTERVAL", "TELEMETRY_EXPORTER",
    "TELEMETRY_PROMETHEUS_PORT", "TELEMETRY_PROMETHEUS_LOCAL", "UCX_DEEPBIND", "DEBUG_LOGGING")]  # fmt: skip
_VLLM_NAMES = ["VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT"]
_MIB, _4M = 1 << 20, 4 << 20


# ------------------------------------------------------------------------------------------------ probe


def probe(arm: Arm, size: int, view: View, params: Experiment) -> dict[str, Any]:
    """Pull a few blocks of ``size`` bytes over the arm and return what UCX's table says, or the error."""
    from kvlab.pull import Case, Options, Pair

    case = Case("probe", ((max(4, min(64, 64 * _MIB // size)), size),))
    kind = "cuda" if view.memory == "VRAM" else "host"
    found: dict[str, Any] = {"transport": None, "emulated": None, "verdict": "", "gb_per_s": None, "error": None}
    options = Options.of(params, arm) if isinstance(params, PullParams) else Options(view.memory, *view.gpus)
    options.pull_time_limit_s = 20
    with tempfile.TemporaryDirectory(prefix="kvlab-check-") as folder:
        try:
            with Pair(arm, options, [case], Path(folder)) as pair:
                pair.pull(case, verify=True)
                row = pair.pull(case)[0]
        except KvlabError as error:
            return found | {"error": re.sub(r" \(log: [^)]*\)", "", str(error)).removeprefix(f"arm {arm.label!r}: ")}
        pull = ucx.read([pair.logs["initiator"]], descriptor_bytes=size, local=kind, remote=kind).pull
    rate = round(row["bytes"] / row["xfer_us"] / 1e3, 2)
    return found | {"transport": pull.transport, "emulated": pull.emulated, "verdict": pull.verdict, "gb_per_s": rate}


# ------------------------------------------------------------------------------------------------ rules


@dataclass(frozen=True)
class View:
    """One arm as the rules see it: the reading side's whole environment, the prediction, the probe."""

    facts: Facts
    label: str
    arm: Arm
    memory: str = "DRAM"
    size: int = 131072
    gpus: tuple[int, int] = (0, 0)
    probe: Mapping[str, Any] | None = None

    @property
    def env(self) -> dict[str, str]:
        """The environment of the initiator, which reads and so decides."""
        return {**self.facts["environment"], **self.arm.env, **self.arm.initiator_env}

    @property
    def prediction(self) -> Prediction | None:
        """What should carry the pull; None where there is no UCX to ask."""
        return predict(self.facts, self.env, self.memory) if self.facts["ucx"] else None

    @property
    def ucx(self) -> Mapping[str, Any]:
        """What the UCX here says of itself; empty lists where there is none."""
        return self.facts["ucx"] or {"transports": [], "modules": [], "variables": {}}

    @property
    def here(self) -> set[str]:
        """Transports that this UCX has on this machine, whatever the arm allows."""
        return {t.split("/")[0] for t in self.ucx["transports"]}

    @property
    def has_gpus(self) -> bool:
        """Whether the GPUs that the arm names are visible (any number for KV in DRAM)."""
        visible = self.env.get("CUDA_VISIBLE_DEVICES")
        count = len(self.facts["gpus"])
        return self.memory != "VRAM" or max(self.gpus) < min(count, len(visible.split(",")) if visible else count)

    @property
    def names(self) -> list[str]:
        """What UCX_TLS asks for; nothing where it only excludes."""
        tls = self.env.get("UCX_TLS", "")
        return [] if tls.startswith("^") else named(tls)

    def allows(self, transport: str) -> bool:
        """Whether the arm's UCX_TLS lets ``transport`` through."""
        return transport in allowed(self.env.get("UCX_TLS", "all"), {transport})

    def claims(self, name: str) -> bool:
        """Whether the arm's label claims ``name``."""
        return bool(self.arm.expect) and ucx.agrees(name, self.arm.expect)


@dataclass(frozen=True)
class Rule:
    """A known trap: ``of`` machine or arm; ``weight`` blocks (the arm cannot do what it claims), trap or note."""

    id: str
    of: str
    weight: str
    what: str
    remedy: str
    source: str
    test: Test


@dataclass(frozen=True)
class Finding:
    """A rule that holds here."""

    rule: str
    weight: str
    arm: str | None
    text: str
    remedy: str
    source: str


def misspelt(facts: Facts, names: Iterable[str]) -> list[str]:
    """Compare variables with those that UCX, NIXL and vLLM know; only near misses are named (UCX_HOME is nobody's)."""
    ours = {name: list((facts[name] or {}).get("variables", [])) for name in ("ucx", "nixl")}
    lists = {"UCX_": ours["ucx"], "NIXL_": [*_NIXL_NAMES, *ours["nixl"]], "VLLM_NIXL_": _VLLM_NAMES}
    found = []
    for name in names:
        known = next((v for prefix, v in lists.items() if name.startswith(prefix)), [])
        near = [] if name in known else difflib.get_close_matches(name, known, 1, 0.85)
        found += [f"{name}: {near[0]}?"] if near else []
    return found


def _unknown(a: View) -> list[str]:
    known = {*TLS_ALIASES, *MODULE, *COPIES, *a.here, "all", "tcp", "self", "sysv", "posix", "gga"}
    near = {n: difflib.get_close_matches(n, known, 1) for n in named(a.env.get("UCX_TLS", "")) if n not in known}
    return [n + (f": {x[0]}?" if x else "") for n, x in near.items()]


def _not_built(a: View) -> list[str]:
    modules = a.ucx["modules"]
    return [n for n in a.names if modules and not any(MODULE.get(t, modules[0]) in modules for t in members(n))]


def _not_here(a: View) -> list[str]:
    gone = {"all", *_not_built(a), *(n.split(":")[0] for n in _unknown(a))}
    return [n for n in a.names if a.facts["ucx"] and n not in gone and not set(members(n)) & a.here]


def _device(a: View) -> str | None:
    asked = a.env.get("UCX_NET_DEVICES", "all")
    here = {t.split("/", 1)[1] for t in a.ucx["transports"]} - {"memory", "cuda"}
    wanted = {d.strip() for d in asked.split(",")}
    if not a.facts["ucx"] or asked.startswith("^") or "all" in wanted or wanted & {*here, *(d[:-2] for d in here)}:
        return None
    return f"{asked}; here: {', '.join(sorted(here)) or 'none'}"


def _one_side(a: View) -> list[str]:
    names = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
    values = {n: [s.get(n, a.arm.env.get(n)) for s in (a.arm.initiator_env, a.arm.target_env)] for n in names}
    return [f"{n}: reader {i or 'default'}, target {t or 'default'}" for n, (i, t) in values.items() if i != t]


def _not_nvlink(a: View) -> str | None:
    first, second = (f"GPU{g}" for g in a.gpus)
    link = a.facts["topology"].get(first, {}).get(second, "")
    claimed = "nvlink" in f"{a.arm.expect} {a.label}".lower()
    return f"{first} to {second}: {LINKS.get(link, link)}" if claimed and link and not link.startswith("NV") else None


def _buffers(a: View) -> list[str]:
    over_tcp = a.prediction is not None and "tcp" in a.prediction.transports
    ends = {n: a.facts["sockets"].get(n) for n in ("ipv4/tcp_rmem", "ipv4/tcp_wmem")}
    return [f"net.{n.replace('/', '.')} ends at {v} bytes" for n, v in ends.items() if over_tcp and (v or _4M) < _4M]


def _label(a: View) -> str | None:
    p = a.prediction
    if a.probe or p is None or not a.has_gpus or (p.transports and not a.arm.expect):
        return None
    met = any(a.claims(t) for t in p.transports)
    return None if met else f"claims {a.arm.expect or 'nothing'}, expected {p}: {p.why}"


def _contradicts(a: View) -> str | None:
    took = (a.probe or {}).get("transport")
    wrong = a.arm.expect and took and not a.claims(took)
    return f"claims {a.arm.expect}, the pull went over {a.probe['verdict']}" if a.probe and wrong else None


def _wrong(a: View) -> str | None:
    p, took = a.prediction, (a.probe or {}).get("transport")
    return f"expected {p}, took {took}" if p and took and took not in p.transports else None


def _ptrace(f: Facts) -> str | None:
    refused = f["ucx"]["cma"] is False if f["ucx"] else bool(f["ptrace_scope"]) and not f["sys_ptrace"]
    return f"process_vm_readv is refused (ptrace_scope {f['ptrace_scope']})" if refused else None


def _isolated(f: Facts) -> str | None:
    own = [n for n, kind in f["namespaces"].items() if kind == "own"]
    return f"{f['container'] or 'a container'}: {', '.join(own)} namespace of its own" if own else None


# fmt: off
#: rule -> its test
_TESTS: dict[str, Test] = {
    "nixl-missing": lambda f: None if f["nixl"] else "no wheel here that fits torch's CUDA",
    "ucx-does-not-start":
     lambda f: f["ucx"] and (f["ucx"]["error"] or (None if f["ucx"]["version"] else "it said nothing")),
    "variable-misspelt": lambda f: misspelt(f, f["environment"]),
    "memory-lock-limit":
     lambda f: f"ulimit -l: {f['memlock_bytes'] // 1024} KiB" if f["rdma"] and f["memlock_bytes"] is not None
     and not f["ipc_lock"] else None,
    "ptrace-forbidden": _ptrace,
    "namespaces-isolated": _isolated,
    "shared-memory-small":
     lambda f: f"{f['shm_free_bytes'] >> 20} MiB free" if (f["shm_free_bytes"] or 1 << 30) < 128 << 20 else None,
    "rdma-port-down":
     lambda f: [f"{p['device']}:{p['port']} is {p['state']}" for p in f["rdma"] if p["state"] != "ACTIVE"],
    "rdma-without-address":
     lambda f: [f"{p['device']}:{p['port']}" for p in f["rdma"] if p["state"] == "ACTIVE" and not p["gid"]],
    "rdma-not-visible": lambda f: f["rdma_hidden"],
    "no-gpudirect":
     lambda f: "neither nvidia_peermem nor the open driver" if f["gpus"] and f["rdma"] and not (
         f["peermem"] or f["open_driver"]) else None,
    "gpu-library-missing":
     lambda f: (f["ucx"] or {}).get("unloadable", {}).get("cuda") if f["gpus"] or f["nvidia_devices"] else None,
    "side-channel":
     lambda f: None if f["side_channel"]["state"] == "free" else "{host}:{port}: {state}".format(**f["side_channel"]),
    "arm-variable-misspelt": lambda a: misspelt(a.facts, {**a.arm.env, **a.arm.initiator_env, **a.arm.target_env}),
    "transport-unknown": _unknown,
    "transport-not-in-build": _not_built,
    "transport-not-here": _not_here,
    "no-message-transport": lambda a: None if any(a.allows(t) for t in MESSAGES) else f"UCX_TLS={a.env['UCX_TLS']}",
    "device-not-here": _device,
    "one-side-only": _one_side,
    "no-gpu": lambda a: None if a.has_gpus else f"{len(a.facts['gpus'])} GPUs here, GPU {max(a.gpus)} wanted",
    "gpu-reads-off":
     lambda a: None if a.memory != "VRAM" or not a.facts["gpus"] or not a.allows("cuda_ipc")
     or gpu_reads(a.facts, a.env)[0] else gpu_reads(a.facts, a.env)[1],
    "memory-not-exportable":
     lambda a: "expandable_segments:True" if a.memory == "VRAM" and a.allows("cuda_ipc") and vmm(a.env) else None,
    "no-cuda-copy":
     lambda a: f"UCX_TLS={a.env['UCX_TLS']}" if a.memory == "VRAM" and not a.allows("cuda_copy") else None,
    "not-nvlink": _not_nvlink,
    "tcp-segment-default":
     lambda a: f"UCX_TCP_TX_SEG_SIZE is {own}" if a.prediction and a.prediction.transports == ("tcp",)
     and (own := a.ucx["variables"].get("UCX_TCP_TX_SEG_SIZE")) and "UCX_TCP_TX_SEG_SIZE" not in a.env else None,
    "socket-buffers-small": _buffers,
    "old-protocols": lambda a: "UCX_PROTO_ENABLE=n" if off(a.env.get("UCX_PROTO_ENABLE")) else None,
    "no-evidence": lambda a: "UCX_PROTO_INFO=n" if off(a.arm.env.get("UCX_PROTO_INFO")) else None,
    "not-measurable": lambda a: None if a.facts["nixl"] else "the arm cannot run",
    "label-not-met": _label,
    "probe-failed": lambda a: (a.probe or {}).get("error"),
    "probe-contradicts": _contradicts,
    "prediction-wrong": _wrong,
}
# fmt: on
#: rules.csv: id, of, weight, what, remedy, source; owner/name#N is an issue or pull request on GitHub
with Path(__file__).with_name("rules.csv").open(encoding="utf-8", newline="") as _file:
    RULES = {row["id"]: Rule(test=_TESTS[row["id"]], **row) for row in csv.DictReader(_file)}


def judge(facts: Facts, views: Iterable[View] = ()) -> list[Finding]:
    """Apply every rule; machine rules once, arm rules to each arm."""
    views, found = list(views), []
    for rule in RULES.values():
        for view in [None] if rule.of == "machine" else views:
            said = rule.test(facts if view is None else view) or []
            for text in [said] if isinstance(said, str) else said:
                arm = view.label if view else None
                found.append(Finding(rule.id, rule.weight, arm, text, rule.remedy, rule.source))
    return found


def rules_markdown() -> str:
    """Return the rules as a table for the README."""
    rows = [f"| `{r.id}` | {r.weight} | {r.what} | {r.remedy} | {r.source} |" for r in RULES.values()]
    return "\n".join(["| rule | weight | what | remedy | source |", "|---|---|---|---|---|", *rows])


# --------------------------------------------------------------------------------------------- the whole


def why_not(facts: Facts) -> dict[str, str]:
    """Return the transports that are not usable here, each with what it lacks."""
    here = {t.split("/")[0] for t in facts["ucx"]["transports"]} if facts["ucx"] else set()
    active = any(p["state"] == "ACTIVE" for p in facts["rdma"])
    no_rdma = "no active RDMA port" if facts["rdma"] else facts["rdma_hidden"] or "no RDMA device"
    said = {}
    for transport in ("cma", "rc_mlx5", "rc_verbs", "srd", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm_ipc"):
        if not facts["ucx"] or transport in here:
            continue
        module = MODULE[transport]
        if module not in facts["ucx"]["modules"]:
            said[transport] = "not in this build"
        elif why := facts["ucx"]["unloadable"].get(module):
            said[transport] = why.split(": cannot open")[0] + (" is missing" if ": cannot open" in why else "")
        elif module.startswith("ib"):
            said[transport] = "no adapter of this kind" if active else no_rdma
        else:
            said[transport] = "no GPU" if module == "cuda" else "not permitted"
    return said


def arms(params: Experiment, facts: Facts, live: bool) -> list[View]:
    """Return a view of every arm, each probed by a tiny pull where ``live``."""
    gpus, size = gpus_of(params), descriptor_bytes(params)
    memory = getattr(params, "memory", "VRAM" if gpus else "DRAM")
    made = []
    for arm in getattr(params, "arms", []):
        arm = arm.model_copy(update={"env": {**getattr(params, "engine_env", {}), **arm.env}})
        view = View(facts, arm.label, arm, memory, size, gpus or (0, 0))
        done = probe(arm, size, view, params) if live and facts["nixl"] and view.has_gpus else None
        made.append(replace(view, probe=done))
    return made


def gpus_of(params: Experiment) -> tuple[int, int] | None:
    """Return the GPU of the reading (decode) and of the other side; None for engines on CPU."""
    if hasattr(params, "initiator_gpu"):
        return params.initiator_gpu, getattr(params, "target_gpu", 0)
    first = [str(getattr(params, f"{side}_gpus", "")).split(",")[0].strip() for side in ("decode", "prefill")]
    numbers = [int(n) for n in first if n.isdecimal()]
    return (numbers[0], numbers[-1]) if numbers else None


def descriptor_bytes(params: Experiment) -> int:
    """Return the size of the experiment's most frequent descriptor, 128 KiB where only its engines decide."""
    from kvlab.experiments import get, name_of

    cases = getattr(importlib.import_module(f"kvlab.measures.{get(name_of(params)).key}"), "cases", None)
    if cases is None:
        return 131072
    more = [params.arms[0]] if len(inspect.signature(cases).parameters) > 1 else []  # type: ignore[attr-defined]
    return int(cases(params, *more)[0].descriptor_bytes)


def document(facts: Facts, views: Iterable[View], findings: Iterable[Finding]) -> dict[str, Any]:
    """Return everything as one JSON document; the library's list of variables is left out."""
    library = {k: v for k, v in (facts["ucx"] or {}).items() if k != "variables"} or None
    return {
        "machine": {**facts, "ucx": library, "why_not": why_not(facts)},
        "arms": [
            {"arm": v.label, "expect": v.arm.expect, "memory": v.memory, "descriptor_bytes": v.size}
            | {"prediction": asdict(v.prediction) if v.prediction else None, "probe": v.probe}
            for v in views
        ],
        "findings": [asdict(f) for f in findings],
    }
