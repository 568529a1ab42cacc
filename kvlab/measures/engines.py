"""What the experiments with real engines share: specs from parameters, one phase of load, every pull caught."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.analysis.join import pulls_to_phases, pulls_to_requests
from kvlab.capture import nixl, vllm
from kvlab.engines import launch
from kvlab.engines.dynamo import Dynamo
from kvlab.engines.load import Generator, Load
from kvlab.engines.model import StandIn
from kvlab.engines.router import Router
from kvlab.engines.vllm import Command, Engine, Role
from kvlab.errors import KvlabError, RunFailed
from kvlab.measures.common import record_evidence, relative_logs
from kvlab.params import Arm, EngineArm, EngineParams
from kvlab.placement import reach
from kvlab.placement.local import Place
from kvlab.placement.ray import Follower
from kvlab.runs import Run, safe_name

#: seconds after which what is there is written again
_FLUSH_S = 5


def model_of(params: EngineParams) -> str:
    """Return the model's folder or hub name, making the stand-in when none is named."""
    return params.model or str(StandIn.model_validate(params.stand_in).path())


def engine(params: EngineParams, arm: EngineArm, role: Role, model: str, **changes: Any) -> Engine:
    """Return the spec of one engine of ``arm``."""
    gpus = params.decode_gpus if role == "decode" else params.prefill_gpus
    own = arm.initiator_env if role == "decode" else arm.target_env
    words = [*params.engine_words, *(["--load-format", params.load_format] if params.load_format else [])]
    threads = {} if arm.nixl_threads is None else {"num_threads": arm.nixl_threads}
    values: dict[str, Any] = {
        "role": role,
        "model": model,
        "dtype": params.dtype,
        "tp": params.tp,
        "block_size": arm.block_size or params.block_size,
        "max_model_len": params.max_model_len,
        "max_num_batched_tokens": arm.max_num_batched_tokens or params.max_num_batched_tokens,
        "max_num_seqs": params.max_num_seqs,
        "kv_cache_bytes": params.kv_cache_bytes,
        "gpu_memory_utilization": params.gpu_memory_utilization,
        "kv_connector_extra_config": {**threads, **arm.kv_connector_extra_config} if role != "replica" else {},
        "gpu_set": gpus,
        "env": {**params.engine_env, **arm.env, **own},
        "extra": words,
    }
    return Engine.model_validate({**values, **changes})


def pair(params: EngineParams, arm: EngineArm, model: str) -> list[Engine]:
    """Return one prefill and one decode engine."""
    return [engine(params, arm, "prefill", model), engine(params, arm, "decode", model)]


def front_of(params: EngineParams) -> Router | Dynamo | None:
    """Return what hands requests over to the engines, None where kvlab's client does."""
    fronts: dict[str, type[Router] | type[Dynamo]] = {"router": Router, "dynamo": Dynamo}
    chosen = fronts.get(getattr(params, "hand_over", ""))
    return chosen() if chosen else None


def memory_of(params: EngineParams) -> str:
    """Return where the KV lies, in UCX's word: ``cuda`` or ``host``."""
    return "cuda" if params.decode_gpus else "host"


def in_turn(arms: Sequence[EngineArm], starts: int) -> list[tuple[int, EngineArm]]:
    """Return (start, arm) of every start of engines, the arms' order turned round at every other start."""
    return [(start, arm) for start in range(starts) for arm in (arms if start % 2 == 0 else arms[::-1])]


def dry_run(params: Any) -> list[Command]:
    """Return what each arm's first start would run, engines of one arm after another's."""
    model, out = model_of(params), []
    for arm in params.arms:
        folder = Path(params.out) / "RUN" / "logs" / safe_name(arm.label)
        out += launch.commands(pair(params, arm, model), folder=folder, router=front_of(params))
    return out


def at_place(command: Command) -> Command:
    """Return ``command`` as it is started where it runs: a node of a cluster has its own interpreter and folders."""
    there: Command = command.place.node.command(command) if command.place.node else command
    return there


def following(command: Command, ring: Path, began_s: float) -> nixl.Follower | Follower:
    """Return what follows an engine's telemetry rings, on the engine's own machine."""
    if command.place.node:
        return Follower(command.place.node, ring, began_s)
    ring.mkdir(parents=True, exist_ok=True)
    return nixl.Follower(ring, began_s=began_s)


@dataclass
class Bench:
    """Collects requests, phases, pulls and counters of one run; every flush keeps what is there."""

    run: Run
    generator: Generator
    began_s: float
    requests: list[pd.DataFrame] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[pd.DataFrame] = field(default_factory=list)
    metrics: list[pd.DataFrame] = field(default_factory=list)
    logs: dict[str, dict[str, Path]] = field(default_factory=dict)
    commands: list[dict[str, Any]] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    _flushed_s: float = 0

    @contextlib.contextmanager
    def up(
        self,
        arm: EngineArm,
        specs: list[Engine],
        *,
        start: int = 0,
        router: Router | Dynamo | None = None,
        places: dict[str, Place] | None = None,
        limit_s: float = 300,
    ) -> Iterator[Engines]:
        """Start the arm's engines, follow the decode engines' rings, and keep logs and pulls when they end."""
        folder = self.run.logs / f"{safe_name(arm.label)}-{start}"
        todo = [at_place(c) for c in launch.commands(specs, folder=folder, router=router, places=places)]
        mine = self.logs.setdefault(arm.label, {})
        mine |= {f"{c.name}-{start}": c.log for c in todo if c.role != "router"}
        rings = [(c, c.telemetry_dir) for c in todo if c.role == "decode" and c.telemetry_dir]
        followers = [following(c, ring, self.began_s) for c, ring in rings]
        engines: Engines | None = None
        try:
            with contextlib.ExitStack() as stack:
                for follower in followers:
                    stack.enter_context(follower)
                log = folder / "reach.log"
                todo = [replace(c, url=stack.enter_context(reach.into(c.place, c.url, log))) for c in todo]
                with launch.up(specs, folder=folder, limit_s=limit_s, planned=todo) as cluster:
                    self.commands += [{**c, "arm": arm.label, "start": start} for c in launch.record(cluster)]
                    self.run.update(commands=self.commands)
                    engines = Engines(self, arm, cluster, followers, start)
                    yield engines
        finally:
            if engines is not None:
                engines.collect()
                self.losses += [x for f in followers for x in f.losses()]
            self.flush()

    @contextlib.contextmanager
    def evidence(self, arms: Sequence[Arm], memory: str) -> Iterator[None]:
        """Read the engines' UCX tables when the block ends, however it ends; a failure keeps its own error."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(KvlabError, OSError):
                self._record(arms, memory)
            raise
        self._record(arms, memory)

    def _record(self, arms: Sequence[Arm], memory: str) -> None:
        started = [arm for arm in arms if arm.label in self.logs]
        if not started:
            return
        # Pulls from before the first phase have no descriptor count, so a run that ended there has no such column.
        sizes = self.run.table("pulls").get("descriptor_bytes", pd.Series(dtype=float)).dropna()
        size = int(sizes.median()) if len(sizes) else 128 * 1024
        record_evidence(self.run, started, self.logs, descriptor_bytes=size, local=memory, remote=memory)

    def flush(self) -> None:
        """Write what there is; losses of the rings go into the manifest."""
        self._flushed_s = time.monotonic()
        for table, frames in (("requests", self.requests), ("pulls", self.pulls), ("engine_metrics", self.metrics)):
            frames = [f for f in frames if len(f)]
            if frames:
                self.run.write(table, pd.concat(frames, ignore_index=True))
        if self.phases:
            self.run.write("phases", pd.DataFrame(self.phases))
        logs = {arm: relative_logs(self.run, files) for arm, files in self.logs.items()}
        self.run.update(ring_losses=self.losses, logs=logs)


@dataclass
class Engines:
    """Engines that are up, and the phases run on them."""

    bench: Bench
    arm: EngineArm
    cluster: launch.Cluster
    followers: Sequence[nixl.Follower | Follower]
    start: int
    _requests: list[pd.DataFrame] = field(default_factory=list)
    _read: list[pd.DataFrame] = field(default_factory=list)

    def _take(self) -> None:
        """Read the rings: after each phase, so that what a node has seen outlives its loss."""
        for number, follower in enumerate(self.followers):
            if len(frame := follower.take()):
                self._read.append(frame.assign(engine=f"decode-{number}"))

    def _scrape(self) -> dict[str, str]:
        texts = {}
        for one in self.cluster.engines:
            with contextlib.suppress(KvlabError):
                texts[one.name] = one.metrics_text()
        return texts

    def phase(self, load: Load, target: Any = None, **columns: Any) -> pd.DataFrame:
        """Run one phase; keep its requests, totals and metric differences; return the requests."""
        load = replace(load, phase=f"{load.phase}@{self.start}" if self.start else load.phase)
        before = self._scrape()
        # Requests, pulls and phases are on one clock, or they are not joined; a clock that is set does not move it.
        began = time.monotonic()
        rows, totals = self.bench.generator.phase(load, target or self.cluster, self.arm.label)
        rows = rows.assign(start=self.start, **columns)
        span = time.monotonic() - began
        self._take()
        after = self._scrape()
        metrics = pd.concat(
            [vllm.difference(before.get(k), after[k], self.arm.label, k, load.phase) for k in after], ignore_index=True
        )
        kv = metrics[metrics["engine"].astype(str).str.startswith("decode")] if len(metrics) else metrics
        failed = int(rows["error"].notna().sum())
        self.bench.metrics.append(metrics)
        self.bench.requests.append(rows)
        self._requests.append(rows)
        counted = _kv_totals(kv)
        self.bench.phases.append(
            {
                "arm": self.arm.label,
                "phase": load.phase,
                "start": self.start,
                "repetition": load.repetition,
                "warmup": load.warmup,
                "prompt_tokens": load.prompt_tokens,
                "output_tokens": load.output_tokens,
                "concurrency": load.concurrency,
                "rate_rps": load.rate_rps,
                "requests": len(rows),
                "failed": failed,
                "start_s": began - self.bench.began_s,
                "span_s": span,
                "duration_s": totals["duration"],
                "requests_per_s": totals["request_throughput"],
                "output_tokens_per_s": totals["output_throughput"],
                **counted,
                **columns,
            }
        )
        if time.monotonic() - self.bench._flushed_s > _FLUSH_S:
            self.bench.flush()
        if failed == len(rows):
            raise RunFailed(
                f"arm {self.arm.label!r}: every request of phase {load.phase} failed: {rows['error'].iloc[0]}"
            )
        return rows

    def collect(self) -> None:
        """Take the pulls out of the rings, join them to requests, count descriptors, and reconcile with vLLM's sums."""
        self._take()
        if not self._read:
            return
        pulls = pd.concat(self._read, ignore_index=True)
        # A ring is a rank's of one engine.
        pulls["rank"] = pulls.groupby("engine")["ring"].transform(lambda ring: pd.factorize(ring, sort=True)[0])
        pulls["start_uncertainty_s"] += self.bench.generator.off_by_s
        pulls = pulls[pulls["operation"] == "READ"].drop(columns=["operation", "ring", "requests"])
        pulls = pulls.assign(arm=self.arm.label, start=self.start, block_size=self.arm.block_size)
        pulls["nixl_threads"] = self.arm.nixl_threads
        asked = pd.concat(self._requests, ignore_index=True) if self._requests else pd.DataFrame()
        if len(asked):
            mine = [r for r in self.bench.phases if r["arm"] == self.arm.label and r["start"] == self.start]
            pulls = pulls_to_requests(pulls_to_phases(pulls, pd.DataFrame(mine)), asked)
            if "pulled_tokens" in mine[0]:  # the phase's own prompts are others, never pulled
                lengths = {(r["phase"], r["repetition"]): r["pulled_tokens"] for r in mine}
                keys = zip(pulls["phase"], pulls["repetition"], strict=True)
                pulls["prompt_tokens"] = [lengths.get(key) for key in keys]
            pulls["case"] = [f"{int(t):,} tokens" if pd.notna(t) else None for t in pulls["prompt_tokens"]]
            pulls = self._descriptors(pulls)
        else:
            pulls["warmup"] = True
        self.bench.pulls.append(pulls)
        for row in self.bench.phases:
            if row["arm"] == self.arm.label and row["start"] == self.start:
                mine = pulls[pulls["phase"] == row["phase"]]
                mine = mine[mine["repetition"] == row["repetition"]]
                row |= {"pulls": len(mine), "pulled_bytes": float(mine["bytes"].sum())}
                if row["vllm_transfers"] and abs(row["vllm_bytes"] - row["pulled_bytes"]) > 1:
                    row["note"] = "the ring's bytes differ from vLLM's: a pull may lie between two phases, or was lost"

    def _descriptors(self, pulls: pd.DataFrame) -> pd.DataFrame:
        """Fill in the descriptor count: vLLM's sum over its pulls, where all pulls of a phase moved the same bytes."""
        pulls["descriptors"], pulls["descriptors_source"] = np.nan, None
        for row in self.bench.phases:
            if row["arm"] != self.arm.label or row["start"] != self.start or not row["vllm_transfers"]:
                continue
            mine = (pulls["phase"] == row["phase"]) & (pulls["repetition"] == row["repetition"])
            if mine.any() and pulls.loc[mine, "bytes"].nunique() == 1:
                mean = row["vllm_descriptors"] / row["vllm_transfers"]
                pulls.loc[mine, "descriptors"] = round(mean)
                whole = abs(mean - round(mean)) < 1e-6
                pulls.loc[mine, "descriptors_source"] = "vLLM's sum over its pulls" + ("" if whole else ", a mean")
        pulls["descriptors"] = pulls["descriptors"].astype("Int64")
        size = pulls["bytes"] / pulls["descriptors"].astype("Float64")
        pulls["descriptor_bytes"] = size.round().astype("Int64")
        return pulls


def _kv_totals(metrics: pd.DataFrame) -> dict[str, float]:
    """Return transfers, bytes and descriptors of a phase from vLLM's histogram sums."""

    def total(name: str) -> float:
        if metrics.empty:
            return 0.0
        return float(metrics.loc[metrics["metric"] == name, "delta"].sum())

    return {
        "vllm_transfers": total("vllm:nixl_xfer_time_seconds_count"),
        "vllm_bytes": total("vllm:nixl_bytes_transferred_sum"),
        "vllm_descriptors": total("vllm:nixl_num_descriptors_sum"),
    }
