"""1 million requests with 256 gaps each, from Parquet to the ranking, in 60 s and 8 GB (by hand: -m slow)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REQUESTS, GAPS = 1_000_000, 256
PART = 50_000

ANALYSE = """
import json, resource, sys, time
import pyarrow.parquet as pq
from kvlab.analysis import stalls
start = time.perf_counter()
table = pq.read_table(sys.argv[1])
rows = stalls.summary(table, by=("arm", "rate_rps"))
cells = stalls.grid(table, range(250, 4250, 250), range(10, 130, 10))
ranked = stalls.rank(cells)
print(json.dumps({
    "seconds": time.perf_counter() - start,
    "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    "n": int(rows["n"].sum()), "groups": len(rows), "cells": len(ranked),
    "stall": float(rows["gap_median_ms"].max()), "outcomes": sorted(ranked["outcome"].unique()),
}))
"""


def write(path: Path) -> None:
    """Two arms, four loads; the gaps are written part by part, so that making them needs little memory."""
    rng = np.random.default_rng(1)
    writer = None
    for start in range(0, REQUESTS, PART):
        values = np.round(rng.exponential(10, PART * GAPS), 2)
        values[::GAPS] = 500.0  # the longest of every request
        gaps = pa.ListArray.from_arrays(np.arange(0, PART * GAPS + 1, GAPS, dtype=np.int32), pa.array(values))
        i = np.arange(start, start + PART)
        columns = {
            "arm": pa.array(np.where(i % 2, "tuned", "1P1D")),
            "request": pa.array(i.astype(str)),
            "rate_rps": (i // 2 % 4 + 1).astype(float),
            "ttft_ms": rng.exponential(300, PART),
            "output_tokens": np.full(PART, GAPS + 1),
            "start_s": i / 100,
            "e2e_ms": np.full(PART, 2500.0),
            "gaps_ms": gaps,
        }
        table = pa.table(columns)
        writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
    assert writer is not None
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["groups", "one group"])
def test_a_million_requests(kind: str, tmp_path: Path, record_property: Any) -> None:
    path = tmp_path / "requests.parquet"
    write(path)
    code = ANALYSE if kind == "groups" else ANALYSE.replace('by=("arm", "rate_rps")', 'by=("output_tokens",)')
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True).stdout
    found = json.loads(out)
    print(f"{kind}: {found}")
    record_property("found", found)
    assert (found["n"], found["stall"], found["cells"]) == (REQUESTS, 500.0, 192)
    assert found["groups"] == (8 if kind == "groups" else 1)
    assert found["seconds"] <= 60
    assert found["peak_gb"] <= 8
