"""post-vs-completion: pull a model's KV at several prompt lengths over each arm's transport.

All pairs of agents live through the whole run and take turns, arm by arm in a new random order in every
round, so that a drift of the machine falls on all arms alike.  Idle pairs wait on a socket.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pandas as pd

from kvlab import kv_layout
from kvlab.measures.common import counted, describe, limit_rows, progress, record_evidence
from kvlab.params import PostVsCompletion
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
    check_memory(params.in_flight * largest, len(params.arms), params.memory)
    rows, limits = Rows(run, "pulls"), []
    rng = np.random.default_rng(params.seed)
    with contextlib.ExitStack() as stack:
        pairs = {
            arm.label: stack.enter_context(
                Pair(arm, Options.of(params, arm), all_cases, run.logs, slots=params.in_flight)
            )
            for arm in params.arms
        }
        describe(run, pairs)
        stack.callback(rows.flush)
        turn = stack.enter_context(counted(run))
        for repetition in progress(range(-params.warmup, params.repetitions), "rounds"):
            if params.limits and repetition >= 0:
                limits += limit_rows(next(iter(pairs.values())), largest, repetition, params.memory)
            for case in all_cases:
                for number in rng.permutation(len(params.arms)):
                    pair = pairs[params.arms[number].label]
                    start = run.elapsed_s()
                    # The first round is checked byte by byte; checking heats the caches, so it is warm-up.
                    first = repetition == -params.warmup
                    with turn(pair.arm.label):
                        pulled = pair.pull(case, verify=first)
                    rows.add(
                        {**row, "start_s": start, "repetition": repetition, "warmup": repetition < 0} for row in pulled
                    )
        if limits:
            run.write("limits", pd.DataFrame(limits))
    frame = pd.DataFrame(rows.rows)
    place = "cuda" if params.memory == "VRAM" else "host"
    record_evidence(
        run,
        params.arms,
        {label: pair.logs for label, pair in pairs.items()},
        descriptor_bytes=all_cases[0].descriptor_bytes,
        local=place,
        remote=place,
        descriptors={str(k): int(n) for k, n in frame.groupby("arm")["descriptors"].sum().items()},
    )
