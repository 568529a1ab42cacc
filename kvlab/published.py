"""Figures that others published, and a few measured for kvlab, as tidy tables under data/published.

Every row has a ``status`` (published, figure, derived, expected, measured) and a ``source``;
data/published/SOURCE.md says what they mean.
"""

from __future__ import annotations

import pandas as pd

from kvlab.errors import BadInput
from kvlab.paths import shared_dir


def names() -> list[str]:
    """Return the names of the tables."""
    return sorted(p.stem for p in (shared_dir("data") / "published").glob("*.csv"))


def load(name: str) -> pd.DataFrame:
    """Return the table ``name``; empty notes are '', a missing number is NaN.  BadInput names the known ones."""
    if name not in names():
        raise BadInput(f"no published table {name!r}; known: {', '.join(names())}")
    frame = pd.read_csv(shared_dir("data") / "published" / f"{name}.csv")
    return frame.assign(note=frame["note"].fillna("")) if "note" in frame else frame


def value(name: str, column: str = "value", **keys: object) -> float:
    """Return the one figure of ``column`` in the row where every column of ``keys`` has the given value.

    For instance ``value("roce_vs_nvlink", quantity="post_time", transport="cuda_ipc", prompt_tokens=16384)``.
    BadInput when a column is not there, or when not exactly one row fits.
    """
    frame = load(name)
    for key in (column, *keys):
        if key not in frame:
            raise BadInput(f"published table {name}: no column {key!r}; known: {', '.join(frame.columns)}")
    for key, wanted in keys.items():
        frame = frame[frame[key] == wanted]
    if len(frame) != 1:
        raise BadInput(f"published table {name}: {len(frame)} rows fit {keys}; name the row by more columns, or others")
    return float(frame[column].iloc[0])
