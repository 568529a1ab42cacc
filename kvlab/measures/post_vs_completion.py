"""post-vs-completion: pull a model's KV at several prompt lengths over each arm's transport.

All pairs of agents live through the whole run and take turns, arm by arm in a new random order in every
round, so that a drift of the machine falls on all arms alike.  Idle pairs wait on a socket.

An arm can have several pairs that pull at once, and the agents can stand on the nodes of a Ray cluster.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from kvlab import kv_layout
from kvlab.capture import counters
from kvlab.measures.common import counted, describe, limit_rows, progress, record_evidence, relative_logs
from kvlab.params import PostVsCompletion
from kvlab.placement.local import LOCAL, Place
from kvlab.pull import Case, Options, Pair, Rows, check_memory
from kvlab.runs import Run


def cases(params: PostVsCompletion) -> list[Case]:
    """Return one descriptor list a prompt length, as the layout gives it."""
    layout = kv_layout.load(params.layout, dtype=params.kv_dtype, block_size=params.block_size, tp=params.tp)
    made = []
    for tokens in params.prompt_tokens:
        shape = layout.pull(tokens)
        groups = tuple((g.descriptors, g.descriptor_bytes) for g in shape.groups if g.descriptors)
        made.append(Case(f"{params.layout} tp{params.tp} {tokens} tokens", groups, tokens, params.shape))
    return made


def measure(params: PostVsCompletion, run: Run) -> None:
    """Fill ``pulls``, ``limits``, ``counters``, ``transports`` and ``verdicts``."""
    all_cases = cases(params)
    largest = max(case.bytes for case in all_cases)
    rows, limits = Rows(run, "pulls"), list[dict[str, object]]()
    rng = np.random.default_rng(params.seed)
    with contextlib.ExitStack() as stack:
        ways, look = stack.enter_context(placed(params, run, params.in_flight * largest))
        made: dict[str, list[Pair]] = {arm.label: [] for arm in params.arms}
        for arm in params.arms:
            for number, way in enumerate(ways):
                options = Options.of(params, arm, way.cores)
                if way.gpus:
                    options = replace(options, target_gpu=way.gpus[0], initiator_gpu=way.gpus[1])
                one = Pair(arm, options, all_cases, run.logs, slots=params.in_flight, places=way.places, number=number)
                made[arm.label].append(stack.enter_context(one))
        describe(run, {label: pairs[0] for label, pairs in made.items()})
        logs = {label: logs_of(pairs) for label, pairs in made.items()}
        run.update(logs={label: relative_logs(run, files) for label, files in logs.items()})
        stack.callback(rows.flush)
        stack.callback(lambda: run.write("limits", pd.DataFrame(limits)) if limits else None)
        turn = stack.enter_context(counted(run, look=look))
        together = stack.enter_context(Together(len(ways)))
        for repetition in progress(range(-params.warmup, params.repetitions), "rounds"):
            if params.limits and repetition >= 0:
                for name, pair in {w.link: p for w, p in zip(ways, made[params.arms[0].label], strict=True)}.items():
                    found = limit_rows(pair, largest, repetition, params.memory)
                    limits += [row | ({"link": name} if name else {}) for row in found]
            for case in all_cases:
                for number in rng.permutation(len(params.arms)):
                    arm = params.arms[number]
                    # The first round is checked byte by byte; checking heats the caches, so it is warm-up.
                    first = repetition == -params.warmup
                    with turn(arm.label):
                        pulled = together.pull(made[arm.label], case, run.elapsed_s, verify=first)
                    for way, own in zip(ways, pulled, strict=True):
                        link = {"link": way.link} if way.link else {}
                        rows.add({**row, **link, "repetition": repetition, "warmup": repetition < 0} for row in own)
    frame = pd.DataFrame(rows.rows)
    place = "cuda" if params.memory == "VRAM" else "host"
    record_evidence(
        run,
        params.arms,
        logs,
        descriptor_bytes=all_cases[0].descriptor_bytes,
        local=place,
        remote=place,
        # Every pair pulls the same lists.
        descriptors={str(k): int(n) // len(ways) for k, n in frame.groupby("arm")["descriptors"].sum().items()},
    )


@dataclass(frozen=True)
class Way:
    """From where to where one pair pulls: its two places, the link's name, GPUs and cores there."""

    places: tuple[Place, Place] = (LOCAL, LOCAL)
    link: str = ""
    gpus: tuple[int, ...] = ()
    cores: int | None = None


@contextlib.contextmanager
def placed(
    params: PostVsCompletion, run: Run, pool_bytes: int
) -> Iterator[tuple[list[Way], Callable[[], counters.Snapshot]]]:
    """Yield a way for every pair of an arm, and what reads the byte counters: here, or of all nodes of a cluster."""
    arms = len(params.arms)
    if params.ray is None:
        check_memory(pool_bytes, arms * params.pairs, params.memory)
        yield [Way()] * params.pairs, counters.read
        return
    from kvlab.placement import ray

    gpus = int(params.memory == "VRAM")
    seats = {f"agents {n}": (n, ray.share(params.ray, gpus)) for n in range(params.ray.nodes)}
    with ray.up(params.ray, run.logs, seats, run.update) as up:
        nodes, ways, pools = list(up.values()), [], Counter[str]()
        links = between(len(nodes))
        for number, (target, initiator) in enumerate(links * params.pairs):
            ends = nodes[target], nodes[initiator]
            pools.update(node.facts["node_id"] for node in ends)
            ways.append(
                Way(
                    places=(ends[0].place, ends[1].place),
                    link=f"node {target} to node {initiator}",
                    gpus=tuple(number // len(links) % len(n.facts["gpu_ids"]) for n in ends) if gpus else (),
                    cores=min(node.facts["cores_allowed"] for node in ends),
                )
            )
        for free, node in {(node.facts["free_bytes"], node.facts["node_id"]) for node in nodes}:
            check_memory(pool_bytes, arms * pools[node], params.memory, pools=1, free_bytes=free)
        yield ways, partial(ray.look, nodes)


def between(nodes: int) -> list[tuple[int, int]]:
    """Return (from, to) of the pulls: one way between two nodes, every node from every other one between more."""
    if nodes == 2:
        return [(0, 1)]
    return [(i, (i + step) % nodes) for step in range(1, nodes) for i in range(nodes)]


def logs_of(pairs: Sequence[Pair]) -> dict[str, Path]:
    """Return process -> log of an arm's pairs; the first pair's are ``target`` and ``initiator``."""
    return {f"{side} {p.number}" if p.number else side: log for p in pairs for side, log in p.logs.items()}


class Together:
    """Lets the pairs of an arm pull at once, each from a thread of its own; one pair alone needs none."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count)
        self._barrier = threading.Barrier(count)

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def pull(
        self, pairs: Sequence[Pair], case: Case, clock: Callable[[], float], *, verify: bool
    ) -> list[list[dict[str, object]]]:
        """Return each pair's rows; all wait for one another before they begin.  The first failure is raised."""
        if self._count == 1:
            return [pairs[0].pull(case, verify=verify, begin=clock)]

        def begin() -> float:
            self._barrier.wait(60)
            return clock()

        def one(pair: Pair) -> list[dict[str, object]]:
            try:
                return pair.pull(case, verify=verify, begin=begin)
            except BaseException:
                self._barrier.abort()  # the others do not wait for this one
                raise

        futures = [self._pool.submit(one, pair) for pair in pairs]
        wait(futures)
        errors = [e for f in futures if (e := f.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [f.result() for f in futures]
