"""Byte counters of RDMA ports, network interfaces and NVLink: what moved, by somebody who is not UCX.

Traps that this module knows (the kernel's Documentation/ABI/stable/sysfs-class-infiniband, nvml.h):

- an RDMA port counts *words of 4 bytes* (``port_rcv_data``, ``PortRcvData``), on any lane count; everybody
  else counts bytes, NVLink KiB;
- the legacy 32-bit port counter stops at 2^32-1 (17 GB); a difference against it says nothing;
- a port without a performance agent reads ``N/A (no PMA)``; some RoCE drivers leave the port counters at 0
  for ever, and ``hw_counters`` or ``ethtool -S`` of the paired interface count instead.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.capture.machine import run, text

WORD = 4
SATURATED = (1 << 32) - 1
Key = tuple[str, str, str]  # device, kind, counter


class Count(NamedTuple):
    """One counter: its value (None: not readable), bytes a unit, and 32 bits where it may be a legacy one."""

    value: int | None
    unit: int = 1
    bits: int = 64
    note: str = ""


class Snapshot(NamedTuple):
    """All counters at one time of the monotonic clock."""

    seconds: float
    counts: dict[Key, Count]


class Background(NamedTuple):
    """Traffic of others: seconds watched; per counter bytes a second, and variance of bytes in a second."""

    seconds: float
    rates: dict[Key, tuple[float, float]]


def _whole(number: str) -> int | None:
    return int(number, 0) if re.fullmatch(r"\d{1,30}|0x[0-9a-fA-F]{1,16}", number) else None


def read(root: Path = Path("/"), net: str = "proc/net/dev", nvlink: bool = True) -> Snapshot:
    """Read every counter of this machine, about 0.1 ms without RDMA.

    :param root: where ``sys`` and ``proc`` are
    :param net: the interface counters; ``proc/PID/net/dev`` gives those of another network namespace
    """
    counts: dict[Key, Count] = {}
    for line in text(root / net).splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        if len(fields) > 8 and fields[0].isdigit() and fields[8].isdigit():
            counts[name.strip(), "interface", "rx_bytes"] = Count(int(fields[0]))
            counts[name.strip(), "interface", "tx_bytes"] = Count(int(fields[8]))
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        counts |= _port(port)
    return Snapshot(time.monotonic(), counts | (_nvlink() if nvlink else {}))


def _port(port: Path) -> dict[Key, Count]:
    device = f"{port.parent.parent.name}:{port.name}"
    found: dict[Key, Count] = {}
    for name in ("port_rcv_data", "port_xmit_data"):
        # Kernels before 4.5 kept the 64-bit counters apart.
        wide, value = text(port / "counters_ext" / f"{name}_64"), text(port / "counters" / name)
        if wide or value:
            number = _whole(wide or value)
            note = "" if number is not None else f"the port says {wide or value!r}"
            bits = 64 if wide or (number or 0) > SATURATED else 32
            found[device, "RDMA port", name] = Count(number, WORD, bits, note)
    if any(c.value for c in found.values()):
        return found
    for folder in (port / "hw_counters", port.parent.parent / "hw_counters"):
        for path in sorted(folder.glob("*")):
            if re.search(r"bytes|octets", path.name, re.IGNORECASE) and (number := _whole(text(path))) is not None:
                found[device, "RDMA hw_counters", path.name] = Count(number)
    if "ACTIVE" in text(port / "state"):
        for path in sorted((port.parent.parent / "device/net").glob("*")):
            for name, number in _ETHTOOL.findall(run(["ethtool", "-S", path.name])):
                found[path.name, "ethtool", name] = Count(int(number))
    return found


#: RDMA alone (mlx5), and the whole physical port
_ETHTOOL = re.compile(r"^\s*((?:rx|tx)_(?:vport_rdma_unicast_bytes|bytes_phy)): (\d+)\s*$", re.MULTILINE)


@functools.cache
def _gpus() -> tuple[Any, list[Any]]:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        return nvml, [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    except Exception:  # pynvml missing, no driver, no permission: each has its own class
        return None, []


def _nvlink() -> dict[Key, Count]:
    """Read NVLink's payload counters of all links of every GPU, in the driver's KiB or bytes."""
    nvml, handles = _gpus()
    found: dict[Key, Count] = {}
    for i, handle in enumerate(handles):
        # Scope 2^32-1 is the sum over links; newer GPUs count bytes a link instead (nvml.h).
        for names, unit, scopes in (
            ("THROUGHPUT_DATA_RX THROUGHPUT_DATA_TX", 1024, [SATURATED]),
            ("COUNT_RCV_BYTES COUNT_XMIT_BYTES", 1, range(18)),
        ):
            for name, label in zip(names.split(), ("rx_bytes", "tx_bytes"), strict=True):
                with contextlib.suppress(Exception):  # a field that this driver does not know
                    field = getattr(nvml, f"NVML_FI_DEV_NVLINK_{name}")
                    values = nvml.nvmlDeviceGetFieldValues(handle, [(field, s) for s in scopes])
                    good = [int(v.value.ullVal) for v in values if v.nvmlReturn == 0]
                    if good:
                        found.setdefault((f"gpu{i}", "NVLink", label), Count(sum(good), unit))
    return found


def background(seconds: float = 0.5, steps: int = 5, look: Callable[[], Snapshot] = read) -> Background:
    """Watch the counters while nothing of the run moves, in ``steps`` equal parts, for rate and variance."""
    shots = [look()]
    for _ in range(steps):
        time.sleep(seconds / steps)
        shots.append(look())
    rates = {}
    part = (shots[-1].seconds - shots[0].seconds) / steps or 1e-9
    for key in shots[0].counts:
        deltas = [_delta(a.counts[key], b.counts.get(key))[0] for a, b in pairwise(shots)]
        known = [d for d in deltas if d is not None]
        if len(known) == steps:
            rates[key] = (statistics.fmean(known) / part, statistics.variance(known) / part)
    return Background(part * steps, rates)


def _delta(before: Count, after: Count | None) -> tuple[float | None, str]:
    """Return bytes between two readings and what is wrong with them; None where they say nothing."""
    if after is None:
        return None, "gone after the run"
    if before.value is None or after.value is None:
        return None, before.note or after.note
    if 32 in (before.bits, after.bits) and SATURATED in (before.value, after.value):
        return None, "stuck at 2^32-1 (legacy 32-bit counter): read 64 bits (perfquery -x)"
    step = after.value - before.value
    if step >= 0:
        return float(step * before.unit), ""
    for bits in {before.bits, 64}:
        # From the upper half to the lower one: a wrap.  Anything else: somebody set it back.
        if before.value >> (bits - 1) == 1 and after.value >> (bits - 1) == 0:
            return float((step + (1 << bits)) * before.unit), f"wrapped at 2^{bits}, once as it seems"
    return None, f"set back during the run (from {before.value:,} to {after.value:,})"


def difference(
    turns: Sequence[tuple[Snapshot, Snapshot]], others: Background | None = None, arm: str = ""
) -> list[dict[str, Any]]:
    """Return rows of the table ``counters``: bytes counted in an arm's turns, and what others would add.

    Background: rate x time; its uncertainty is one standard deviation of a future sum,
    sqrt(variance a second x time x (1 + time / time watched)).  A counter that says nothing has
    ``usable`` False, no ``delta_bytes`` and a reason; an RDMA counter that never moved is one of those.
    """
    if not turns:
        return []
    spent = sum(after.seconds - before.seconds for before, after in turns)
    rows = []
    for key in dict.fromkeys(k for before, after in turns for k in (*before.counts, *after.counts)):
        first, last = turns[0][0].counts.get(key), turns[-1][1].counts.get(key)
        if last is None and key[1] in ("RDMA hw_counters", "ethtool"):
            continue  # read only as long as the port's own counters show nothing
        if key[1] == "interface" and first and last and first.value == last.value == 0:
            continue  # an interface that nobody ever used
        parts = [_delta(b.counts[key], a.counts.get(key)) for b, a in turns if key in b.counts]
        notes = list(dict.fromkeys(note for _, note in parts if note))
        total: float | None = None
        if first is None:
            notes.append("not there before the run")
        elif all(d is not None for d, _ in parts) and len(parts) == len(turns):
            total = sum(d for d, _ in parts if d is not None)
        if total == 0 and key[1].startswith("RDMA") and last is not None and last.value == 0:
            total = None
            notes.append("never moved: not usable on this driver, or no RDMA since boot; the counter cannot tell which")
        ends = [c.value * c.unit if c and c.value is not None else None for c in (first, last)]
        expected, unsure = None, None
        if others and key in others.rates:
            rate, variance = others.rates[key]
            expected, unsure = rate * spent, math.sqrt(variance * spent * (1 + spent / others.seconds))
        rows.append({
            "arm": arm, "device": key[0], "kind": key[1], "counter": key[2], "before_bytes": ends[0],
            "after_bytes": ends[1], "delta_bytes": total, "background_bytes": expected,
            "background_uncertainty_bytes": unsure, "usable": total is not None, "note": "; ".join(notes),
        })  # fmt: skip
    return rows
