"""Reading any log as a stream: decompression, the lines worth a look, and the known symptoms in them.

Memory stays bounded: a log is read in chunks, a chunk is searched for a few marks, and only lines that hold
one are handed on.  Line numbers count newlines, as ``grep -n`` does.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import gzip
import io
import lzma
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kvlab.errors import BadInput

Source = str | Path | BinaryIO
CHUNK = 1 << 18
#: of a longer line only this much is looked at
LINE_MAX = 1 << 13
#: what a line must hold to be looked at; debug, trace, request and data lines of UCX's own log are chatter
MARKS = (
    r"\||\+--|UCX(?:  (?:DI|[^TRD])| ?[^ ])|cfg|NIXL|nixl|NixlPush|KV |ZMQ|zmq\.error|messages transport|zero-copy"
    r"|get zcopy|ALLOC_CONF|across cluster|kv_buffer_device|failed to start|expandable_seg|/dev/shm|Heterogeneous TP"
    r"|Event: |Value: |/sys/class/|_bytes|PortXmit|PortRcv|port_xmit_|port_rcv_|counters: Lid|ethtool -"
)
#: a line with a mark is UCX's or NIXL's for certain
_THEIRS = re.compile(
    rb"UCX[_ ]|ucp_|[Nn]ixl|NIXL|cfg#|ep_cfg\[|Endpoint Config #|Available Transports|KV Transfer|\.\.\s*inf\b"
)
#: not in text; colours, progress bars and holes (NUL) are
_CONTROL = bytes({*range(1, 8), *range(14, 27), *range(28, 32)})
#: what to do about a log that tells nothing
WANTED = "give the log of the side that reads (decode), run with UCX_PROTO_INFO=used"
ESCAPES = re.compile(r"(?:\x1b|\\x1b|\\033|\\e|\\u001b|␛|\^\[)\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m(?![\w.])|\x00")


def _zstd(stream: Any) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)


def _utf16(stream: Any) -> Any:
    return codecs.EncodedFile(stream, "utf-8", "utf-16", errors="replace")


#: first bytes of a stream -> what reads it
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"\x28\xb5\x2f\xfd": _zstd,
    b"\xfd7zX": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
    b"\xff\xfe": _utf16,
    b"\xfe\xff": _utf16,
}


class Input:
    """One log, decompressed by its first bytes (gzip, zstd, xz, bzip2; UTF-16 too), read as a stream.

    ``lines`` counts the lines read so far; ``damage`` says why a compressed stream ended early ('' if it
    did not); ``binary``: it begins as no text does.  Raises BadInput when the source cannot be opened.
    """

    def __init__(self, source: Source) -> None:
        named = str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "stream"))
        self.name = "standard input" if named == "-" else named
        self.lines, self.damage = 0, ""
        self.binary: bool | None = None
        self._own: BinaryIO | None = None
        try:
            raw: Any = sys.stdin.buffer if str(source) == "-" else source
            if isinstance(raw, str | Path):
                raw = self._own = open(raw, "rb")  # noqa: SIM115
            stream: Any = raw if hasattr(raw, "peek") else io.BufferedReader(raw)
            head = stream.peek(4)[:4]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"{self.name} cannot be read: {reason}") from None
        self._stream = next((unpack(stream) for mark, unpack in _PACKED.items() if head.startswith(mark)), stream)

    def close(self) -> None:
        """Close what was opened here."""
        if self._own:
            self._own.close()

    @property
    def fault(self) -> str:
        """Why nothing was found, if the file as a whole is to blame."""
        if not self.lines:
            return f"cannot be read: {self.damage}" if self.damage else "is empty"
        return "is not text" if self.binary else ""

    def _read(self, most: int) -> bytes:
        try:
            data = bytes(self._stream.read(most))
            if self.binary is None:
                self.binary = len(data) - len(data.translate(None, _CONTROL)) > len(data) / 100
            return data
        except Exception as error:
            # Each decompressor has its own errors; what was read before the damage counts.
            self.damage = str(error) or type(error).__name__
            return b""

    def read(self, most: int) -> bytes:
        """Return the first ``most`` bytes, decompressed; damage ends them."""
        parts: list[bytes] = []
        while most > 0 and (data := self._read(min(most, CHUNK))):
            parts.append(data)
            most -= len(data)
        return b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """Yield whole lines in chunks; damage ends the stream."""
        rest = b""
        while data := self._read(CHUNK):
            cut = data.rfind(b"\n") + 1
            if not cut:
                # A line without end must not grow in memory: its beginning is kept, the rest dropped.
                rest += data[: max(0, LINE_MAX - len(rest))]
                continue
            start = data.find(b"\n") if len(rest) >= LINE_MAX else 0
            yield rest + data[start:cut]
            rest = data[cut:]
        if rest:
            yield rest

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number, line) of the lines that hold a mark, and of a line after one that stops short.

        Lines that hold a ``|`` and do not end with one may have been wrapped: the next line is handed on too.
        Arrow searches all lines of a chunk at once: a step of Python for each would cost most of the time.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        wrapped = False
        for chunk in self.chunks():
            text = chunk.replace(b"\r\n", b"\n") if b"\r" in chunk else chunk
            text = text if text.endswith(b"\n") else text + b"\n"
            starts = np.append(0, np.flatnonzero(np.frombuffer(text, np.uint8) == 10) + 1).astype(np.int32)
            count = len(starts) - 1
            lines = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(starts), pa.py_buffer(text)])
            hit = np.append(pc.match_substring_regex(lines, MARKS), False)
            hit[0] |= wrapped
            first, at = self.lines + 1, starts.tolist()
            self.lines += count
            for i in np.flatnonzero(hit[:-1] & np.asarray(pc.invert(pc.ends_with(lines, "|\n")))).tolist():
                hit[i + 1] |= text.find(b"|", at[i], at[i + 1]) >= 0
            wrapped = bool(hit[-1])
            for i in np.flatnonzero(hit[:-1]).tolist():
                yield first + i, text[at[i] : min(at[i + 1] - 1, at[i] + LINE_MAX)]


def nothing_in(source: Source) -> str:
    """Say why a log can tell no transport; '' at its first line of UCX or NIXL."""
    with contextlib.closing(Input(source)) as log:
        found = any(_THEIRS.search(line) for _, line in log.candidates())
        return "" if found else log.fault or "holds no line of UCX or NIXL that tells a transport"


def clean(line: bytes) -> str:
    """Decode one line: colours removed, whole or half stripped; the tail that docker's JSON adds dropped."""
    text = line[:LINE_MAX].decode("utf-8", "replace")
    if "[" in text:
        text = ESCAPES.sub("", text)
    if text.startswith('{"'):
        text = text.split('\\n"', 1)[0]
    return text.rstrip("\r\n")


# -------------------------------------------------------------------------------------------- symptoms

_ROWS = list(csv.DictReader(Path(__file__).with_name("symptoms.csv").read_text("utf-8").splitlines()))
#: symptoms.csv: code, words of which one must be there, pattern, what to do; the first that fits a line counts
_SYMPTOMS = [
    (row["code"], row["words"].split("|"), re.compile(row["pattern"]), row["advice"]) for row in _ROWS if row["words"]
]
#: rows without words: what to do about what only the whole reading shows; two end with how to get the evidence
ADVICE = {row["code"]: row["advice"] for row in _ROWS if not row["words"]}
for _code in ("not-pull-evidence", "self-endpoint-only"):
    ADVICE[_code] += ADVICE["no-evidence"]
_UCX_LEVEL = re.compile(r"\bUCX\s+(FATAL|ERROR|WARN)\b")
_NIXL_LEVEL = re.compile(r"^[EF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\]|\bNIXL (?:ERROR|WARNING)\b")
_HARMLESS = re.compile(r"set UCX_WARN_UNUSED_ENV_VARS=n|unused environment variables?: UCX_HOME\s*$")
_REASON = re.compile(r"([a-z]\w*)(?:/([^\s/]+))? - ([^,]+)")


def symptom(text: str) -> tuple[str, str] | None:
    """Return (code, advice) of the trouble that a line reports, or None."""
    if _HARMLESS.search(text) or "UCX  DIAG" in text:  # the peer closing its sockets is a diagnostic, not trouble
        return None
    for code, words, pattern, advice in _SYMPTOMS:
        if any(w in text for w in words) and pattern.search(text):
            return code, advice
    outside = "outside the known list: read the line, and what stands before it"
    if level := _UCX_LEVEL.search(text):
        return "ucx-warning" if level[1] == "WARN" else "ucx-error", f"an error of UCX {outside}"
    return ("nixl-error", f"an error of NIXL {outside}") if _NIXL_LEVEL.search(text) else None


def reasons(text: str) -> list[dict[str, str | None]]:
    """Read ``self/memory - no peer failure handler, cma/memory - no am bcopy`` into rows."""
    tail = text[:3000].split("transport", 1)[-1].split(": ", 1)[-1]
    return [{"transport": t, "device": d, "reason": r.strip()} for t, d, r in _REASON.findall(tail)]


def as_list(sources: Source | Iterable[Source]) -> list[Source]:
    """Return ``sources`` as a list, one alone too."""
    if isinstance(sources, str | Path) or hasattr(sources, "read"):
        return [cast(Source, sources)]
    return list(sources)
