"""1 GB of mixed log in 20 s or less, in memory that does not grow with it (run by hand: -m slow)."""

from __future__ import annotations

import gzip
import io
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard

from kvlab.capture import ucx

DATA = Path(__file__).parent.parent / "data" / "ucx"
HTTP = b'(APIServer pid=11255) INFO:     127.0.0.1:50244 - "POST /v1/completions HTTP/1.1" 200 OK\n'
KV = (
    b"(APIServer pid=11255) INFO 12-01 03:00:05 [metrics.py:107] KV Transfer metrics: Num successful transfers=2, "
    b"Avg xfer time (ms)=12.222, Avg post time (ms)=0.207, Avg MB per transfer=5.0, Avg number of descriptors=68.0\n"
)


class Endless(io.RawIOBase):
    """``total`` bytes of ``block`` over and over, without holding them."""

    def __init__(self, block: bytes, total: int) -> None:
        self.block, self.left, self.at = block, total, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = min(len(buffer), self.left, len(self.block) - self.at)
        buffer[:n] = self.block[self.at : self.at + n]
        self.at = (self.at + n) % len(self.block)
        self.left -= n
        return n


def mixed() -> bytes:
    """A block of an engine's log: half tables of UCX, half requests, some metrics and warnings."""
    tables = b"".join(p.read_bytes() for p in sorted(DATA.glob("*_y.log")))
    return tables + HTTP * (len(tables) // len(HTTP)) + KV * 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd"])
def test_a_gigabyte(kind: str, tmp_path: Path, record_property: Any) -> None:
    block, total = mixed() * 40, 10**9
    path = tmp_path / "log"
    copies = total // len(block)
    if kind == "gzip":
        path.write_bytes(gzip.compress(block) * copies)
    elif kind == "zstd":
        path.write_bytes(zstandard.ZstdCompressor().compress(block) * copies)
    source: Any = io.BufferedReader(Endless(block, total)) if kind == "plain" else path
    ucx.read(io.BytesIO(block))
    process = psutil.Process()
    before = process.memory_info().rss
    start = time.perf_counter()
    evidence = ucx.read(source)
    seconds = time.perf_counter() - start
    grown = process.memory_info().rss - before
    print(f"{kind}: {seconds:.1f} s, memory grew by {grown / 2**20:.0f} MiB")
    record_property("seconds", seconds)
    assert evidence.totals["protocols"] > 10_000
    assert grown < 100 * 2**20
    assert seconds <= 20
