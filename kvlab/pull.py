"""The pull: two NIXL agents in two processes, one reading a descriptor list from the other.

As vLLM's NixlConnector does it: the target exposes a registered KV pool; the initiator prepares both
descriptor lists once (``prep_xfer_dlist``), makes a READ from index arrays (``make_prepped_xfer``),
posts it (``transfer``) and polls (``check_xfer_state``).  *Post* is the time until ``transfer``
returned, *drain* is the rest until a poll saw completion.

The processes speak only with the controller (:class:`Pair`), which hands on the agents' metadata, so
they can stand in two network namespaces or on two hosts.  Each side's UCX writes to its own log.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import psutil

from kvlab.errors import BadInput, RunFailed
from kvlab.params import Arm, PullParams
from kvlab.placement import local

Indices = npt.NDArray[np.int32]

#: seconds that an agent may take to allocate, fill and register its pool
START_LIMIT_S = 120


@dataclass(frozen=True)
class Case:
    """One descriptor list: groups of (count, bytes each), e.g. a layout's pull at a prompt length."""

    name: str
    groups: tuple[tuple[int, int], ...]
    prompt_tokens: int | None = None
    #: ``contiguous`` hands the blocks over in address order, and NIXL merges them into one descriptor
    shape: str = "scattered"
    #: pulls at once and pause between polls, where they differ from the pair's own
    in_flight: int | None = None
    poll_interval_ms: float | None = None

    @property
    def descriptors(self) -> int:
        """Descriptors in the list that is handed to NIXL."""
        return sum(n for n, _ in self.groups)

    @property
    def bytes(self) -> int:
        """Bytes of the whole list."""
        return sum(n * size for n, size in self.groups)

    @property
    def descriptor_bytes(self) -> int:
        """Bytes of the most frequent descriptor, which chooses the protocol row."""
        return max(self.groups, key=lambda g: g[0])[1]

    def offsets(self, slots: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return offset and length of every block of ``slots`` pulls, slot after slot."""
        lengths = np.concatenate([np.full(n, size, np.int64) for n, size in self.groups])
        lengths = np.tile(lengths, slots)
        return np.concatenate([[0], np.cumsum(lengths)[:-1]]), lengths

    def indices(self, slot: int, rng: np.random.Generator) -> tuple[Indices, Indices]:
        """Return local and remote block numbers of one pull in ``slot``.

        Scattered: each side in a random order of its own (within blocks of one size), so that hardly
        two neighbours on one side are neighbours on the other and NIXL finds nothing to merge.
        """
        first = slot * self.descriptors
        sides = []
        for _ in range(2):
            parts, start = [], first
            for n, _size in self.groups:
                block = np.arange(start, start + n, dtype=np.int32)
                parts.append(rng.permutation(block) if self.shape == "scattered" else block)
                start += n
            sides.append(np.concatenate(parts).astype(np.int32))
        return sides[0], sides[1]


@dataclass
class Options:
    """How the two agents are made and polled; one value of each for both sides of a pair."""

    memory: str = "DRAM"
    initiator_gpu: int = 0
    target_gpu: int = 0
    nixl_threads: int = 0
    progress_thread: bool = False
    poll_interval_ms: float = 0.0
    pull_time_limit_s: float = 60.0
    seed: int = 1

    @classmethod
    def of(cls, params: PullParams, arm: Arm, cores: int | None = None) -> Options:
        """Take the arm's values where it has them, the experiment's otherwise; resolve ``auto`` for ``cores``."""
        many = (cores or os.cpu_count() or 1) >= 8
        auto = many if params.progress_thread == "auto" else params.progress_thread == "on"
        return cls(
            memory=params.memory,
            initiator_gpu=params.initiator_gpu,
            target_gpu=params.target_gpu,
            nixl_threads=params.nixl_threads if arm.nixl_threads is None else arm.nixl_threads,
            progress_thread=auto if arm.progress_thread is None else arm.progress_thread,
            poll_interval_ms=params.poll_interval_ms,
            pull_time_limit_s=params.pull_time_limit_s,
            seed=params.seed,
        )


def environment(arm: Arm, side: str) -> dict[str, str]:
    """Return the whole environment of one side: this process's, then the arm's.

    UCX prints its protocol tables with the number of times each row was used when the worker closes
    (``UCX_PROTO_INFO=used``, UCX 1.21 and newer); the arm may set another mode.
    """
    own = arm.initiator_env if side == "initiator" else arm.target_env
    return {**os.environ, "UCX_PROTO_INFO": "used", **arm.env, **own}


class Pair:
    """Controller of one target and one initiator process.  Use it as a context manager."""

    def __init__(
        self,
        arm: Arm,
        options: Options,
        cases: Sequence[Case],
        logs: Path,
        *,
        slots: int = 1,
        places: tuple[local.Place, local.Place] = (local.LOCAL, local.LOCAL),
        number: int = 0,
    ) -> None:
        self.arm = arm
        self.options = options
        self.cases = {case.name: case for case in cases}
        self.slots = slots
        self.number = number
        self.rng = np.random.default_rng(options.seed)
        self.places = dict(zip(("target", "initiator"), places, strict=True))
        stem = re.sub(r"[^\w.-]+", "_", arm.label).strip("_") + (f"-{number}" if number else "")
        self.logs = {side: logs / f"{stem}.{side}.log" for side in ("target", "initiator")}
        self._processes: dict[str, Any] = {}
        self._ends: dict[str, Connection] = {}
        self._early: dict[str, list[dict[str, Any]]] = {"target": [], "initiator": []}
        self.versions: dict[str, Any] = {}

    @property
    def pool_bytes(self) -> int:
        """Bytes of each side's pool: the largest case, once for every pull in flight."""
        return max(self._slots(case) * case.bytes for case in self.cases.values())

    def _slots(self, case: Case) -> int:
        return case.in_flight or self.slots

    def __enter__(self) -> Pair:
        try:
            self._start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The tables of UCX_PROTO_INFO=used appear only when the agents close by themselves.
        self.close() if kind is None else self.kill()

    def _start(self) -> None:
        for side in ("target", "initiator"):
            self._processes[side], self._ends[side] = local.start_speaking(
                "kvlab.pull_agent", env=environment(self.arm, side), log=self.logs[side], place=self.places[side]
            )
        token = secrets.token_hex(4)
        for side in ("target", "initiator"):
            self._send(
                side,
                op="open",
                name=f"kvlab-{side}-{token}",
                role=side,
                memory=self.options.memory,
                gpu=getattr(self.options, f"{side}_gpu"),
                pool_bytes=self.pool_bytes,
                threads=self.options.nixl_threads,
                progress=self.options.progress_thread,
                seed=self.options.seed,
            )
        target, initiator = (self._reply(s, START_LIMIT_S) for s in ("target", "initiator"))
        self.versions = initiator["versions"]
        lists = {}
        for case in self.cases.values():
            offsets, lengths = case.offsets(self._slots(case))
            lists[case.name] = (offsets, lengths)
        self._ask(
            "initiator",
            START_LIMIT_S,
            op="connect",
            metadata=target["metadata"],
            base=target["base"],
            gpu=self.options.target_gpu,
            lists=lists,
        )

    # -- speaking with the two processes ---------------------------------------------------------

    def _send(self, side: str, **message: Any) -> None:
        try:
            self._ends[side].send(message)
        except (BrokenPipeError, ConnectionResetError, OSError):
            self._died(side)

    def _reply(self, side: str, limit_s: float) -> dict[str, Any]:
        """Wait for ``side``; the other side's death, an error report or the limit end the wait."""
        deadline = time.monotonic() + limit_s
        while not self._early[side]:
            ready = wait(list(self._ends.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
                raise RunFailed(
                    f"arm {self.arm.label!r}: no answer from the {side} within {limit_s:g} s{self._last_words(side)}"
                )
            # The other side speaks unasked only to say that it failed, by its death, or a little early.
            for name, end in self._ends.items():
                if end in ready:
                    try:
                        message: dict[str, Any] = end.recv()
                    except (EOFError, OSError):
                        self._died(name)
                    if "error" in message:
                        self._refused(name, message)
                    self._early[name].append(message)
        return self._early[side].pop(0)

    def _ask(self, side: str, limit_s: float, **message: Any) -> dict[str, Any]:
        self._send(side, **message)
        return self._reply(side, limit_s)

    def _died(self, side: str) -> None:
        process = self._processes[side]
        code = local.stop(process, 1)
        self.kill()
        if lost := getattr(process, "lost", ""):
            raise RunFailed(f"arm {self.arm.label!r}: {lost} ({side} process)")
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise RunFailed(f"arm {self.arm.label!r}: the {side} process {how} in mid-run{self._last_words(side)}")

    def _refused(self, side: str, message: Mapping[str, Any]) -> None:
        self.kill()
        text = f"arm {self.arm.label!r}: the {side} {message['error']}{self._last_words(side)}"
        raise (BadInput if message.get("input") else RunFailed)(text)

    def _last_words(self, side: str) -> str:
        """Return UCX's or NIXL's own first complaint in the log, the root cause, and where to read on."""
        try:
            lines = self.logs[side].read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        complaints = [x for x in lines if re.search(r"UCX +(WARN|ERROR|FATAL)|^E\d{4}|\bERROR\b|Error:", x)]
        said = [re.sub(r"^.*?UCX +(?:WARN|ERROR|FATAL) +", "UCX says: ", x).strip() for x in complaints]
        useful = [x for x in said if "unused environment" not in x and "suppress this warning" not in x]
        return (f"; {useful[0]}" if useful else "") + f" (log: {self.logs[side]})"

    # -- the work --------------------------------------------------------------------------------

    def pull(
        self,
        case: Case,
        *,
        verify: bool = False,
        in_flight: int | None = None,
        begin: Callable[[], float] | None = None,
    ) -> list[dict[str, Any]]:
        """Do ``in_flight`` pulls of ``case`` at once and return a row of the ``pulls`` table for each.

        :param verify: compare every byte that arrived with what the target holds; RunFailed on a difference
        :param begin: called just before the initiator is told to pull (other pairs may be waited for); its answer is
            the row's ``start_s``
        """
        n = self._slots(case) if in_flight is None else in_flight
        poll_ms = self.options.poll_interval_ms if case.poll_interval_ms is None else case.poll_interval_ms
        pairs = [case.indices(slot, self.rng) for slot in range(n)]
        limit = self.options.pull_time_limit_s
        self._ask("target", 10, op="serve")
        started = {"start_s": begin()} if begin else {}
        reply = self._ask(
            "initiator",
            limit + 10 + n * case.bytes / 50e6 * verify,
            op="pull",
            case=case.name,
            indices=pairs,
            poll_s=poll_ms / 1e3,
            pull_limit_s=limit,
            verify=verify,
        )
        self._ask("target", 10, op="rest")
        rows = []
        for one in reply["pulls"]:
            rows.append(
                {
                    "arm": self.arm.label,
                    "rank": 0,
                    "pair": self.number,
                    "case": case.name,
                    "prompt_tokens": case.prompt_tokens,
                    "shape": case.shape,
                    "descriptors": one["descriptors"],
                    "descriptors_source": "NIXL telemetry",
                    "descriptor_bytes": case.descriptor_bytes,
                    "bytes": one["bytes"],
                    "post_us": one["post_us"],
                    "xfer_us": one["xfer_us"],
                    "post_clock_us": one["post_clock_us"],
                    "xfer_clock_us": one["xfer_clock_us"],
                    "poll_interval_us": poll_ms * 1e3,
                    "in_flight": n,
                    "nixl_threads": self.options.nixl_threads,
                    "verified": True if verify else None,
                    **started,
                }
            )
        return rows

    def pid(self, side: str) -> int:
        """Return the process id of ``target`` or ``initiator``."""
        return int(self._processes[side].pid)

    def copy_limit(self, size: int) -> float:
        """Return the seconds that a plain copy of ``size`` bytes takes in the initiator's memory."""
        return float(self._ask("initiator", 60, op="copy", size=size)["seconds"])

    def socket_limit(self, size: int, streams: int = 1) -> float:
        """Return the seconds that ``size`` bytes take from target to initiator over plain TCP sockets."""
        port = self._ask("target", 10, op="listen", address=self.places["target"].address, streams=streams)["port"]
        self._send("target", op="feed", size=size)
        reply = self._ask(
            "initiator", 120, op="drink", address=self.places["target"].address, port=port, size=size, streams=streams
        )
        self._reply("target", 30)
        return float(reply["seconds"])

    def close(self) -> None:
        """End both agents in order (initiator first), so that UCX prints what it used."""
        try:
            for side in ("initiator", "target"):
                self._send(side, op="close")
                local.stop(self._processes[side], 15)
        finally:
            self.kill()

    def kill(self) -> None:
        """End both processes at once; safe to call twice."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
        for end in self._ends.values():
            end.close()


def check_memory(pool_bytes: int, pairs: int, memory: str, *, pools: int = 2, free_bytes: int | None = None) -> None:
    """Refuse pools that do not fit: ``pools`` a pair, 10 percent kept free.  BadInput says the numbers."""
    if memory != "DRAM":
        return
    need, free = pools * pairs * pool_bytes, psutil.virtual_memory().available if free_bytes is None else free_bytes
    if need > 0.9 * free:
        raise BadInput(
            f"the KV pools need {need / 1e9:.1f} GB ({pairs} pairs x {pools} pools of {pool_bytes / 1e9:.2f} GB) and "
            f"{free / 1e9:.1f} GB of memory are free: lower prompt_tokens or in_flight, raise tp, or use fewer arms"
        )


@dataclass
class Rows:
    """Rows collected so far, written to the run after every round so that a failure keeps them."""

    run: Any
    table: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    _written: float = 0.0

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take rows in; write the table at most once in two seconds."""
        self.rows += [dict(r) for r in rows]
        if time.monotonic() - self._written > 2:
            self.flush()

    def flush(self) -> None:
        """Write the table."""
        self._written = time.monotonic()
        if self.rows:
            self.run.write(self.table, pd.DataFrame(self.rows))
