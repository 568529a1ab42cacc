"""descriptor-shape: equal bytes, cut into descriptors of many sizes, over each arm's transport.

Cells take turns in a new random order every round, so that a drift of the machine falls on all alike.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pandas as pd

from kvlab.errors import BadInput
from kvlab.measures.common import describe, limit_rows, progress, record_evidence
from kvlab.params import DescriptorShape
from kvlab.pull import Case, Options, Pair, Rows, check_memory
from kvlab.runs import Run


def size_text(size: int) -> str:
    """Write a size in binary units: 128 KiB, 1.5 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def cases(params: DescriptorShape) -> list[Case]:
    """Return every descriptor list to pull; sizes are cut to multiples of 8 bytes, counts rounded up."""
    made = []
    for total in params.pull_bytes:
        sizes = [s for s in params.descriptor_bytes if s <= total]
        if params.whole and total not in sizes:
            sizes.append(total)
        for size in sizes:
            if size % 8:
                raise BadInput(f"descriptor_bytes: {size} is not a multiple of 8, which the content check needs")
            count = -(-total // size)
            name = f"{size_text(total)} in {count:,} x {size_text(size)}"
            made.append(Case(name, ((count, size),), in_flight=params.in_flight))
            if total != params.pull_bytes[0] or size not in params.varied_descriptor_bytes:
                continue
            if params.contiguous:
                made.append(replace(made[-1], name=f"{name}, contiguous", shape="contiguous"))
            base = Case(name, ((count, size),), in_flight=params.in_flight)
            made += [
                replace(base, name=f"{name}, {n} in flight", in_flight=n)
                for n in params.varied_in_flight
                if n != params.in_flight
            ]
            made += [
                replace(base, name=f"{name}, poll every {ms:g} ms", poll_interval_ms=ms)
                for ms in params.varied_poll_interval_ms
                if ms != params.poll_interval_ms
            ]
    if params.shape == "contiguous":
        made = [replace(c, shape="contiguous") for c in made]
    return made


def measure(params: DescriptorShape, run: Run) -> None:
    """Fill ``pulls``, ``limits``, ``transports`` and ``verdicts``; a cell that fails is a row of ``cells``."""
    todo = cases(params)
    largest = max((c.in_flight or 1) * c.bytes for c in todo)
    check_memory(largest, len(params.arms), params.memory)
    rows, limits, notes = Rows(run, "pulls"), [], []
    spent: dict[tuple[str, str], float] = defaultdict(float)
    slowness: dict[tuple[str, int], float] = defaultdict(float)
    skipped: dict[tuple[str, str], float] = {}
    rng = np.random.default_rng(params.seed)
    with contextlib.ExitStack() as stack:
        pairs = {
            arm.label: stack.enter_context(Pair(arm, Options.of(params, arm), todo, run.logs)) for arm in params.arms
        }
        describe(run, pairs)
        stack.callback(rows.flush)
        cells = [(label, case) for label in pairs for case in todo]
        for repetition in progress(range(-params.warmup, params.repetitions), "rounds"):
            if params.limits and repetition >= 0:
                for total in params.pull_bytes:
                    limits += limit_rows(next(iter(pairs.values())), total, repetition, params.memory)
            order = rng.permutation(len(cells))
            if repetition == -params.warmup:  # small ones first: they tell how long the large ones would take
                order = np.array(sorted(order, key=lambda i: cells[i][1].bytes * (cells[i][1].in_flight or 1)))
            for number in order:
                label, case = cells[number]
                if (label, case.name) in skipped or (spent[label, case.name] > params.cell_limit_s and repetition > 0):
                    continue
                size = case.bytes * (case.in_flight or 1)
                if repetition == -params.warmup:
                    # As slow a byte as at this descriptor size so far, once for each warm-up round and once to count.
                    expected = (params.warmup + 1) * size * slowness[label, case.descriptor_bytes]
                    if expected > params.cell_limit_s:
                        skipped[label, case.name] = expected
                        continue
                start = run.elapsed_s()
                rows.add(
                    {**row, "start_s": start, "repetition": repetition, "warmup": repetition < 0}
                    for row in pairs[label].pull(case, verify=repetition == -params.warmup)
                )
                spent[label, case.name] += run.elapsed_s() - start
                at = label, case.descriptor_bytes
                slowness[at] = max(slowness[at], rows.rows[-1]["xfer_us"] / 1e6 / size)
        if limits:
            run.write("limits", pd.DataFrame(limits))
    frame = pd.DataFrame(rows.rows)
    done = frame[~frame["warmup"]].groupby(["arm", "case"])["repetition"].nunique().reset_index()
    for arm, case, n in zip(done["arm"], done["case"], done["repetition"], strict=True):
        short = n < params.repetitions
        note = f"stopped after {params.cell_limit_s:g} s (cell_limit_s)" if short else ""
        row = {"arm": arm, "case": case, "outcome": "cut short" if short else "completed"}
        notes.append({**row, "quantity": "repetitions", "value": float(n), "unit": "", "note": note})
    for (arm, case), expected in skipped.items():
        note = f"{params.warmup + 1} pulls would take about {expected:.0f} s, more than cell_limit_s"
        row = {"arm": arm, "case": case, "outcome": "skipped", "quantity": "repetitions"}
        notes.append({**row, "value": 0.0, "unit": "", "note": note})
    run.write("cells", pd.DataFrame(notes))
    place = "cuda" if params.memory == "VRAM" else "host"
    record_evidence(
        run,
        params.arms,
        {label: pair.logs for label, pair in pairs.items()},
        # The protocol's row may change with the size: asked for is the middle one of the sizes pulled.
        descriptor_bytes=sorted(c.descriptor_bytes for c in todo)[len(todo) // 2],
        local=place,
        remote=place,
    )
