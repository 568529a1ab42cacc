"""NIXL's telemetry ring: the times and bytes of every single transfer, from an unpatched engine.

With ``NIXL_TELEMETRY_ENABLE`` and ``NIXL_TELEMETRY_DIR`` set, each NIXL agent writes a memory-mapped file
named after itself: a header, then ``capacity`` events in a ring.  One finished READ is four events in a row:
post time, transfer time (post included), received bytes, received requests.  There is no transfer id, no
descriptor count and (from version 2 on) no time stamp, so a pull is known by the order of its events and its
time by when it was read.

Layouts, from NIXL's ``cyclic_buffer.h`` and ``telemetry_event.h`` and from rings written by the wheels:

=========  =============  =========================================  ==========
version    bytes / event  event                                      seen in
=========  =============  =========================================  ==========
1          56             time, category, name[32], value            1.0.1
2          48             category, name[32], value                  1.1.0
2          16             category, type (1 or 4 bytes), value       1.2.0
3, 4       16             type, 4 bytes of garbage, value            1.3.1; 1.4.1, 1.5.1
=========  =============  =========================================  ==========

The size of an event is (file size - header) / capacity.  The header has 40 bytes; later sources (in no wheel
yet) give it 512 with the read position at 256.  The writer never overwrites: with the ring full it drops
events without a sign until the one reader moves the read position.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvlab.errors import BadInput

TX_BYTES, RX_BYTES, TX_REQUESTS, RX_REQUESTS, XFER_TIME, POST_TIME = 0, 1, 2, 3, 6, 7
UNKNOWN = -1
#: the producer says how many events its staging queue dropped (version 4; later versions renumber it)
DROPPED = 20
#: at which interval engines write to their rings: bounds how well a pull's time is known
FLUSH_S = 0.01
_NAMES = [f"agent_{name}" for name in (
    "tx_bytes", "rx_bytes", "tx_requests_num", "rx_requests_num", "memory_registered", "memory_deregistered",
    "xfer_time", "xfer_post_time", "err_not_posted", "err_invalid_param", "err_backend", "err_not_found",
    "err_mismatch", "err_not_allowed", "err_repost_active", "err_unknown", "err_not_supported",
    "err_remote_disconnect", "err_canceled", "err_no_telemetry", "telemetry_events_dropped",
)]  # fmt: skip
TYPE_OF = {name: number for number, name in enumerate(_NAMES)}
_NAME = [("name", "S32"), ("pad", "V4"), ("value", "<u8")]
_LAYOUTS: dict[tuple[int, int], np.dtype[Any]] = {
    (1, 56): np.dtype([("time_us", "<u8"), ("category", "<i4"), *_NAME]),
    (2, 48): np.dtype([("category", "<i4"), *_NAME]),
    (2, 16): np.dtype([("category", "<i4"), ("type", "u1"), ("pad", "V3"), ("value", "<u8")]),
}
_PLAIN = np.dtype([("type", "<u4"), ("pad", "V4"), ("value", "<u8")])


def environment(directory: Path | str, buffer_size: int = 65536) -> dict[str, str]:
    """Return the environment that makes a NIXL process write its rings into ``directory``.

    ``buffer_size`` events (a power of two, NIXL refuses others) bound both the ring and the writer's staging queue.
    """
    if buffer_size < 16 or buffer_size & (buffer_size - 1):
        raise BadInput(f"NIXL_TELEMETRY_BUFFER_SIZE {buffer_size}: NIXL wants a power of two, 16 or more")
    return {
        "NIXL_TELEMETRY_ENABLE": "y",
        "NIXL_TELEMETRY_DIR": str(directory),
        "NIXL_TELEMETRY_EXPORTER": "BUFFER",
        "NIXL_TELEMETRY_BUFFER_SIZE": str(buffer_size),
        "NIXL_TELEMETRY_RUN_INTERVAL": str(round(FLUSH_S * 1e3)),
    }


class Batch(NamedTuple):
    """Events in the order written: ``types`` (int64, ``UNKNOWN`` for a strange name) and ``values``.

    ``gap_before`` and ``gap_after`` say in words why events may be missing there; None: none are.
    """

    types: NDArray[np.int64]
    values: NDArray[np.uint64]
    gap_before: str | None = None
    gap_after: str | None = None


class Ring:
    """One ring file, open.

    ``owner=True`` consumes: it moves the read position, and must be the only one that does (a lock on the
    file keeps a second kvlab away).  ``owner=False`` only looks at what is there.  Raises BadInput when the file
    is no ring, or not one yet (try again: a writer makes the file before its header).
    """

    def __init__(self, path: Path | str, owner: bool = False):
        self.path, self.owner = Path(path), owner
        self._view: memoryview | None = None
        try:
            self._file = os.open(self.path, (os.O_RDWR if owner else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise BadInput(f"{self.path}: {error.strerror}") from None
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        size = os.fstat(self._file).st_size
        head = os.pread(self._file, 512, 0)
        if len(head) < 40:
            raise BadInput(f"{self.path}: {size} bytes are too few for a NIXL telemetry ring")
        self.version: int = struct.unpack_from("<i", head, 16)[0]
        classic = (40, 1, 4, *struct.unpack_from("<QQ", head, 24))
        later = (512, 32, 3, *struct.unpack_from("<Q8xQ", head, 8))
        for header, slot, mask_slot, capacity, mask in (classic, later):
            if capacity and capacity & (capacity - 1) == 0 and mask == capacity - 1 and size > header:
                self._header, self.capacity, self._mask = header, capacity, mask
                self._read_slot, self._mask_slot = slot, mask_slot  # in 8-byte words
                break
        else:
            raise BadInput(f"{self.path}: no header of a NIXL telemetry ring")
        self.event_bytes, rest = divmod(size - self._header, self.capacity)
        layout = _LAYOUTS.get((self.version, self.event_bytes))
        if layout is None and self.version >= 3 and self.event_bytes == _PLAIN.itemsize:
            layout = _PLAIN
        if layout is None or rest:
            what = f"telemetry version {self.version} with {self.event_bytes} bytes an event"
            raise BadInput(f"{self.path}: {what} is a layout this kvlab does not know")
        self._layout = layout
        if self.owner:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BadInput(f"{self.path}: another kvlab already consumes this ring") from None
        # Only the header is mapped: copying the events by pread cannot be killed by a file that shrinks.
        access = mmap.ACCESS_WRITE if self.owner else mmap.ACCESS_READ
        self._map = mmap.mmap(self._file, self._header, access=access)
        self._view = memoryview(self._map).cast("Q")  # native 8-byte words: one aligned load or store each
        self._at = self._view[self._read_slot] & self._mask

    def read(self) -> Batch:
        """Copy the events that wait in the ring, and as the owner make room for more.

        The order matters: load the write position, copy, look whether the writer ran out of room meanwhile,
        and only then publish the read position with one aligned store.
        """
        assert self._view is not None, "the ring is closed"
        if self._view[self._mask_slot] != self._mask:
            raise BadInput(f"{self.path}: its writer restarted with a ring of another size")
        write, read = self._view[0] & self._mask, self._view[self._read_slot] & self._mask
        before = after = None
        if self.owner and read != self._at:
            before = "the read position was moved by its writer's restart or another reader"
        count = (write - read) & self._mask
        raw = self._copy(read, count)
        later = self._view[0] & self._mask
        if (later - read) & self._mask == self._mask:
            after = f"the ring was full ({self._mask} events): what came next was dropped without a sign"
        if not self.owner and ((later - write) & self._mask) >= self.capacity - count:
            before = "the writer came round while the events were copied"
            raw = raw[:0]
        self._at = write
        if self.owner and count and self._view[self._read_slot] & self._mask == read:
            self._view[self._read_slot] = write
        return Batch(self._types(raw), raw["value"].astype(np.uint64), before, after)

    def _copy(self, start: int, count: int) -> NDArray[Any]:
        first = min(count, self.capacity - start)
        data = b"".join(
            os.pread(self._file, n * self.event_bytes, self._header + at * self.event_bytes)
            for at, n in ((start, first), (0, count - first))
            if n
        )
        if len(data) != count * self.event_bytes:
            raise BadInput(f"{self.path}: the ring was cut short while it was read")
        return np.frombuffer(data, self._layout)

    def _types(self, raw: NDArray[Any]) -> NDArray[np.int64]:
        if "type" in (self._layout.names or ()):
            return raw["type"].astype(np.int64)
        names, inverse = np.unique(raw["name"], return_inverse=True)
        known = [TYPE_OF.get(n.decode("ascii", "replace"), UNKNOWN) for n in names]
        return np.array(known, np.int64)[inverse] if len(known) else np.empty(0, np.int64)

    def close(self) -> None:
        """Let go of the file; the file itself stays."""
        if self._view is not None:
            self._view.release()
            self._map.close()
            self._view = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class Grouper:
    """Puts the four events of a transfer together, by order alone and never across a gap.

    Other kinds of events may stand between.  What does not make a whole group is counted in ``incomplete``
    (events), and so is a group whose post is longer than its transfer: those two cannot belong together.
    """

    dropped: int = 0
    incomplete: int = 0
    others: Counter[int] = field(default_factory=Counter)
    _types: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _values: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def feed(
        self, types: NDArray[np.int64], values: NDArray[np.uint64], version: int = 4
    ) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        """Take events; return whole transfers, n x (post_us, xfer_us, bytes, requests), and which are reads."""
        wanted = (types >= 0) & (types <= POST_TIME) & (types != 4) & (types != 5)
        if not wanted.all():
            for number, count in zip(*np.unique(types[~wanted], return_counts=True), strict=True):
                self.others[int(number)] += int(count)
            if version == 4:
                self.dropped += int(values[types == DROPPED].sum())
        t = np.concatenate([self._types, types[wanted]])
        v = np.concatenate([self._values, values[wanted]])
        starts = np.flatnonzero(t[: max(len(t) - 3, 0)] == POST_TIME)
        kind = t[starts + 2]
        whole = (t[starts + 1] == XFER_TIME) & (kind <= RX_BYTES) & (t[starts + 3] == kind + 2)
        starts, kind = starts[whole], kind[whole]
        rows = v[starts[:, None] + np.arange(4)]
        sane = rows[:, 0] <= rows[:, 1]
        # The tail may be the beginning of a transfer whose other events are still to come.
        end = int(starts[-1]) + 4 if len(starts) else 0
        posts = np.flatnonzero(t[end:] == POST_TIME)
        keep = end + int(posts[-1]) if len(posts) and len(t) - end - int(posts[-1]) < 4 else len(t)
        self.incomplete += keep - 4 * int(sane.sum())
        self._types, self._values = t[keep:], v[keep:]
        return rows[sane], kind[sane] == RX_BYTES

    def gap(self) -> None:
        """Forget a transfer that is not whole yet: its other events may be among the missing ones."""
        self.incomplete += len(self._types)
        self._types, self._values = self._types[:0], self._values[:0]


#: transfers of one read: ring, n x (post_us, xfer_us, bytes, requests), which are READs, and the times (seconds)
#: between which they ended
_Part = tuple[str, NDArray[np.uint64], NDArray[np.bool_], float, float]


def _frame(parts: list[_Part]) -> pd.DataFrame:
    """Return one row a transfer."""
    sizes = [len(part[1]) for part in parts]
    rows = np.concatenate([np.empty((0, 4), np.uint64), *(part[1] for part in parts)])
    reads = np.concatenate([np.empty(0, np.bool_), *(part[2] for part in parts)])
    first, last = (np.repeat(np.array([part[i] for part in parts], float), sizes) for i in (3, 4))
    return pd.DataFrame(
        {
            "ring": np.repeat(np.array([part[0] for part in parts], object), sizes),
            "operation": np.where(reads, "READ", "WRITE"),
            "post_us": rows[:, 0].astype(float),
            "xfer_us": rows[:, 1].astype(float),
            "bytes": rows[:, 2].astype(np.int64),
            "requests": rows[:, 3].astype(np.int64),
            "start_s": (first + last) / 2 - rows[:, 1].astype(float) * 1e-6,
            "start_uncertainty_s": (last - first) / 2,
        }
    )


def read_ring(path: Path | str) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Look once at a ring (a foreign one, or one whose process has ended), changing nothing.

    Returns the transfers, without times, and the report that :meth:`Follower.report` gives.
    """
    with Ring(path) as ring:
        state = _Followed(ring)
        rows, reads = state.read()
        return _frame([(ring.path.name, rows, reads, np.nan, np.nan)]), state.report()


_NOTHING = np.empty((0, 4), np.uint64), np.empty(0, np.bool_)


class _Followed:
    """One ring, its grouper, and what went wrong with it."""

    def __init__(self, ring: Ring):
        self.ring, self.grouper, self.seen_s, self.alive = ring, Grouper(), np.nan, True
        self.reads = self.writes = self.bytes = 0
        self.gaps: Counter[str] = Counter()

    def read(self) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
        batch = self.ring.read()
        if batch.gap_before:
            self.gaps[batch.gap_before] += 1
            self.grouper.gap()
        if not len(batch.types) and not batch.gap_after:
            return _NOTHING
        rows, reads = self.grouper.feed(batch.types, batch.values, self.ring.version)
        if batch.gap_after:
            self.gaps[batch.gap_after] += 1
            self.grouper.gap()
        self.reads += int(reads.sum())
        self.writes += int((~reads).sum())
        self.bytes += int(rows[reads, 2].sum())
        return rows, reads

    def report(self) -> dict[str, Any]:
        others = self.grouper.others
        return {
            **{"ring": self.ring.path.name, "version": self.ring.version, "capacity": self.ring.capacity},
            **{"reads": self.reads, "writes": self.writes, "bytes": self.bytes},
            "incomplete_events": self.grouper.incomplete + len(self.grouper._types),
            "dropped_events": self.grouper.dropped,
            "errors": {_NAMES[k]: n for k, n in sorted(others.items()) if 8 <= k < DROPPED},
            "drops_are_told": self.ring.version == 4,
            "gaps": dict(self.gaps),
        }


class Follower:
    """Follows, in a thread, every ring that appears in a directory which only kvlab's engines write to.

    Use it as a context manager; leaving it reads once more, so leave it after the engines have ended.
    ``began_s`` (by ``time.monotonic``, which no setting of the clock moves) is the zero of ``start_s``.
    """

    def __init__(self, directory: Path | str, began_s: float | None = None, poll_s: float = 0.02):
        self.directory = Path(directory)
        self.began_s = time.monotonic() if began_s is None else began_s
        self._poll_s = poll_s
        self._rings: dict[str, _Followed] = {}
        self._not_ready: dict[str, str] = {}
        self._parts: list[_Part] = []
        self._taken = 0
        self._scan_s = np.nan  # before the first look no lower bound is known
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlab-rings", daemon=True)

    def __enter__(self) -> Follower:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the thread, read what is left, and let go of the files."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._look()
        for state in self._rings.values():
            state.alive = False
            state.ring.close()

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            self._look()

    def _look(self) -> None:
        with self._lock:
            now = time.monotonic() - self.began_s
            if not now - self._scan_s < 0.1 or self._stop.is_set():  # a look for new files costs more than a read
                self._scan(now)
            for name, state in self._rings.items():
                if state.alive:
                    try:
                        rows, reads = state.read()
                    except (BadInput, OSError) as problem:
                        state.gaps[str(problem)] += 1
                        state.alive = False
                        continue
                    if len(rows):
                        ended = state.seen_s - FLUSH_S, time.monotonic() - self.began_s
                        self._parts.append((name, rows, reads, *ended))
                    state.seen_s = now

    def _scan(self, now: float) -> None:
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        for name in names:
            if name not in self._rings:
                try:
                    self._rings[name] = _Followed(Ring(self.directory / name, owner=True))
                    self._rings[name].seen_s = self._scan_s
                    self._not_ready.pop(name, None)
                except BadInput as problem:  # made a moment ago, or no ring at all: tried again
                    self._not_ready[name] = str(problem)
        self._scan_s = now

    @staticmethod
    def nothing() -> pd.DataFrame:
        """Return no transfers, with all columns."""
        return _frame([])

    def take(self) -> pd.DataFrame:
        """Return the transfers since the last ``take``: ring, operation, post_us, xfer_us, bytes, requests, start_s and
        its uncertainty (both NaN for a ring that was there before the follower).
        """
        with self._lock:
            parts, self._taken = self._parts[self._taken :], len(self._parts)
            return _frame(parts)

    def report(self) -> list[dict[str, Any]]:
        """Return, for each ring, what was read and everything that speaks for loss (see ``losses``)."""
        with self._lock:
            return [state.report() for state in self._rings.values()]

    def losses(self) -> list[str]:
        """Return one sentence for each sign that transfers are missing; empty: none is."""
        with self._lock:
            unread = [f"{problem} (never read)" for problem in self._not_ready.values()]
        return unread + losses(self.report())


def losses(reports: Iterable[dict[str, Any]]) -> list[str]:
    """Say, for reports of :meth:`Follower.report` or :func:`read_ring`, what may be missing and why."""
    said = []
    for r in reports:
        said += [f"ring {r['ring']}: {gap} ({n} times)" for gap, n in r["gaps"].items()]
        if r["dropped_events"]:
            said.append(f"ring {r['ring']}: its writer dropped {r['dropped_events']} events before the ring")
        if r["incomplete_events"]:
            said.append(f"ring {r['ring']}: {r['incomplete_events']} events belong to no whole transfer")
    return said
