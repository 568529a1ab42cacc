"""What carried the pull: the decision from the tables that were read, and what weaker signs make likely.

Only remote memory read tables decide, in the row that covers the descriptors.  Where they disagree nothing is
picked; where there is none, a lane list or the allowed set may make a transport *likely*, with its reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvlab.capture.ucx import Evidence, Row, Table

#: a descriptor size that stands for KV blocks when nothing in the log tells (tens to hundreds of KiB)
ASSUMED_BYTES = 128 * 1024
#: transports that only copy between memories of one process
COPIES = ("cuda_copy", "gdr_copy", "rocm_copy", "ze_copy")
_RDMA = ("rc_mlx5", "rc_verbs", "dc_mlx5", "ud_mlx5", "ud_verbs", "rc_gda", "srd")
_SHARED = ("cma", "sysv", "posix", "knem", "xpmem")
#: what a person may write for a transport -> the names that UCX prints
ALIASES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ib", "rdma", "roce", "infiniband", "verbs"), _RDMA),
    "rc": ("rc_mlx5", "rc_verbs", "rc_gda"),
    "rc_x": ("rc_mlx5",),
    "rc_v": ("rc_verbs",),
    **dict.fromkeys(("dc", "dc_x"), ("dc_mlx5",)),
    "ud": ("ud_mlx5", "ud_verbs"),
    "ud_x": ("ud_mlx5",),
    "ud_v": ("ud_verbs",),
    "efa": ("srd",),
    **dict.fromkeys(("sm", "shm", "shared memory", "shared-memory", "shared_memory"), _SHARED),
    "mm": ("sysv", "posix", "xpmem"),
    **dict.fromkeys(("nvlink", "cuda-ipc", "cuda ipc"), ("cuda_ipc",)),
    **dict.fromkeys(("xgmi", "rocm-ipc"), ("rocm_ipc",)),
}
#: names as UCX prints them
KNOWN_TRANSPORTS = {*_RDMA, *_SHARED, *COPIES, "tcp", "self", "cuda_ipc", "rocm_ipc", "ze_ipc"}
_QUOTED = re.compile(r"'([\w-]+)'")


@dataclass
class Pull:
    """What is known of the transport of the pull; ``transport`` and ``emulated`` None: not determined."""

    transport: str | None = None
    likely: str | None = None
    devices: list[str] = field(default_factory=list)
    paths: int | None = None
    emulated: bool | None = None
    staged: bool | None = None
    estimate: bool | None = None
    verdict: str = ""
    lines: list[int] = field(default_factory=list)


def known_transport(name: str) -> bool:
    """Tell whether ``name`` is a transport or an alias that :func:`agrees` knows."""
    return name.strip().lower() in ALIASES or name.strip().lower() in KNOWN_TRANSPORTS


def agrees(transport: str | None, expected: str) -> bool:
    """Tell whether the transport that was found is what was expected; aliases as in ``ALIASES``.

    A payload over several transports (``knem+rc_mlx5``) agrees when every one of them does.
    """
    if not transport:
        return False
    wanted = {n for e in expected.lower().split(",") for n in ALIASES.get(e.strip(), (e.strip(),))}
    return all(t in wanted for t in transport.split("+"))


def _remark(evidence: Evidence) -> None:
    """Note what is worth knowing although it does not decide: staged GPU messages, lanes that differ."""
    for table in evidence.tables.values():
        if not table.is_read and _kind(table.local) not in ("host", "") and table.rows:
            row, line = table.rows[-1]
            if row.staged and evidence.count("staged other") <= 5:
                evidence.problem("staged-through-host", line, f"{table.operation}: {row.description} | {row.config}")
    seen: dict[tuple[Any, ...], tuple[set[str], int]] = {}
    for entry in evidence.lanes:
        place = (entry["context"], entry["locality"], entry["config"])
        names = {x.split("/")[0] for lanes in entry["lanes"].values() for x in lanes}
        before, line = seen.setdefault(place, (names, entry["line"]))
        if lost := ", ".join(sorted(before ^ names)):
            text = f"{lost}: not in both this lane list and that of line {line}"
            evidence.problem("lanes-differ", entry["line"], text)


def _kind(memory: str | None) -> str:
    return (memory or "").split(" ")[-1].split("/")[0]


def _bytes(size: float) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size:.0f} B"


def decide(evidence: Evidence) -> Pull:
    """Say what carried the pull, from the remote memory read tables alone; notes problems in ``evidence``."""
    pull = _decide(evidence)
    _remark(evidence)
    return pull


def _decide(evidence: Evidence) -> Pull:
    reads = [t for t in evidence.tables.values() if t.is_read and t.rows]
    asked = [
        t for t in reads
        if (not evidence.local or _kind(t.local) == evidence.local)
        and (not evidence.remote or _kind(t.remote) in (evidence.remote, ""))
    ]  # fmt: skip
    if reads and not asked:
        what = f"{evidence.local or 'any'} from {evidence.remote or 'any'} memory"
        return _open(evidence, f"no remote memory read table for {what}, only for other memory", reads[0].line)
    tables = [t for t in asked if t.locality != "self"]
    if asked and not tables:
        evidence.problem("self-endpoint-only", asked[0].line, "remote memory read of a self endpoint")
        why = "the only remote memory read tables are of self endpoints, a pull goes to a peer"
        return _open(evidence, why, asked[0].line)
    # Of tables that UCX counted only those that it used; of those the KV's memory, then several blocks at once.
    notes: list[str] = []
    tables = [t for t in tables if any(r.selections for r, _ in t.rows)] or tables
    tables = _main_memory(evidence, tables, notes)
    tables = [t for t in tables if "multi" in t.attributes] or tables
    return _by_rows(evidence, tables, notes) if tables else _open(evidence)


def _main_memory(evidence: Evidence, tables: list[Table], notes: list[str]) -> list[Table]:
    """Keep the tables of the memory that KV lives in, when reads of several memory kinds were seen."""
    if len({(_kind(t.local), _kind(t.remote)) for t in tables}) < 2:
        return tables
    device = evidence.buffer_device
    if device in ("cpu", "host"):
        notes.append("KV is in host memory, as vLLM's log says")
        return [t for t in tables if _kind(t.local) == "host"] or tables
    notes.append(f"KV is in {device} memory, as vLLM's log says" if device else "KV is taken to be in GPU memory")
    hosts = [(_kind(t.local) == "host") + (_kind(t.remote) == "host") for t in tables]
    return [t for t, n in zip(tables, hosts, strict=True) if n == min(hosts)]


def _sizes(evidence: Evidence, notes: list[str], tables: list[Table]) -> list[int]:
    if evidence.descriptor_bytes:
        notes.append(f"descriptors of {_bytes(evidence.descriptor_bytes)} as given")
        return [evidence.descriptor_bytes]
    if evidence.kv_sizes:
        low, high = (round(s) for s in evidence.kv_sizes)
        text = _bytes(low) if high - low <= high * 0.01 else f"{_bytes(low)} to {_bytes(high)}"
        notes.append(f"descriptors of {text} on average, from vLLM's metrics lines")
        return sorted({low, high})
    from_bytes = max(t.rows[-1][0].min_bytes for t in tables)
    if from_bytes <= 4096 and all(t.rows[-1][0].max_bytes is None for t in tables):
        notes.append(f"every size{f' from {from_bytes:,} bytes on' if from_bytes else ''} takes this row")
    else:
        notes.append(f"descriptor size not known, {_bytes(ASSUMED_BYTES)} assumed")
    return [ASSUMED_BYTES]


def _by_rows(evidence: Evidence, tables: list[Table], notes: list[str]) -> Pull:
    sizes = _sizes(evidence, notes, tables)
    assumed = not evidence.descriptor_bytes and not evidence.kv_sizes
    chosen: list[tuple[Table, Row, int]] = []
    for table in tables:
        counted = [(r, n) for r, n in table.rows if r.selections]
        if assumed and counted:  # what UCX counted is better than an assumption
            rows = [max(counted, key=lambda x: x[0].selections or 0)]
            notes[-1] = "the row that UCX counted most"
        else:
            rows = [found for found in (table.row_for(s) for s in sizes) if found]
        chosen += [(table, r, n) for r, n in dict.fromkeys(rows)]
    if not chosen:
        evidence.problem("no-row-for-size", tables[0].line, f"{_bytes(sizes[0])} is in no row")
        return _open(evidence, f"no row of the read table covers {_bytes(sizes[0])}", tables[0].line)
    large = [[r for r, _ in t.rows if (r.max_bytes or ASSUMED_BYTES) >= 4096] for t in tables]
    if assumed and any(len({(r.transports, r.emulated) for r in rows}) > 1 for rows in large):
        evidence.problem("descriptor-size-assumed", tables[0].line, notes[-1])
    whole = [c for c in chosen if c[1].lanes]
    if not whole:
        return _open(evidence, "the row that covers the descriptors is cut before its transport", chosen[0][2])
    if len(whole) < len(chosen):
        notes.append(f"{len(chosen) - len(whole)} more row is cut before its transport")
    chosen = evidence.deciding = whole
    if any(r.selections for t in tables for r, _ in t.rows) and not any(r.selections for _, r, _ in chosen):
        evidence.problem("counts-disagree", chosen[0][2], f"{chosen[0][1].description} | {chosen[0][1].config}")
    lines = sorted({n for _, _, n in chosen})
    ways = {("+".join(r.transports), r.emulated) for _, r, _ in chosen}
    if len(ways) > 1:
        evidence.deciding = []
        for _, row, line in [c for c in chosen if c[1].emulated][:1]:
            evidence.problem("software-emulation", line, f"{row.description} | {row.config}")
        how = {True: " by software emulation", False: ""}
        said = "; ".join(f"{w}{how[e]} ({_where(chosen, w, e)})" for w, e in sorted(ways))
        if len({w for w, _ in ways}) == 1:
            # one transport, emulated for some: the transport is known, the emulation is not
            evidence.deciding = chosen
            pull = _agreed(evidence, chosen, notes, lines)
            pull.emulated, pull.verdict = None, f"{pull.transport}, mixed: {said}"
            return pull
        evidence.problem("conflicting-reads", lines[0], said)
        return Pull(verdict=f"not determined: the read tables are mixed: {said}", lines=lines[:100])
    return _agreed(evidence, chosen, notes, lines)


#: symptom -> how it explains an emulated read
_CAUSES = {
    "expandable-segments": "expandable_segments explains it",
    "cuda-ipc-get-disabled": "cuda_ipc reads are off",
    "transport-not-available": "a transport of UCX_TLS is not available",
    "net-device-not-available": "a device of UCX_NET_DEVICES is not available",
}


def _where(chosen: list[tuple[Table, Row, int]], way: str, emulated: bool) -> str:
    found = [(t, n) for t, r, n in chosen if "+".join(r.transports) == way and r.emulated == emulated]
    places = sorted({t.locality for t, _ in found if t.locality})
    many = len({t.file for t, _, _ in chosen}) > 1
    lines = [f"{t.file.rsplit('/', 1)[-1]}:{n}" if many else str(n) for t, n in found]
    return ", ".join([*places, f"line{'s' if len(lines) > 1 else ''} {', '.join(lines[:5])}"])


def _agreed(evidence: Evidence, chosen: list[tuple[Table, Row, int]], notes: list[str], lines: list[int]) -> Pull:
    rows = [r for _, r, _ in chosen]
    devices = list(dict.fromkeys(x.device for r in rows for x in r.lanes if x.device))
    paths = max((len({x.path for x in r.lanes if x.device == d}) for r in rows for d in devices), default=None)
    first, per_row = rows[0], max(len({x.device for x in r.lanes}) for r in rows)
    pull = Pull("+".join(first.transports), None, devices, paths, first.emulated, lines=lines[:100])
    pull.staged, pull.estimate = any(r.staged for r in rows), any(r.estimate for r in rows)
    for code, holds in (
        ("staged-through-host", pull.staged), ("software-emulation", pull.emulated), ("estimate", pull.estimate),
    ):  # fmt: skip
        if holds:
            evidence.problem(code, lines[0], f"{first.description} | {first.config}")
    hidden = max(0, 100 - sum(x.share or 0 for x in first.lanes))
    beside = any(t.locality == "intra-node" for t, _, _ in chosen) and agrees(pull.transport, "rdma,tcp")
    words = [
        f"{pull.transport} on {', '.join(devices)}" if devices else pull.transport,
        first.description.removeprefix("(?) "),
        f"{per_row} devices at once" if per_row > 1 else "",
        f"{paths} paths on one device" if paths and paths > 1 else "",
        "staged through a bounce buffer" if pull.staged else "",
        "UCX's estimate" if pull.estimate else "",
        f"lane list cut, {hidden} percent of the share not shown" if any(r.truncated for r in rows) else "",
        "though the peer is on the same node" if beside else "",
    ]
    causes = [p for p in evidence.problems if p["code"] in _CAUSES and pull.emulated]
    notes = notes + [f"{_CAUSES[p['code']]} (line {p['line']})" for p in causes[:2]]
    pull.verdict = ", ".join(filter(None, words)) + (f" ({'; '.join(notes)})" if notes else "")
    return pull


def _open(evidence: Evidence, why: str = "", line: int | None = None) -> Pull:
    """Say that the pull is not determined, why, and what the weaker signs make likely."""
    others = {t.operation.split(" by ")[0] for t in evidence.tables.values() if not t.is_read and t.rows}
    headless = [t for t in evidence.tables.values() if t.is_read and not t.rows]
    if not why:
        if headless:
            why = f"the read table at line {headless[0].line} has no rows"
        elif others:
            why = f"only tables of {', '.join(sorted(others))} are here, none of a remote memory read"
        elif evidence.lanes:
            why = "a lane list says what an endpoint may use, not what carried the bytes"
        elif evidence.environment.get("UCX_TLS"):
            why = "an echoed UCX_TLS says what is allowed, not what carried the bytes"
        else:
            why = "no UCX protocol table is here"
    pull = Pull(lines=[line] if line else [])
    if likely := _likely(evidence):
        pull.likely, pull.lines = f"{likely[0]} ({likely[1]})", pull.lines or [likely[2]]
    shown = bool(others or evidence.lanes or evidence.environment.get("UCX_TLS"))
    code = "not-pull-evidence" if shown else "no-evidence"
    if not any(p["code"] in ("self-endpoint-only", "no-row-for-size") for p in evidence.problems):
        evidence.problem(code, line, why)
    pull.verdict = f"not determined: {why}" + (f"; likely {pull.likely}" if pull.likely else "")
    return pull


def _likely(evidence: Evidence) -> tuple[str, str, int] | None:
    """Return (transport, reason, line) from lane lists, else from the allowed set; None when open."""
    peers = [x for x in evidence.lanes if x["locality"] != "self"] or evidence.lanes
    off = any(p["code"] == "cuda-ipc-get-disabled" for p in evidence.problems)
    found: dict[str, tuple[str, str, int]] = {}
    for entry in peers:
        lanes = {name: [(x.split("/")[0], x) for x in value] for name, value in entry["lanes"].items()}
        rma, emulated = lanes.get("rma", []) + lanes.get("rma_bw", []), lanes.get("rma_am", [])
        rest = {t for name in ("am", "other", "device") for t, _ in lanes.get(name, [])}
        ipc_open = "cuda_ipc" in {t for t, _ in rma} | (rest if not emulated else set()) and not off
        direct = {t for t, _ in rma if t != "cuda_ipc" or not off}
        # cma and its like show only under am(...), yet read by themselves
        if (
            len(direct) > 1
            or (ipc_open and direct != {"cuda_ipc"})
            or (emulated and rest & set(_SHARED) - {emulated[0][0]})
        ):
            return None
        if direct:
            name, reason = direct.pop(), f"its remote-access lane is {rma[0][1]}"
        elif emulated:
            name, reason = emulated[0][0], f"rma_am({emulated[0][1]}): reads by software emulation over active messages"
            reason += "; cuda_ipc is listed for writes and may be off for reads" if "cuda_ipc" in rest else ""
        else:
            continue
        found.setdefault(name, (name, reason, entry["line"]))
    if found:
        return next(iter(found.values())) if len(found) == 1 else None
    return _allowed(evidence)


def _allowed(evidence: Evidence) -> tuple[str, str, int] | None:
    """Return what UCX_TLS leaves: UCX's own echo of it before a script's."""
    values = evidence.environment.get("UCX_TLS", [])
    values = [v for v in values if v["seen_by_ucx"]] or values
    if len({v["value"] for v in values}) != 1 or values[0]["value"].startswith("^"):
        return None
    value, line = values[0]["value"], values[0]["line"]
    gone = [n for p in evidence.problems if p["code"] == "transport-not-available" for n in _QUOTED.findall(p["text"])]
    names = {n.split(":")[0] for n in value.split(",") if n} - {"self", *COPIES, *gone}
    if names == {"tcp"}:
        return "tcp", f"UCX_TLS={value} leaves nothing else here", line
    places = {t.locality for t in evidence.tables.values()} | {x["locality"] for x in evidence.lanes}
    on_node = {"cuda_ipc", "rocm_ipc", "ze_ipc", "mm", "sm", "shm", *_SHARED}
    if "inter-node" in places and names - on_node == {"tcp"}:
        return "tcp", f"between nodes UCX_TLS={value} allows no RDMA transport", line
    return None
