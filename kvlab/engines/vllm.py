"""A vLLM engine: what it is to be, and the exact command line and environment that make it so.

Everything here is pure: the same engine, port and version give the same words on any machine.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kvlab.capture import nixl
from kvlab.engines import versions
from kvlab.errors import BadInput
from kvlab.params import Count, Env, Positive, Strict, Text, Whole, _structured
from kvlab.placement.local import LOCAL, Place

Role = Literal["prefill", "decode", "replica"]
#: on few cores a spinning OpenMP team starves the other engine: threads sleep at once instead
#: compiling vLLM's small compiled functions (log-probabilities, say) takes minutes on few cores, in mid-request
_CPU_ENV = {"GOMP_SPINCOUNT": "0", "OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "TORCHDYNAMO_DISABLE": "1"}


class Engine(Strict):
    """One engine.  What is empty, 0 or None is chosen by kvlab (name, ports, cores) or left to vLLM."""

    role: Role
    #: a folder (``StandIn().path()``) or a hub name
    model: Text
    #: ROLE-NUMBER by default
    name: Annotated[Text, Field(pattern=r"^[\w.-]*$", max_length=40)] = ""
    #: the name in requests; the last part of ``model`` by default
    served_name: Text = ""
    #: on CPU float16 by default: bfloat16 takes AMX, which kills an engine that never got the permission for it
    dtype: Text = ""
    tp: Count = 1
    #: on CPU 32 by default (a multiple of 32 is wanted there)
    block_size: Count | None = None
    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    limit_mm_per_prompt: Annotated[dict[str, Whole], BeforeValidator(_structured)] = Field(default_factory=dict)
    #: pull experiments want every prompt pulled whole
    prefix_caching: bool = False
    #: compiling costs a minute of start-up and changes no pull
    enforce_eager: bool = True
    #: size of the KV cache; on CPU 1 GiB by default.  Two engines on one GPU need it: both profiling at a time err
    kv_cache_bytes: Count | None = None
    gpu_memory_utilization: Positive | None = None
    kv_connector: Text = "NixlConnector"
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    #: num_threads, backends, kv_lease_duration, enable_cross_layers_blocks, ...
    kv_connector_extra_config: Annotated[dict[str, Any], BeforeValidator(_structured)] = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    #: GPU numbers, ``0,1``; empty means a CPU engine
    gpu_set: Text = ""
    #: cores as ``0-3``, with TP one set for each rank, ``0-3|4-7``
    cpu_set: Text = ""
    host: Text = ""
    port: Whole = 0
    side_channel_port: Whole = 0
    #: further words of the command line, as they are
    extra: Annotated[list[Text], BeforeValidator(_structured)] = Field(default_factory=list)


@dataclass(frozen=True)
class Command:
    """One process to start: ``env`` is what comes on top of the environment it is started from."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: dict[str, str]
    url: str
    log: Path
    model: str = ""
    telemetry_dir: Path | None = None
    place: Place = field(default=LOCAL)
    #: ready when /health says 200, when /v1/models has the model too, or (and) when a completion comes back
    probe: Literal["health", "listed", "completion"] = "completion"
    #: a folder of the processes' own, removed with them
    scratch: Path | None = None

    def shell(self) -> str:
        """Return the command as one pasteable paragraph of shell."""
        env = [f"{k}={shlex.quote(v)}" for k, v in sorted(self.env.items())]
        folders = [shlex.quote(str(f)) for f in (self.telemetry_dir, self.scratch) if f]
        made = f"mkdir -p {' '.join(folders)} && " if folders else ""
        words = [*map(shlex.quote, self.place.prefix), "env", *env]
        head = f"# {self.name}: {self.url}\n{made}"
        return head + " \\\n  ".join([" ".join(words), shlex.join(self.argv)])


def cpu_sets(engines: int, cores: Sequence[int]) -> list[str]:
    """Share ``cores`` out: each engine its own, the same number each; one core in turn where they do not suffice."""
    each = max(1, len(cores) // engines)
    return [",".join(str(cores[(i * each + j) % len(cores)]) for j in range(each)) for i in range(engines)]


def ranks(cpus: str, tp: int) -> str:
    """Share the cores of an engine out to its ranks."""
    cores = cpus.split(",")
    if tp == 1 or "|" in cpus:
        return cpus
    return "|".join(",".join(cores[i::tp] or [cores[i % len(cores)]]) for i in range(tp))


def settle(
    engines: Sequence[Engine], ports: Iterator[int], cores: Sequence[int], places: Mapping[str, Place] | None = None
) -> list[Engine]:
    """Fill in names, free ports and cores; BadInput where two engines have the same name or port."""
    sets = iter(cpu_sets(max(1, sum(not e.gpu_set and not e.cpu_set for e in engines)), cores))
    count: dict[str, int] = {}
    out = []
    for engine in engines:
        number = count.get(engine.role, 0)
        count[engine.role] = number + 1
        cpus = engine.cpu_set or ("" if engine.gpu_set else ranks(next(sets), engine.tp))
        new: dict[str, Any] = {"name": engine.name or f"{engine.role}-{number}", "cpu_set": cpus}
        new["port"] = engine.port or next(ports)
        new["side_channel_port"] = engine.side_channel_port or (0 if engine.role == "replica" else next(ports))
        new["host"] = engine.host or place_of(new["name"], engine.role, places).address
        out.append(engine.model_copy(update=new))
    for what, values in (
        ("name", [e.name for e in out]),
        ("port", [str(p) for e in out for p in (e.port, e.side_channel_port) if p]),
    ):
        twice = next((v for v in values if values.count(v) > 1), None)
        if twice is not None:
            raise BadInput(f"two engines have the {what} {twice}: give each its own, or leave it out")
    return out


def place_of(name: str, role: str, places: Mapping[str, Place] | None) -> Place:
    """Return the place of an engine: by its name, else by its role, else this machine."""
    return (places or {}).get(name) or (places or {}).get(role) or LOCAL


def words(e: Engine, *, server: bool = True) -> list[str]:
    """Return the words of the command line; without ``server`` those of the engine alone, without its HTTP server."""
    cpu = not e.gpu_set
    values: list[tuple[str, Any]] = [
        ("model", e.model),
        ("served-model-name", served_name(e)),
        ("host", e.host if server else None),
        ("port", e.port if server else None),
        ("dtype", e.dtype or ("float16" if cpu else None)),
        ("tensor-parallel-size", e.tp),
        ("block-size", e.block_size or (32 if cpu else None)),
        ("max-model-len", e.max_model_len),
        ("max-num-batched-tokens", e.max_num_batched_tokens),
        ("max-num-seqs", e.max_num_seqs),
        ("limit-mm-per-prompt", json.dumps(e.limit_mm_per_prompt) if e.limit_mm_per_prompt else None),
        ("kv-cache-memory-bytes", e.kv_cache_bytes),
        ("gpu-memory-utilization", e.gpu_memory_utilization),
    ]
    out = [word for flag, value in values if value is not None for word in (f"--{flag}", str(value))]
    out += ["--enforce-eager"] if e.enforce_eager else []
    out += ["--enable-prefix-caching" if e.prefix_caching else "--no-enable-prefix-caching"]
    # Without a time vLLM kills its own workers at SIGTERM: UCX says nothing and shared memory stays behind.
    out += [*(["--disable-uvicorn-access-log"] if server else []), "--shutdown-timeout", "10"]
    if e.role != "replica":
        transfer: dict[str, Any] = {"kv_connector": e.kv_connector, "kv_role": e.kv_role}
        if e.kv_connector_extra_config:
            transfer["kv_connector_extra_config"] = e.kv_connector_extra_config
        out += ["--kv-transfer-config", json.dumps(transfer)]
    return [*out, *e.extra]


def served_name(engine: Engine) -> str:
    """Return the model's name in requests."""
    return engine.served_name or engine.model.rstrip("/").rsplit("/", 1)[-1]


def environment(e: Engine, telemetry_dir: Path | None) -> dict[str, str]:
    """Return what the engine gets on top of kvlab's own environment; the engine's ``env`` has the last word."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": e.host if e.host not in ("0.0.0.0", "::") else "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_COLOR": "1",
    }
    if Path(e.model).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if e.gpu_set:
        env["CUDA_VISIBLE_DEVICES"] = e.gpu_set
    else:
        env |= {**_CPU_ENV, "VLLM_CPU_OMP_THREADS_BIND": e.cpu_set}
        if e.kv_cache_bytes is None:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if e.host.startswith("127."):
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    if e.role != "replica":
        env |= {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": env["VLLM_HOST_IP"],
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(e.side_channel_port),
            # The tables with use counts come when the worker closes.  With a GPU CUDA has closed by then (seen with
            # vLLM 0.23) and nothing is printed: there they come at the first use, without counts.
            "UCX_PROTO_INFO": "y" if e.gpu_set else "used",
            **(nixl.environment(telemetry_dir) if telemetry_dir else {}),
        }
    return {**env, **e.env}


def command(e: Engine, logs: Path, version: str, place: Place = LOCAL, python: str = sys.executable) -> Command:
    """Return the command of a settled engine (see :func:`settle`), its log and its telemetry under ``logs``."""
    telemetry = None if e.role == "replica" else logs / "telemetry" / e.name
    return Command(
        name=e.name,
        role=e.role,
        argv=(python, "-m", versions.entry_module(version), *words(e)),
        env={**environment(e, telemetry), **place.env},
        url=f"http://{e.host if e.host != '0.0.0.0' else '127.0.0.1'}:{e.port}",
        log=logs / f"{e.name}.log",
        model=served_name(e),
        telemetry_dir=telemetry,
        place=place,
    )
