"""Which transport carried the payload: UCX's protocol tables out of any log, and what they decide.

UCX prints, for each operation and memory pair, a table of message sizes and the protocol that each size
takes (``UCX_PROTO_INFO=y``; ``used`` prints at the end what was really used, with counts).  A KV pull of
vLLM or NIXL is a *remote memory read* (``ucp_get*``), so only that table, in the row that covers the
descriptor size, decides.  Put tables, active messages, lane lists and echoed ``UCX_TLS`` never do.

Layouts, told apart by their rows alone (checked against UCX 1.14, 1.15, 1.16, 1.19, 1.20, 1.21 and 1.22
running here, 1.13 from its documentation; source: ``src/ucp/proto/proto_debug.c``):

- to 1.14 ``| NAME ep_cfg[N] | operation |``, from 1.15 ``| NAME LOCALITY cfg#N | operation |``
- 1.21 ``used``: the count stands in the range cell, left; 1.22: two title rows, then named columns
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlab.capture import counter_text, logs
from kvlab.capture.carrier import ALIASES, COPIES, KNOWN_TRANSPORTS, Pull, agrees, decide, known_transport
from kvlab.capture.vllm import kv_metrics

if TYPE_CHECKING:
    import pandas as pd

#: UCP_PROTO_CONFIG_STR_MAX - 1: UCX cuts the config cell here without a sign
CONFIG_MAX = 127
#: of each kind this many are kept; totals go on counting
KEEP = 1000
_MEMORY_KINDS = {"DRAM": "host", "VRAM": "cuda"}


class Lane(NamedTuple):
    """One lane of a protocol row; ``share`` in percent as UCX prints it, None where it is not shown."""

    transport: str
    device: str | None
    path: str | None
    share: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """A range of message sizes (``max_bytes`` None: no limit) and the protocol that it takes."""

    min_bytes: int
    max_bytes: int | None
    description: str
    config: str
    lanes: tuple[Lane, ...]
    estimate: bool
    selections: int | None
    truncated: bool
    #: the cells as text: tells rows apart quicker than all fields
    text: str

    @property
    def emulated(self) -> bool:
        """Whether UCX moves the bytes by active messages instead of a remote read."""
        return self.description.removeprefix("(?) ").startswith("software emulation")

    @property
    def staged(self) -> bool:
        """Whether the bytes go through a bounce buffer (a copy engine or fragments in host memory)."""
        copied = len(self.lanes) > 1 and any(x.transport in COPIES for x in self.lanes)
        return copied or _STAGED.search(self.description) is not None

    @property
    def transports(self) -> tuple[str, ...]:
        """The transports of the lanes, in order, each once."""
        return tuple(dict.fromkeys(x.transport for x in self.lanes))


@dataclass(slots=True)
class Table:
    """One protocol table of one thread; ``rows`` with the line each stood on."""

    file: str
    key: tuple[Any, ...]
    context: str | None
    locality: str | None
    config: int | None
    operation: str
    attributes: tuple[str, ...]
    local: str | None
    remote: str | None
    line: int
    #: whether the header ended with its bar: then a row that does not was cut
    bars: bool = False
    text: str = ""
    rows: list[tuple[Row, int]] = field(default_factory=list)
    count: int = 1

    @property
    def is_read(self) -> bool:
        """Whether this is a remote memory read, the operation of a pull."""
        return "ucp_get" in self.operation

    def row_for(self, size: int) -> tuple[Row, int] | None:
        """Return the row that covers ``size`` bytes with its line, or None."""
        fits = ((r, n) for r, n in self.rows if r.min_bytes <= size and (r.max_bytes is None or size <= r.max_bytes))
        return next(fits, None)

    def document(self) -> dict[str, Any]:
        """Return the table as the JSON document has it."""
        names = ("context", "locality", "config", "operation", "attributes", "local", "remote", "line", "file", "count")
        of_row = ("min_bytes", "max_bytes", "description", "config", "estimate", "selections", "truncated")
        return {
            **dict(zip(("host", "pid", "thread"), self.key, strict=False)),
            **{name: getattr(self, name) for name in names},
            "attributes": list(self.attributes),
            "rows": [
                {**{x: getattr(r, x) for x in of_row}, "lanes": [x._asdict() for x in r.lanes], "line": n}
                for r, n in self.rows
            ],
        }


# ---------------------------------------------------------------------------------------------- one line

_STAGED = re.compile(r"\b(?:(?:cuda|rocm|ze)_copy|gdr_copy|frag(?:ment\w*)? (?:host|cuda|rocm|ze)|pipeline)\b")
#: [host:pid:thread] of UCX's own log, after its time stamp; else with a letter, since [12:30:45] is a time
_BRACKETS = [
    re.compile(before + r":(\d+)\s*:(\w+)\s*\]")
    for before in (r"\[\d+\.\d+\]\s+\[([^\[\]\s]+?)", r"\[([^\[\]:\s]*[A-Za-z][^\[\]:\s]*)")
]
_WRAPPER_PID = re.compile(r"\bpid=(\d+)")
_WRAPPER_HOST = re.compile(r"\bip=([\w.:-]+)")
_CFG = re.compile(r"\b(?:cfg#|ep_cfg\[)(\d+)")
_NAME = re.compile(r"(?:([^\s|(\]]+)\s+)??(?:(self|intra-node|inter-node)\s+)?$")
_MEMORY = r"(?:(?:iov|generic|strided|contig)(?:\[\d+\])? )?[a-z][\w-]*(?: memory|/[^\s|]+)?"
_OPERATION = re.compile(
    r"((?:remote memory (?:read|write)|(?:synchronous )?tagged message|active message|stream message"
    r"|posted atomic|fetching atomic|atomic compare-and-swap) by ucp_\w+\*?(?: with reply flag)?"
    r"|rendezvous data (?:send|fetch|drop))(?:\(([^)|]*)\))?"
    rf"(?:\s+(?:into|from|of)\s+({_MEMORY}))?(?:\s+(?:from|to)\s+({_MEMORY}))?"
)
_UNIT = {u: 1 << (10 * i) for i, u in enumerate(("", "K", "M", "G", "T", "P", "E"))}
_RANGE = re.compile(r"(?:(\d+)\s+)?(\d+)([KMGTPE]?)(?:i?B)?(?:\s*\.\.\s*(?:(inf)|(\d+)([KMGTPE]?)(?:i?B)?))?")
_RESOURCE = r"[a-z]\w*/[^\s,/|]+"
_LANE = re.compile(
    rf"(?:({_RESOURCE})(?:/(path\d+))?)?\s*(?:(\d{{1,3}})% on)?\s*(?:({_RESOURCE})(?:/(path\d+))?|(path\d+))?"
)
_DESCRIPTION = re.compile(
    r"(?:\(\?\) )?(?:short|copy-|zero-copy|software emulation|multi-frag|eager|rendezvous|rndv|fragmented|no data"
    r"|pipeline|write to|read from|(?:cuda|gdr|rocm|ze)_copy)"
)
_LANE_GROUP = re.compile(r"\b([a-z]\w*)\(([^()]*)\)")
_ENDPOINT = re.compile(r"Endpoint Config #(\d+) \((?:ctx: (\S+), )?type: ([\w-]+)\)")
_ENV = re.compile(r"\b((?:UCX|NIXL|VLLM_NIXL|VLLM_KV)_[A-Z0-9_]+)=('[^']*'|\"[^\"]*\"|[^\s,;'\"][^\s;'\"]*)")
_ARROW = re.compile(r"\s(?:->|=>|→)\s|[│┃]")

# kinds of line
BORDER, HEADER, TITLE, ROW, ONE_LINE, LANES, OTHER_TITLE, OTHER_ROW, NOTHING, SKIP = range(10)


def parse_lanes(config: str, cut: bool = False) -> tuple[Lane, ...]:
    """Read a config cell: ``rc_mlx5/mlx5_0:1 50% on path0 and 50% on path1``, ``52% on tcp/lo and ...``.

    Of a cell that was cut the lane at the cut is left out unless it is whole or the only one, and shares
    stay as printed: they are never scaled up to 100.
    """
    parts = re.split(r",\s+|\s+and\s+|\s+\|\s+", config.strip())
    lanes: list[Lane] = []
    shared: tuple[str | None, str | None] = (None, None)
    whole = False
    for part in parts:
        found = _LANE.fullmatch(part.strip())
        first, first_path, share, own, own_path, path = found.groups() if found else [None] * 6
        if first and share is not None:
            shared = (first, first_path)
        resource, way = (own, own_path) if own else shared if share is not None or path else (first, first_path)
        if whole := resource is not None:
            transport, _, device = (resource or "").partition("/")
            lanes.append(Lane(transport, device, path or way, int(share) if share is not None else 100))
    if cut and lanes:
        shown = re.search(r":\d+(?:/path\d+)?$|/(?:memory|cuda|rocm)$|\bpath\d+$", parts[-1].rstrip())
        if whole and not shown and not config.endswith((" ", ",")):
            last = lanes.pop()
            lanes = lanes or [Lane(last.transport, None, None, None)]
        lanes = [x._replace(share=None) if x.share == 100 else x for x in lanes]
    elif cut and (only := re.match(r"(?:\d+% on )?([a-z]\w*)/", config)):
        lanes = [Lane(only[1], None, None, None)]
    return tuple(lanes)


def _row(cells: list[str], terminated: bool) -> Row | None:
    for i, cell in enumerate(cells[:-1]):
        found = _RANGE.fullmatch(cell)
        if not found:
            continue
        count = found[1]
        if count is None and cell.isdecimal() and (after := _RANGE.fullmatch(cells[i + 1])):
            count, found, i = cell, after, i + 1
        rest = cells[i + 1 :]
        while rest and not rest[-1]:
            rest.pop()
        if not rest:
            continue
        description, config = rest[0], " | ".join(rest[1:])
        cut = (not terminated and len(rest) < 2) or len(config) >= CONFIG_MAX
        lanes = parse_lanes(config, cut)
        if not terminated and not cut and not _whole(config):
            cut, lanes = True, parse_lanes(config, True)
        if not _DESCRIPTION.match(description) and not (lanes and "/" in config and not description.isdigit()):
            continue
        low = int(found[2]) * _UNIT[found[3]]
        high = None if found[4] else int(found[5]) * _UNIT[found[6]] if found[5] else low
        estimate, whole = description.startswith("(?)"), "|".join((count or "", *cells[i:]))
        return Row(low, high, description, config, lanes, estimate, _int(count), cut or not config, whole)
    return None


def _whole(config: str) -> bool:
    """Tell whether a config cell without its closing bar looks complete: every share has its lane."""
    parts = re.split(r",\s+|\s+and\s+", config.strip())
    if not all((m := _LANE.fullmatch(p)) and (m[1] or m[4] or m[6]) for p in parts):
        return False
    shares = [int(s) for s in re.findall(r"(\d+)% on", config)]
    return not shares or sum(shares) >= 99


def _int(text: str | None) -> int | None:
    return int(text) if text is not None and len(text) < 19 else None


@dataclass(slots=True)
class Item:
    """What one line is: its kind, the thread it belongs to, and what was read from it."""

    kind: int
    key: tuple[Any, ...]
    text: str
    data: Any = None
    #: the line stops before its closing bar, so the next line may carry on
    open: bool = False
    #: whether the thread is known by UCX's own bracket
    bracket: bool = False
    #: what a line outside tables says, see :func:`_loose`
    loose: tuple[tuple[str, Any], ...] = ()
    #: what the thread has open; kept here because the same line comes again and again
    state: _Thread | None = None


def parse(text: str) -> Item:
    """Read one line; anything that is no part of a UCX table or lane list has the kind NOTHING."""
    bracket = _BRACKETS[0].search(text) or _BRACKETS[1].search(text)
    if bracket:
        key: tuple[Any, ...] = (bracket[1], int(bracket[2][:18]), bracket[3], "")
        body = text[bracket.end() :]
    else:
        at = min((p for p in (text.find("|"), text.find("+--"), text.find("remote memory")) if p >= 0), default=0)
        pid, host = _WRAPPER_PID.search(text, 0, at), _WRAPPER_HOST.search(text, 0, at)
        # Without UCX's own bracket the text before the table tells processes apart; times do not.
        prefix = re.sub(r"[\d.:TZ+\-/]{6,}", "", text[:at]).strip()
        key = (host and host[1], _int(pid[1]) if pid else None, None, prefix)
        body = text
    body = _ARROW.sub(" | ", body)
    found, cfg = _OPERATION.search(body), _CFG.search(body)
    config = operation = None
    if cfg:
        name = _NAME.search(body, max(0, cfg.start() - 120), cfg.start())
        config = (*(name.group(1, 2) if name else (None, None)), _int(cfg[1]))
    if found:
        attributes = tuple(a.strip() for a in (found[2] or "").split(",") if a.strip())
        operation = (found[1], attributes, *(m and m.removesuffix(" memory") for m in found.group(3, 4)))

    def item(kind: int, data: Any = None, unfinished: bool = False) -> Item:
        loose = _loose(text) if kind in (NOTHING, OTHER_ROW) else ()
        return Item(kind, key, text, data, unfinished, bracket is not None, loose)

    if cfg and not found and (groups := _LANE_GROUP.findall(body, cfg.end())):
        return item(LANES, (config, _lane_groups(groups, body[cfg.end() :])))
    if "|" not in body:
        return item(HEADER, (config, operation)) if found else item(BORDER if "+--" in body else NOTHING)
    cells = [c.strip() for c in body[found.end() if found else 0 :].split("|")]
    terminated = body.rstrip().endswith("|")
    # Without a bracket the table begins after whatever prefix there is.
    short = not terminated and (body.lstrip().startswith("|") if bracket else bool(found or cfg) or "|" in body[:60])
    row = None if cfg and not found else _row(cells, terminated)
    if found:
        return item(ONE_LINE, (config, operation, row), short) if row else item(HEADER, (config, operation), short)
    if "Range" in cells and "Description" in cells:
        return item(SKIP)
    if (endpoint := _ENDPOINT.search(body)) or "Available Transports" in body:
        return item(OTHER_TITLE, endpoint)
    if cfg or row:
        return item(TITLE, config, short) if cfg else item(ROW, row, short)
    return item(OTHER_ROW, cells[1:-1] if terminated else cells[1:], short)


def _lane_groups(groups: list[tuple[str, str]], rest: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, text in groups:
        found.setdefault(name, []).extend(t for t in text.split() if "/" in t)
    inside = {t for lanes in found.values() for t in lanes}
    loose = re.findall(rf"(?<!no )\b({_RESOURCE})", re.sub(r"\([^()]*\)", " ", rest))
    outside = [t for t in loose if t not in inside and f"no {t}" not in rest]
    return found | ({"other": outside} if outside else {})


def _loose(text: str) -> tuple[tuple[str, Any], ...]:
    """Return what a line outside tables says, each with the name of the method of :class:`_Reader` that takes it."""
    at = text.find("KV Transfer metrics:")
    if at >= 0 and (metrics := kv_metrics(_RUN.sub("", text[at : at + 1500]))) is not None:
        return (("metrics", metrics),)
    if found := _EVENT.search(text):
        return (("telemetry", found.groups()),)
    if counter_text.LINE.search(text):
        return (("counter", None),)
    said: list[tuple[str, Any]] = [("memory", found[1])] if (found := _BUFFER.search(text)) else []
    if "(set UCX_WARN" not in text:
        said += [("variable", pair) for pair in _ENV.findall(text)]
    if symptom := logs.symptom(text):
        said.append(("symptom", symptom))
    return tuple(said)


# ---------------------------------------------------------------------------------------------- one log


@dataclass(slots=True)
class _Thread:
    """What a thread has open: a table, a title that waits for its operation, or a table of another kind."""

    table: Table | None = None
    title: tuple[Any, ...] | None = None
    other: Any = None


@dataclass(eq=False)
class Evidence:
    """Everything that was read; :meth:`document` gives it as plain data, :attr:`pull` what it comes to."""

    descriptor_bytes: int | None = None
    local: str | None = None
    remote: str | None = None
    tables: dict[tuple[Any, ...], Table] = field(default_factory=dict)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    available: list[dict[str, Any]] = field(default_factory=list)
    kv_metrics: list[dict[str, Any]] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    environment: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    telemetry: dict[str, dict[str, int]] = field(default_factory=dict)
    telemetry_pulls: list[dict[str, int]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    lines_read: int = 0
    #: smallest and largest mean descriptor size of vLLM's lines, in bytes
    kv_sizes: list[float] = field(default_factory=list)
    #: sums over all successful transfers: count, ms, post ms, MiB, descriptors
    kv_sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    buffer_device: str | None = None
    deciding: list[tuple[Table, Row, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """How many things were found, of any kind."""
        return sum(self.totals.values()) + len(self.telemetry) + len(self.environment)

    def count(self, kind: str) -> int:
        """Count one more of ``kind`` and return how many there are."""
        self.totals[kind] = self.totals.get(kind, 0) + 1
        return self.totals[kind]

    def problem(self, code: str, line: int | None, text: str, advice: str | None = None, **more: Any) -> None:
        """Keep a problem, the first 1,000 of each code."""
        entry = {"code": code, "line": line, "text": text.strip()[:500]}
        self.keep(self.problems, f"problem {code}", {**entry, "advice": advice or logs.ADVICE.get(code, ""), **more})

    def keep(self, kept: list[Any], kind: str, entry: dict[str, Any]) -> None:
        """Append the first 1,000 of a kind; its total goes on counting."""
        if self.count(kind) <= KEEP:
            kept.append(entry)

    def add(self, table: Table) -> None:
        """Take a finished table; one that was seen before only counts."""
        if table.is_read and not table.rows:
            self.problem("header-without-rows", table.line, f"{table.operation} ({table.local} <- {table.remote})")
        signature = (
            table.file, table.key, table.context, table.locality, table.config, table.operation,
            table.attributes, table.local, table.remote, *(r.text for r, _ in table.rows),
        )  # fmt: skip
        known = self.tables.get(signature)
        self.count("protocols")
        if known:
            known.count += 1
        elif self.count("read tables" if table.is_read else "other tables") <= KEEP:
            self.tables[signature] = table

    @functools.cached_property
    def pull(self) -> Pull:
        """What carried the pull."""
        return decide(self)

    def document(self) -> dict[str, Any]:
        """Return the JSON document that ``kvlab explain --json`` prints; everything in it is plain data."""
        pull = self.pull  # notes problems
        names = ("lanes", "kv_metrics", "problems", "pull", "available", "environment", "telemetry", "totals", "files")
        telemetry = {"events": self.telemetry, "pulls": self.telemetry_pulls, "pairing": "by order"}
        problems = sorted(self.problems, key=lambda p: p["line"] or 0)
        said = {"problems": problems, "pull": vars(pull), "telemetry": telemetry}
        tables = {"protocols": [t.document() for t in self.tables.values()]}
        return tables | {name: said.get(name, getattr(self, name)) for name in names}


class _Reader:
    """Feeds the lines of one file into the evidence."""

    def __init__(self, evidence: Evidence, file: str) -> None:
        self.evidence, self.file = evidence, file
        self.threads: dict[tuple[Any, ...], _Thread] = {}
        self.cache: dict[bytes, Item] = {}
        self.hanging: tuple[int, bytes, Item] | None = None
        self.event = ""
        self.pending: dict[str, int] = {}
        self.counters: list[tuple[int, str]] = []

    def take(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Take the candidate lines of the file (the hot loop: about two microseconds a line)."""
        known = self.cache.get
        for number, raw in lines:
            item = known(_content(raw))
            if item is None or self.hanging:
                self.line(number, raw)
            elif item.kind != SKIP:
                self.settle(number, raw, item)

    def line(self, number: int, raw: bytes) -> None:
        """Take one line that was not seen before, or that follows one that stopped short."""
        if b"\r" in raw:
            for piece in raw.split(b"\r"):  # a progress bar wrote over itself
                self.line(number, piece)
            return
        if self.hanging and self.joined(number, raw):
            return
        content = _content(raw)
        item = self.cache.get(content)
        if item is None:
            stamped = b"] [" in raw
            if stamped and len(pieces := _SPLICE.split(raw)) > 1 + (not _SPLICE.match(raw)):
                for piece in filter(None, pieces):  # another thread's line broke into this one
                    self.line(number, piece)
                return
            item = parse(logs.clean(raw))
            idle = item.kind == NOTHING or (item.kind == OTHER_ROW and item.text.count("|") < 3)
            if idle and not (item.loose or item.open):
                item.kind, item.text = SKIP, ""
            if len(raw) < 1000 and (item.bracket or content is raw or (not stamped and _STAMP.match(raw))):
                if len(self.cache) > 20_000:
                    self.cache.clear()
                self.cache[content] = item
        self.settle(number, raw, item)

    def settle(self, number: int, raw: bytes, item: Item) -> None:
        """Take a parsed line now, or when it is known whether the next one carries it on."""
        if item.open:
            self.hanging = (number, raw, item)
        elif item.kind != SKIP:
            self.feed(number, item)

    def joined(self, number: int, raw: bytes) -> bool:
        """Settle the line that stopped short: joined with ``raw`` (True), or taken as it is."""
        assert self.hanging
        start, head, item = self.hanging
        self.hanging = None
        if number == start + 1 and len(head) < logs.LINE_MAX and _carries_on(raw):
            again = parse(logs.clean(head + raw))
            if again.kind != OTHER_ROW and (not again.open or again.kind == item.kind):
                self.settle(number if again.open else start, head + raw, again)
                return True
        self.feed(start, item)
        return False

    def feed(self, number: int, item: Item) -> None:
        """Take one parsed line into its thread's state."""
        kind, text, state = item.kind, item.text, item.state
        if kind == NOTHING:
            self.say(number, item)
            return
        if state is None:
            if len(self.threads) > 10_000:  # a hostile log must not grow the memory
                self.finish_threads()
                self.cache.clear()
            state = item.state = self.threads.setdefault(item.key, _Thread())
        table = state.table
        last = table.rows[-1][0] if table and table.rows else None
        if kind == BORDER:
            if last:
                self.close(state)
        elif kind == ROW:
            row: Row = item.data
            if state.other or (last and last.text == row.text):
                return  # the same line twice is one line
            if table is None or (last and (last.max_bytes is None or row.min_bytes <= last.max_bytes)):
                if last:
                    self.close(state)
                self.evidence.problem("row-without-header", number, text)
            else:
                if item.open and table.bars and not row.truncated:
                    row = replace(row, lanes=parse_lanes(row.config, True), truncated=True)
                self.append(table, row, number, text)
        elif kind in (HEADER, ONE_LINE):
            if kind == HEADER and table and not last and table.text == text[-len(table.text) :]:
                return
            self.close(state)
            config, operation = item.data[0] or state.title or (None, None, None), item.data[1]
            state.title, state.other = None, None
            state.table = Table(self.file, item.key, *config, *operation, number)  # type: ignore[call-arg]
            state.table.bars, state.table.text = text.rstrip().endswith("|"), text[-120:]
            if kind == ONE_LINE:
                self.append(state.table, item.data[2], number, text)
        elif kind == TITLE:
            self.close(state)
            state.title, state.other = item.data, None
        elif kind == LANES:
            self.keep_lanes(number, item.key, *item.data)
        elif kind == OTHER_TITLE:
            self.close(state)
            state.other = ("available", None)
            if found := item.data:
                lanes: dict[str, list[str]] = {}
                self.keep_lanes(number, item.key, (found[2], found[3], int(found[1][:9])), lanes)
                state.other = (lanes, "")
        elif kind == OTHER_ROW and state.other:
            self.other_row(number, state, item.data)
        elif kind == OTHER_ROW:
            self.say(number, item)

    def append(self, table: Table, row: Row, number: int, text: str) -> None:
        if len(table.rows) < KEEP:
            table.rows.append((row, number))
        if row.truncated and table.is_read:
            code = "config-cut" if len(row.config) >= CONFIG_MAX else "row-cut"
            self.evidence.problem(code, number, text)

    def close(self, state: _Thread) -> None:
        if state.table:
            self.evidence.add(state.table)
            state.table = None

    def finish_threads(self) -> None:
        for state in self.threads.values():
            self.close(state)
        self.threads.clear()

    def finish(self) -> None:
        """Take what is still open at the end of the file."""
        if self.hanging:
            start, _, item = self.hanging
            self.hanging = None
            self.feed(start, item)
        self.finish_threads()
        self.end_pull()
        lines = dict(self.counters)
        for code, number, advice in counter_text.findings(counter_text.read(self.counters)):
            self.evidence.problem(code, number, lines[number], advice)

    def keep_lanes(
        self, number: int, key: tuple[Any, ...], config: tuple[Any, ...], lanes: dict[str, list[str]]
    ) -> None:
        same = dict(zip(("host", "pid", "thread", "context", "locality", "config"), (*key[:3], *config), strict=True))
        same |= {"lanes": lanes, "file": self.file}
        known = next((x for x in self.evidence.lanes[-20:] if same.items() <= x.items()), None) if lanes else None
        if known:
            known["count"] += 1
        else:
            self.evidence.keep(self.evidence.lanes, "lanes", {**same, "line": number, "count": 1})

    def other_row(self, number: int, state: _Thread, cells: list[str]) -> None:
        what, before = state.other
        if what == "available" and len(cells) == 4 and cells[0] != "Type":
            cells = [c or b for c, b in zip(cells, before or cells, strict=True)] if before else cells
            state.other = (what, [*cells[:2], "", ""])
            transports, devices = (
                [{name: x, "enabled": sign == "+"} for sign, x in re.findall(r"([+-]) (\S+)", cell)]
                for name, cell in (("transport", cells[2]), ("device", cells[3]))
            )
            if transports:
                entry = {"type": cells[0], "component": cells[1], **transports[0], "devices": devices, "line": number}
                self.evidence.keep(self.evidence.available, "available", entry)
        elif isinstance(what, dict) and len(cells) == 4 and cells[0] != "Transport":
            transport = cells[0] or before
            state.other = (what, transport)
            for kind in [x.strip().split("#")[0] for x in cells[3].split(",")][: 64 - len(what)]:
                lanes = what.setdefault(kind, [])
                lanes += [f"{transport}/{cells[1].split(' (')[0]}"] if len(lanes) < 64 else []

    def say(self, number: int, item: Item) -> None:
        """Take what a line outside tables says; :func:`_loose` names the methods below."""
        for what, said in item.loose:
            getattr(self, what)(number, item.text, said)

    def metrics(self, number: int, text: str, metrics: dict[str, Any]) -> None:
        evidence = self.evidence
        transfers, size = metrics["num_successful_transfers"], metrics["avg_mb_per_transfer"]
        descriptors = metrics["avg_number_of_descriptors"]
        if transfers != 0 and size and descriptors:
            each = size * 2**20 / descriptors
            evidence.kv_sizes = [min([*evidence.kv_sizes, each]), max([*evidence.kv_sizes, each])]
        values = [1, metrics["avg_xfer_time_ms"], metrics["avg_post_time_ms"], size, descriptors]
        if transfers and None not in values:
            evidence.kv_sums = [a + transfers * b for a, b in zip(evidence.kv_sums, values, strict=True)]
        if metrics["failed_interval"]:
            evidence.problem("failed-interval", number, text)
        evidence.keep(evidence.kv_metrics, "kv_metrics", {"line": number, "file": self.file, **metrics})

    def telemetry(self, number: int, text: str, said: tuple[str, str]) -> None:
        """Count an event of NIXL's telemetry reader; four of them in a row are one pull, by order alone."""
        if said[0] == "Event":
            self.event = said[1]
            return
        event, sums = self.event, self.evidence.telemetry
        if not event or not said[1].isdecimal():
            return
        self.event, value = "", int(said[1][:18])
        if event not in sums and len(sums) >= KEEP:
            return
        total = sums.setdefault(event, {"count": 0, "sum": 0})
        total["count"], total["sum"] = total["count"] + 1, total["sum"] + value
        if (name := _TELEMETRY.get(event)) == "post_us":
            self.end_pull()
        if name:
            self.pending.setdefault(name, value)

    def end_pull(self) -> None:
        if "xfer_us" in self.pending:
            self.evidence.keep(self.evidence.telemetry_pulls, "telemetry pulls", self.pending)
        self.pending = {}

    def counter(self, number: int, text: str, _: None) -> None:
        if len(self.counters) < KEEP:
            self.counters.append((number, text[:300]))

    def memory(self, number: int, text: str, device: str) -> None:
        self.evidence.buffer_device = device

    def variable(self, number: int, text: str, said: tuple[str, str]) -> None:
        environment = self.evidence.environment
        values = environment.setdefault(said[0], []) if len(environment) < KEEP else []
        entry = {"value": said[1].strip("'\"")[:300], "seen_by_ucx": "env variables:" in text}
        if len(values) < 20 and not any(entry.items() <= v.items() for v in values):
            values.append({"value": entry["value"], "line": number, "file": self.file, **entry})

    def symptom(self, number: int, text: str, said: tuple[str, str]) -> None:
        more = {"reasons": logs.reasons(text)} if said[0] == "no-active-message-transport" else {}
        self.evidence.problem(said[0], number, text, said[1], **more)


_SPLICE = re.compile(rb"(?<=\S)\s*(?=\[\d{9,10}\.\d{6}\] \[[^\]]+:\d+\s*:\w+\])")
#: no field of a metrics line has a name this long; the search for names must stay quick
_RUN = re.compile(r"[A-Za-z0-9 ]{80,}")
_STAMP = re.compile(rb"\[\d+\.\d+\]")
_EVENT = re.compile(r"\b(Event|Value): (\w+)\s*$")
_BUFFER = re.compile(r"\bkv_buffer_device: (\w+)")
_TELEMETRY = {
    "agent_xfer_post_time": "post_us",
    "agent_xfer_time": "xfer_us",
    "agent_rx_bytes": "bytes",
    "agent_rx_requests_num": "requests",
}


def _content(raw: bytes) -> bytes:
    """Return a line without its time stamp: the same words come again and again."""
    at = raw.find(b"] [")
    return raw[at + 2 :] if at >= 0 else raw[raw.find(b"]") + 1 :] if raw[:1] == b"[" else raw


def _carries_on(raw: bytes) -> bool:
    """Tell whether a line looks like the rest of a table row that was wrapped."""
    text = raw.strip()
    if not text or b"] [" in raw or text[:1] in b"[(|+{" or len(text) > 400:
        return False
    return text.endswith(b"|") or b"% on " in text or b"/path" in text


def read(
    sources: logs.Source | Iterable[logs.Source],
    descriptor_bytes: int | None = None,
    local: str | None = None,
    remote: str | None = None,
) -> Evidence:
    """Read logs in one pass and return the evidence.

    :param sources: paths, ``-`` for standard input, or binary streams; gzip, zstd, xz and bzip2 are seen
    :param descriptor_bytes: size of one descriptor of the pull; None: from vLLM's metrics lines, or assumed
    :param local: memory kind of the reading side (``cuda``, ``host``, ``VRAM``, ``DRAM``, ...); None: any
    :param remote: memory kind of the side that is read
    :raises BadInput: when a source cannot be opened
    """
    local, remote = (_MEMORY_KINDS.get(kind or "", kind) for kind in (local, remote))
    evidence = Evidence(descriptor_bytes, local, remote)
    for source in logs.as_list(sources):
        with contextlib.closing(logs.Input(source)) as log:
            evidence.files.append(log.name)
            before = evidence.size
            reader = _Reader(evidence, log.name)
            reader.take(log.candidates())
        reader.finish()
        evidence.lines_read += log.lines
        if log.fault and evidence.size == before:
            said = f"{log.name} {log.fault}"
            evidence.problem("nothing-to-read", None, said, f"{said}; {logs.WANTED}")
        elif log.damage:
            evidence.problem("input-damaged", log.lines, f"{log.name}: {log.damage}")
    return evidence


def transport_rows(evidence: Evidence, arm: str, process: str) -> pd.DataFrame:
    """Return the tables as rows of the run folder's ``transports`` table; those that decide are marked."""
    import pandas as pd

    _ = evidence.pull
    deciding = {(id(t), n) for t, _, n in evidence.deciding}
    of_table = ("locality", "local", "remote")
    of_row = ("min_bytes", "max_bytes", "description", "config", "selections")
    rows = [
        {
            **{"arm": arm, "process": process, "host": table.key[0], "pid": table.key[1]},
            "operation": table.operation + (f"({','.join(table.attributes)})" if table.attributes else ""),
            **{name: getattr(table, name) for name in of_table},
            **{name: getattr(row, name) for name in of_row},
            "transport": "+".join(row.transports) or None,
            "emulated": row.emulated,
            "decides": (id(table), line) in deciding,
            "file": table.file.rsplit("/", 1)[-1],
            "line": line,
        }
        for table in evidence.tables.values()
        for row, line in table.rows
    ]
    columns = list(rows[0]) if rows else ["arm", "selections", "decides"]
    frame = pd.DataFrame(rows, columns=columns)
    whole = [c for c in ("pid", "min_bytes", "max_bytes", "selections", "line") if c in frame]
    return frame.astype(dict.fromkeys(whole, "Int64"))


__all__ = [
    "ALIASES", "KNOWN_TRANSPORTS", "Evidence", "Lane", "Pull", "Row", "Table",
    "agrees", "known_transport", "read", "transport_rows",
]  # fmt: skip
