"""What the measuring functions share: evidence into the run folder, progress, rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from kvlab.capture import counters, ucx
from kvlab.params import Arm
from kvlab.pull import Pair
from kvlab.runs import Run

T = TypeVar("T")


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """Go through ``items`` with a bar that shows the time left; silent where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return iter(items)
    return iter(tqdm(items, desc=what, leave=False, mininterval=0.5, file=_Cell.here()))


class _Cell:
    """A file for tqdm in a notebook: a line of output that changes, where stderr would look like an error."""

    encoding = "utf-8"

    def __init__(self, display: Any) -> None:
        self._line = display({"text/plain": ""}, raw=True, display_id=True)

    @classmethod
    def here(cls) -> _Cell | None:
        """Return one in a kernel, None (stderr) elsewhere."""
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        return cls(ipython.display.display) if ipython and hasattr(shell, "kernel") else None

    def write(self, text: str) -> None:
        """Show ``text``; its last line alone counts."""
        self._line.update({"text/plain": text.strip()}, raw=True)

    def flush(self) -> None:
        """Nothing waits."""


@contextmanager
def counted(
    run: Run, *, background_s: float = 0.5, look: Callable[[], counters.Snapshot] = counters.read
) -> Iterator[Callable[[str], AbstractContextManager[None]]]:
    """Read byte counters around every turn of every arm and write the table ``counters`` at the end.

    ``turn = stack.enter_context(counted(run))`` when the agents or engines are up and idle (it first watches
    the background), then ``with turn(arm.label):`` around whatever pulls.

    :param look: reads the counters; ``partial(counters.read, net="proc/PID/net/dev")`` in another network namespace
    """
    others = counters.background(background_s, look=look)
    turns: dict[str, list[tuple[counters.Snapshot, counters.Snapshot]]] = {}

    @contextmanager
    def turn(arm: str) -> Iterator[None]:
        before = look()
        try:
            yield
        finally:
            turns.setdefault(arm, []).append((before, look()))

    try:
        yield turn
    finally:
        rows = [row for arm, taken in turns.items() for row in counters.difference(taken, others, arm)]
        if rows:
            run.write("counters", pd.DataFrame(rows))


def record_evidence(
    run: Run,
    arms: Iterable[Arm],
    logs: Mapping[str, Mapping[str, Path]],
    *,
    descriptor_bytes: int,
    local: str | None = None,
    remote: str | None = None,
    descriptors: Mapping[str, int] | None = None,
) -> list[str]:
    """Read the UCX logs of every arm, write ``transports`` and ``verdicts``, and return contradictions.

    The pull's transport is decided by the reading side (``initiator``, the decode engine): its remote
    memory read table, in the row that covers ``descriptor_bytes``.

    :param logs: arm label -> process name -> log file; a reading side's name starts with ``initiator`` or ``decode``
    :param descriptors: arm label -> descriptors pulled in all; where UCX counted its selections the two
        are compared, which ties the table to this very traffic
    :returns: one line for each arm whose evidence contradicts its label; the run's outcome is then set
        to ``contradicted``
    """
    rows, verdicts, against = [], [], []
    for arm in arms:
        files = logs[arm.label]
        for process, path in files.items():
            evidence = ucx.read([path], descriptor_bytes=descriptor_bytes, local=local, remote=remote)
            rows.append(ucx.transport_rows(evidence, arm.label, process))
            if not process.startswith(("initiator", "decode")):
                continue
            pull = evidence.pull
            agrees = None
            if arm.expect and pull.transport is not None:
                agrees = ucx.agrees(pull.transport, arm.expect)
                if not agrees:
                    against.append(f"arm {arm.label!r} claims {arm.expect} and the payload went over {pull.verdict}")
            proof = ", ".join(f"{path.name}:{line}" for line in pull.lines[:3])
            counted = _selections(rows[-1])
            if counted and descriptors and arm.label in descriptors:
                proof += f"; UCX counted {counted:,} reads, NIXL {descriptors[arm.label]:,} descriptors"
            verdicts.append(
                {
                    "arm": arm.label,
                    "expected": arm.expect,
                    "transport": pull.transport,
                    "likely": pull.likely,
                    "devices": ", ".join(pull.devices),
                    "emulated": pull.emulated,
                    "agrees": agrees,
                    "verdict": pull.verdict,
                    "evidence": proof,
                }
            )
    run.write("transports", pd.concat(rows, ignore_index=True))
    run.write("verdicts", pd.DataFrame(verdicts))
    if against:
        run.update(outcome="contradicted", contradictions=against)
    return against


def _selections(rows: pd.DataFrame) -> int:
    """Sum of UCX's use counts over the rows that decide for the pull; 0 when it did not count."""
    if rows.empty:
        return 0
    counts = rows.loc[rows["decides"].fillna(False).astype(bool), "selections"]
    return int(counts.fillna(0).sum())


def relative_logs(run: Run, logs: Mapping[str, Path]) -> dict[str, str]:
    """Return log paths relative to the run folder, for the manifest."""
    return {k: str(v.relative_to(run.path)) for k, v in logs.items()}


def describe(run: Run, pairs: Mapping[str, Pair]) -> None:
    """Put each arm's resolved options, logs and NIXL version into the manifest."""
    run.update(
        resolved={label: as_parameters(pair.options) for label, pair in pairs.items()},
        logs={label: relative_logs(run, pair.logs) for label, pair in pairs.items()},
        versions_of_agents=next(iter(pairs.values())).versions,
    )


def as_parameters(model: Any) -> dict[str, Any]:
    """Return a dataclass of resolved options as plain data for the manifest."""
    return dict(vars(model))


def limit_rows(pair: Pair, size: int, repetition: int, memory: str) -> list[dict[str, object]]:
    """Measure a plain copy and a plain TCP socket of ``size`` bytes: rows of table ``limits``."""
    copy = "memory copy" if memory == "DRAM" else "device copy"
    seconds = {copy: pair.copy_limit(size), "plain TCP socket": pair.socket_limit(size)}
    return [
        {
            "name": name,
            "kind": "memory" if name == copy else "socket",
            "bytes": size,
            "seconds": s,
            "gb_per_s": size / s / 1e9,
            "repetition": repetition,
        }
        for name, s in seconds.items()
    ]
