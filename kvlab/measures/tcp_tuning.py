"""tcp-tuning: the same pulls with other sizes, threads and buffers, over one link whose rate changes in between.

All pairs of agents live through the run.  In every round the links come in a new random order, and under
each link the arms do, so that a drift of the machine falls on all alike.  A plain TCP flow between the same
two places, measured under every link in every round, is what a pull is held against.

An arm that hangs or fails costs its time limit and leaves a row in ``cells``; its agents are started again for
the next cell, and after :data:`FAILURES` failures in one cell that cell is left out.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.errors import KvlabError, RunFailed
from kvlab.measures.common import as_parameters, progress, record_evidence, relative_logs
from kvlab.params import Arm, TcpTuning
from kvlab.placement.link import Flow, Link
from kvlab.pull import Case, Options, Pair, Rows, check_memory
from kvlab.runs import Run

#: failures after which a cell (arm, link, descriptors) gets no further repetition
FAILURES = 2
#: connections of the plain flow: one, and as many as NIXL's split makes at most
STREAMS = (1, 4)
UNITS = {"rate": "Gbps", "cwnd": "segments", "rtt_ms": "ms"}
#: what of the kernel decides how a TCP flow behaves
SETTINGS = ("ipv4/tcp_congestion_control", "ipv4/tcp_rmem", "ipv4/tcp_wmem", "core/rmem_max", "core/wmem_max")


def parse(text: str) -> tuple[float | None, bool]:
    """Return (rate in Gbps or None, per flow) of a link's text: ``none``, ``4.97``, ``1.25 per flow``."""
    number = text.removesuffix(" per flow")
    return (None if number == "none" else float(number)), number != text


def cases(params: TcpTuning, arm: Arm) -> list[Case]:
    """Return one descriptor list for each count that ``arm`` pulls: the first alone when nothing splits it."""
    counts = params.descriptor_counts if Options.of(params, arm).nixl_threads else params.descriptor_counts[:1]
    return [Case(f"{n:,} descriptors", ((n, params.descriptor_bytes),), shape=params.shape) for n in counts]


class Arms:
    """The pairs of all arms: started when needed, dropped when they fail."""

    def __init__(self, params: TcpTuning, run: Run, link: Link) -> None:
        self.params, self.run, self.link = params, run, link
        self.pairs: dict[str, Pair] = {}
        self.logs: dict[str, dict[str, Path]] = {}
        self._sent: dict[str, dict[tuple[str, str], Flow]] = {}

    def get(self, arm: Arm) -> Pair:
        """Return the arm's running pair, starting it when there is none; raises as Pair does."""
        if arm.label not in self.pairs:
            pair = Pair(
                arm, Options.of(self.params, arm), cases(self.params, arm), self.run.logs,
                slots=self.params.in_flight, places=self.link.places,
            )  # fmt: skip
            self.logs[arm.label] = pair.logs
            self.pairs[arm.label] = pair.__enter__()
            self._sent[arm.label] = {}
        return self.pairs[arm.label]

    def drop(self, arm: Arm) -> None:
        """End the arm's pair at once."""
        pair = self.pairs.pop(arm.label, None)
        if pair is not None:
            pair.kill()

    def close(self) -> None:
        """End all pairs in order, so that UCX prints what it used; one that will not is killed."""
        for pair in self.pairs.values():
            with contextlib.suppress(KvlabError):
                pair.close()

    def congestion(self, arm: Arm, moved: int) -> dict[str, float]:
        """Return what the sender's connections did since the last call: quantity -> value.

        Connections that carried less than a hundredth of ``moved`` bytes are control traffic.
        """
        before = self._sent[arm.label]
        now = {(f.local, f.peer): f for f in self.link.flows(0, self.pairs[arm.label].pid("target"))}
        self._sent[arm.label] = now
        none = Flow("", "", None, "", 0, 0, 0, 0, 0.0, "")
        used = [(f, before.get(k, none)) for k, f in now.items()]
        used = [(f, old) for f, old in used if f.bytes_sent - old.bytes_sent > moved / 100]
        if not used:
            return {}
        largest = max((f for f, _ in used), key=lambda f: f.bytes_sent)
        return {
            "connections": len(used),
            "retransmits": sum(f.retransmits - old.retransmits for f, old in used),
            "cwnd": largest.cwnd,
            "rtt_ms": largest.rtt_ms,
            # The sender's first number is the scale that the receiver announced.
            "window_scale": int(largest.window_scale.split(",")[0] or 0),
        }


def measure(params: TcpTuning, run: Run) -> None:
    """Fill ``pulls``, ``cells``, ``limits``, ``transports`` and ``verdicts``."""
    pools = [params.in_flight * max(c.bytes for c in cases(params, arm)) for arm in params.arms]
    check_memory(sum(pools) // len(pools), len(pools), params.memory)
    plain_bytes = params.descriptor_counts[0] * params.descriptor_bytes
    pulls, cells, limits = Rows(run, "pulls"), Rows(run, "cells"), Rows(run, "limits")
    failures: Counter[tuple[str, str, str]] = Counter()
    rng = np.random.default_rng(params.seed)
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(Link())
        arms = Arms(params, run, link)
        stack.callback(arms.close)
        for rows in (pulls, cells, limits):
            stack.callback(rows.flush)
        # Loopback has one condition only, and says so.
        links = params.links if link.kind == "veth" else ["loopback"]
        run.update(link={"kind": link.kind, "reason": link.reason, "links": links, "settings": settings()})
        turns = [(r, str(text)) for r in range(-params.warmup, params.repetitions) for text in rng.permutation(links)]
        for repetition, text in progress(turns, "links"):
            if link.kind == "veth":
                link.set_rate(*parse(text))
            at = {"link": text, "repetition": repetition, "warmup": repetition < 0}
            for arm in (params.arms[n] for n in rng.permutation(len(params.arms))):
                for case in cases(params, arm):
                    if failures[cell := (arm.label, text, case.name)] < FAILURES:
                        failures[cell] += not _pull(arms, arm, case, at, pulls, cells)
            # A pair that dies under the plain flow is found out, and replaced, at its next pull.
            with contextlib.suppress(KvlabError):
                limits.add(_limits(arms, plain_bytes, text, repetition))
        if not pulls.rows:
            raise RunFailed(f"no pull of any arm completed; the first: {cells.rows[0]['note']}")
        run.update(
            resolved={label: as_parameters(pair.options) for label, pair in arms.pairs.items()},
            logs={label: relative_logs(run, logs) for label, logs in arms.logs.items()},
        )
    kept = [arm for arm in params.arms if arm.label in arms.logs]
    record_evidence(run, kept, arms.logs, descriptor_bytes=params.descriptor_bytes, local="host", remote="host")


def _pull(arms: Arms, arm: Arm, case: Case, at: dict[str, Any], pulls: Rows, cells: Rows) -> bool:
    """Pull once and keep what was seen; a failure is kept too, ends the arm's agents, and returns False."""
    row = {"arm": arm.label, "case": case.name, "link": at["link"], "repetition": at["repetition"]}
    start = arms.run.elapsed_s()
    try:
        # The first round is checked byte by byte; checking heats the caches, so it is warm-up.
        got = arms.get(arm).pull(case, verify=at["repetition"] == -arms.params.warmup)
    except KvlabError as error:
        arms.drop(arm)
        note = re.sub(r" \(log: .*?\)", "", str(error))[:300]
        cells.add([{**row, "outcome": outcome(note), "quantity": "rate", "note": note}])
        return False
    pulls.add({**r, **at, "start_s": start} for r in got)
    moved = sum(r["bytes"] for r in got)
    found = {"rate": moved * 8e-3 / max(r["xfer_us"] for r in got), **arms.congestion(arm, moved)}
    if not at["warmup"]:
        cells.add(
            {**row, "outcome": "completed", "quantity": k, "value": v, "unit": UNITS.get(k, "")}
            for k, v in found.items()
        )
    return True


def outcome(error: str) -> str:
    """Return ``timeout`` when the message says that a limit passed, ``failed`` otherwise."""
    return "timeout" if re.search(r"\bwithin [\d.e+]+ s\b", error) else "failed"


def _limits(arms: Arms, size: int, link: str, repetition: int) -> list[dict[str, Any]]:
    """Time plain flows of ``size`` bytes between an idle pair's processes."""
    rows: list[dict[str, Any]] = []
    wanted = arms.params.limits and repetition >= 0
    for pair, n in ((p, n) for p in list(arms.pairs.values())[: int(wanted)] for n in STREAMS):
        s = pair.socket_limit(size, n)
        row = {"name": f"plain TCP, {n} connection{'s' if n > 1 else ''}", "kind": "socket", "link": link}
        rows.append({**row, "bytes": size, "seconds": s, "gb_per_s": size / s / 1e9, "repetition": repetition})
    return rows


def settings() -> dict[str, str]:
    """Return the kernel's TCP settings; a network namespace starts with the machine's own."""
    files = {name: Path("/proc/sys/net") / name for name in SETTINGS}
    return {name: " ".join(path.read_text("utf-8").split()) for name, path in files.items() if path.is_file()}
