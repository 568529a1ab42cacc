"""Byte counters that people paste: ``perfquery``, ``ethtool -S``, files of /sys/class with their names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from kvlab.capture.counters import SATURATED, WORD
from kvlab.capture.logs import ADVICE

_PATH = re.compile(r"sys/class/(?:infiniband|net)/([^/\s:]+)((?:/[^/\s:]+)*)/(\w+)\s*(?::\s*|=\s*|<==\s*$)(.*)$")
_LOOSE = re.compile(r"(?<![\w/.])()()(port_(?:rcv|xmit)_(?:data|packets)(?:_64)?)\s*[:=\s]\s*(\d+|N/A.*)\s*$")
_PERFQUERY = re.compile(r"(?:Port)?(Xmi?t|Rcv)(Data|Bytes|Pkts):\.*\s*(\d+|0x[0-9a-fA-F]+)\s*$")
_HEADER = re.compile(r"# Port (extended )?counters: (?:Lid (\w+) )?port (\d+)")
_ETHTOOL = re.compile(r"(?<![\w./])((?:rx|tx)\w*_bytes\w*): (\d+)\s*$")
_INTERFACE = re.compile(r"ethtool (?:-S|--statistics) (\S+)")
#: what a line with a counter, or with the name of what it counts for, holds
LINE = re.compile(
    r"port_(?:rcv|xmit)_|(?:Xmi?t|Rcv)(?:Data|Bytes|Pkts):|sys/class/(?:infiniband|net)/|_vport_|_bytes_phy"
    r"|counters: Lid|ethtool (?:-S|--stat)"
)
_NUMBER = re.compile(r"0x[\da-fA-F]{1,16}|\d{1,20}")
_NAMES = {"Rcv": "port_rcv_", "Xmi": "port_xmit_", "Xmt": "port_xmit_"}


def read(lines: str | Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    """Return a row for each counter (and port attribute) found, in order.

    Keys: device, kind, counter, raw (None: not readable), bytes (None: no byte counter), usable, note, line,
    and text for attributes such as link_layer, state, rate.  ``lines``: a text, or (number, line) pairs.
    """
    rows: list[dict[str, Any]] = []
    device, waiting, blocks = "", None, 0
    for number, line in enumerate(lines.splitlines(), 1) if isinstance(lines, str) else lines:
        if waiting and number == waiting[0] + 1:  # head and tail print ==> NAME <==, the value under it
            _keep(rows, *waiting[1:], line.strip(), number)
        elif found := _HEADER.search(line):
            blocks += 1
            device = f"lid {found[2] or '?'} port {found[3]}{', extended' if found[1] else ''}"
        elif found := _INTERFACE.search(line):
            device = found[1]
        elif found := _PATH.search(line) or _LOOSE.search(line):
            port = re.search(r"/ports/(\d+)", found[2])
            name = f"{found[1]}:{port[1]}" if port else found[1]
            paired = re.search(r"/device/net/([^/]+)", found[2])
            where = (paired[1], "interface") if paired else (name, "RDMA port" if port or not name else "interface")
            if found[4]:
                _keep(rows, *where, found[3], found[4].strip(), number, owner=f"{found[1]}:" if paired else "")
            else:
                waiting = (number, *where, found[3])
        elif found := _PERFQUERY.search(line):
            name = _NAMES[found[1][:3]] + ("packets" if found[2] == "Pkts" else "data")
            if not blocks:
                device = f"port {1 + sum(r['counter'] == name for r in rows)}"
            _keep(rows, device, "RDMA port", name, found[3], number)
        elif found := _ETHTOOL.search(line):
            _keep(rows, device, "ethtool", found[1], found[2], number)
    down = {r["device"] for r in rows if r["counter"] == "state" and "DOWN" in r["text"]}
    for row in rows:
        if row["counter"] == "rate" and row["device"] in down:
            row |= {"usable": False, "note": "the port is down"}
    return rows


def _keep(
    rows: list[dict[str, Any]], device: str, kind: str, counter: str, text: str, line: int, owner: str = ""
) -> None:
    raw = int(text, 16 if text[1:2] == "x" else 10) if _NUMBER.fullmatch(text) else None
    note, size = "", raw if "bytes" in counter else None
    if re.search(r"_data(_64)?$", counter):
        size = None if raw is None else raw * WORD
        if raw in (None, SATURATED):
            note = f"the port says {text[:40]!r}" if raw is None else "stuck at 2^32-1 words (legacy 32-bit counter)"
    where = {"device": device, "kind": kind, "counter": counter, "line": line, "text": text[:80], "owner": owner}
    rows.append({**where, "raw": raw, "bytes": size, "usable": not note, "note": note})


def findings(rows: list[dict[str, Any]]) -> list[tuple[str, int, str]]:
    """Return (code, line, what is there and what to do) for the rows of :func:`read`, one of a code at most."""
    said: dict[str, list[tuple[int, str]]] = {}
    at = {(r["device"], r["counter"]): r for r in rows}
    for row in rows:
        if row["counter"] == "state" and "DOWN" in row["text"]:
            said.setdefault("port-down", []).append((row["line"], row["device"]))
        if row["counter"].startswith(("port_rcv_data", "port_xmit_data")):
            for code, text in _port(row, at, rows):
                said.setdefault(code, []).append((row["line"], f"{row['device']} {text}".strip()))
    return [
        (code, found[0][0], "; ".join(dict.fromkeys(t for _, t in found[:6])) + f". {ADVICE[code]}")
        for code, found in said.items()
    ]


def _port(
    row: dict[str, Any], at: dict[tuple[str, str], dict[str, Any]], rows: list[dict[str, Any]]
) -> list[tuple[str, str]]:
    """Return (code, text) for one data counter of an RDMA port."""
    device, name, raw = row["device"], row["counter"], row["raw"]
    if raw is None:
        return [("counter-not-readable", f"{name}: {row['text']}")]
    if raw == SATURATED:
        return [("counter-saturated", f"{name} = 2^32-1")]
    if raw == 0:
        link, state = (at.get((device, x), {}).get("text", "").split(": ")[-1] for x in ("link_layer", "state"))
        others = [r for r in rows if device.startswith(r["owner"] or "?") and r["bytes"]]
        moved = [f"{r['device']} {r['counter']} {r['bytes']:,}" for r in others]
        text = " ".join(filter(None, (f"{name} = 0", link, state, "while " + ", ".join(moved) if moved else "")))
        return [] if state == "DOWN" else [("counter-zero", text)]
    side, way = ("rcv", "rx") if "rcv" in name else ("xmit", "tx")
    packets = at.get((device, f"port_{side}_packets"), {}).get("raw")
    each = f", {row['bytes'] / packets:,.0f} B a packet" if packets else ""
    found = [("counter-words", f"{name} {raw:,} x 4 = {row['bytes']:,} bytes ({amount(row['bytes'])}{each})")]
    other = next((r for r in rows if r["counter"] == f"{way}_vport_rdma_unicast_bytes" and r["raw"]), None)
    if other:
        ratio = row["bytes"] / other["raw"]
        code = "counters-agree" if abs(ratio - 1) < 0.01 else "counters-differ"
        code = "counter-unit-error" if min(abs(ratio - 4), abs(ratio * 4 - 1)) < 0.04 else code
        plain = at.get((other["device"], f"{way}_vport_unicast_bytes"), {}).get("raw")
        beside = f"; not RDMA: {amount(plain)}" if plain is not None else ""
        found.append((code, f"{name} x 4 = {ratio:.4g} times {other['device']} {other['counter']}{beside}"))
    return found


def amount(value: float) -> str:
    """Return bytes for people: 325.6 GB, 17.49 TB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:.0f} B"
