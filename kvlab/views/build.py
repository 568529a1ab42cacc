"""What several views are built of: tables by column names, points with intervals, and words for what was found."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import great_tables as gt
import pandas as pd

from kvlab import charts, tables
from kvlab.runs import Run


@cache
def _columns() -> dict[str, tuple[str, str]]:
    text = Path(__file__).with_name("columns.csv").read_text("utf-8")
    return {r["column"]: (r["heading"], r["digits"]) for r in csv.DictReader(text.splitlines())}


def table(
    frame: pd.DataFrame,
    name: str,
    title: str,
    columns: str,
    note: str = "",
    digits: Mapping[str, int | None] | None = None,
    **headings: str,
) -> gt.GT:
    """Show ``columns`` (names with spaces between) as columns.csv heads and rounds them.

    :param digits: after the point, where this table's differ; None: as the value is
    :param headings: where this table's differ
    """
    known = {c: _columns().get(c, ("", "")) for c in columns.split()}
    decimals = {c: int(d) for c, (_, d) in known.items() if d.isdigit()} | dict(digits or {})
    return tables.show(
        frame,
        name,
        title=title,
        labels={c: headings.get(c, heading) for c, (heading, _) in known.items()},
        decimals={c: d for c, d in decimals.items() if d is not None},
        percent=tuple(c for c, (_, d) in known.items() if d == "%"),
        note=note,
    )


def intervals(
    frame: pd.DataFrame, run: Run | None, name: str, heading: str, caption: str, x: str, low: str, high: str, **how: Any
) -> charts.Shown:
    """Show :func:`kvlab.charts.points_with_interval` of ``frame``; where an end is missing it is the point."""
    frame = frame.assign(**{end: frame[end].fillna(frame[x]) for end in (low, high)})
    title = charts.title(heading, run, caption)
    return charts.show(charts.points_with_interval(frame, title, x=x, low=low, high=high, **how), name, run)


def in_order(frame: pd.DataFrame, keys: Sequence[str], **orders: Sequence[str]) -> pd.DataFrame:
    """Sort rows by the columns ``keys``; one that ``orders`` names by each value's place there."""
    ranks = {column: {value: i for i, value in enumerate(order)} for column, order in orders.items()}
    key = lambda c: c.map(ranks[c.name]) if c.name in ranks else c  # noqa: E731
    return frame.sort_values(list(keys), key=key, kind="stable")


def transports(run: Run) -> dict[str, str]:
    """Return what the evidence says of each arm; arms without evidence are left out."""
    found = run.table("verdicts").dropna(subset=["transport"])
    return {str(a): str(t) for a, t in zip(found["arm"], found["transport"], strict=True)}


def contradiction(run: Run) -> list[str]:
    """Return the sentence that goes first where the evidence contradicts a label, or nothing."""
    if run.manifest["outcome"] != "contradicted":
        return []
    return ["THE EVIDENCE CONTRADICTS A LABEL: " + "; ".join(run.manifest.get("contradictions", []))]


def span(low: float, high: float, form: str = ".2f") -> str:
    """Write a range, ``1.20 to 1.40``; once where both ends read the same."""
    a, b = (format(v, form) for v in (low, high))
    return a if a == b else f"{a} to {b}"
