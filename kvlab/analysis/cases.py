"""Names of tcp-crossover's cases in table ``cells``, written by what measures and read by what calibrates."""

from __future__ import annotations

import re

import pandas as pd

_CASE = re.compile(
    r"(?P<phase>\w+): (?P<tokens>\d+) tokens(?:, chunk (?P<chunk>\d+))?(?:, (?P<rate>\d+(?:\.\d+)?) Gbps)?"
)


def case(phase: str, tokens: int, *, chunk: int | None = None, gbps: float | None = None) -> str:
    """Name a case of table ``cells``: ``calibrate: 1024 tokens, chunk 256, 4.97 Gbps``."""
    parts = [f"{phase}: {tokens} tokens", f"chunk {chunk}" if chunk else "", f"{gbps:g} Gbps" if gbps else ""]
    return ", ".join(p for p in parts if p)


def points(cells: pd.DataFrame) -> pd.DataFrame:
    """Return the TTFTs of table ``cells`` (quantity ``ttft_ms``, arm ``replica`` or ``1P1D``) by :func:`case`.

    Columns: ``phase`` (calibrate or check), ``arm``, ``prompt_tokens``, ``chunk_tokens``, ``gbps``, ``ttft_ms``.
    """
    rows = []
    for row in cells[cells["quantity"] == "ttft_ms"].itertuples():
        if found := _CASE.fullmatch(str(row.case)):
            chunk, rate = float(found["chunk"] or "nan"), float(found["rate"] or "nan")
            rows.append((found["phase"], row.arm, int(found["tokens"]), chunk, rate, row.value))
    return pd.DataFrame(rows, columns=["phase", "arm", "prompt_tokens", "chunk_tokens", "gbps", "ttft_ms"])
