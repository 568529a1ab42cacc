"""The tidy tables of a run folder: every column with its type, label and unit, once, as data.

Charts and tables read labels and units from here (:func:`label`), Parquet files carry them as field
metadata, and :func:`conform` refuses a table that does not fit.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pyarrow as pa

from kvlab.errors import BadInput


@dataclass(frozen=True)
class Column:
    """One column: Arrow type, label for people, unit ('' for none), whether it must be there."""

    name: str
    type: pa.DataType
    label: str
    unit: str = ""
    required: bool = False


def _described() -> dict[str, tuple[pa.DataType, str, str]]:
    types = {"string": pa.string(), "int64": pa.int64(), "double": pa.float64(), "bool": pa.bool_()}
    types["list<double>"] = pa.list_(pa.float64())
    with Path(__file__).with_name("columns.csv").open(encoding="utf-8", newline="") as file:
        return {c["column"]: (types[c["type"]], c["label"], c["unit"]) for c in csv.DictReader(file)}


#: columns.csv: column (or TABLE.column, where it means something else in one table) -> type, label, unit
_COLUMNS = _described()
#: table -> its columns in order, ``!`` after those that must be there
_TABLES = {
    "pulls": (
        "arm! rank pair engine request prompt_tokens case shape descriptors descriptors_source "
        "descriptor_bytes bytes! post_us! xfer_us! post_clock_us xfer_clock_us poll_interval_us in_flight "
        "nixl_threads link block_size start_s start_uncertainty_s phase start concurrency repetition warmup "
        "verified error"
    ),
    "requests": (
        "arm! request! phase start repetition warmup concurrency rate_rps chunk_tokens block_size "
        "prompt_tokens output_tokens pulled_tokens start_s ttft_ms prefill_ms e2e_ms gaps_ms longest_gap_ms "
        "error"
    ),
    "transports": (
        "arm! process host pid operation locality local remote min_bytes max_bytes description config "
        "selections transport emulated decides file line"
    ),
    "verdicts": "arm! expected transport likely devices emulated agrees verdict evidence",
    "counters": (
        "arm! device! kind counter before_bytes after_bytes delta_bytes background_bytes "
        "background_uncertainty_bytes usable note"
    ),
    "limits": "name! kind bytes seconds gb_per_s! link repetition prompt_tokens",
    "engine_metrics": "arm! engine phase metric! labels before after delta restarted",
    "steps": "arm! prefix_tokens chunk_tokens step_ms! ordinary_ms prompt_tokens repetition",
    "phases": (
        "arm! phase! start repetition warmup prompt_tokens output_tokens concurrency chunk_tokens block_size "
        "rate_rps requests failed start_s span_s duration_s pulled_tokens requests_per_s output_tokens_per_s "
        "pulls pulled_bytes vllm_transfers vllm_bytes vllm_descriptors note"
    ),
    "answers": "arm! start prompt tokens largest_logprob_difference tolerance",
    "cells": "arm case! link outcome quantity value unit repetition note",
}


def _columns(table: str, names: str) -> tuple[Column, ...]:
    found = []
    for name in names.split():
        plain = name.rstrip("!")
        found.append(Column(plain, *_COLUMNS.get(f"{table}.{plain}", _COLUMNS[plain]), name != plain))
    return tuple(found)


#: table name -> its columns.  A run may leave out optional columns; an unknown column is refused.
TABLES = {table: _columns(table, names) for table, names in _TABLES.items()}


def label(table: str, name: str) -> str:
    """Return the axis label: ``Post (µs)``; raises KeyError when the table has no such column."""
    c = {c.name: c for c in TABLES[table]}[name]
    return f"{c.label} ({c.unit})" if c.unit else c.label


def conform(table: str, frame: pd.DataFrame) -> pa.Table:
    """Check ``frame`` against the schema of ``table`` and return it as Arrow, labels and units attached.

    Raises BadInput naming the column that is missing, unknown or of the wrong type.
    """
    if table not in TABLES:
        raise BadInput(f"no table named {table!r} in a run folder; known: {', '.join(TABLES)}")
    columns = {c.name: c for c in TABLES[table]}
    unknown = [str(c) for c in frame.columns if c not in columns]
    if unknown:
        raise BadInput(f"table {table}: unknown column {unknown[0]!r}; known: {', '.join(columns)}")
    missing = [c.name for c in columns.values() if c.required and c.name not in frame.columns]
    if missing:
        raise BadInput(f"table {table}: column {missing[0]!r} is missing")
    arrays, fields = [], []
    for name in (c for c in columns if c in frame.columns):
        c = columns[name]
        try:
            arrays.append(pa.Array.from_pandas(frame[name], type=c.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise BadInput(f"table {table}: column {name!r} is not {c.type}: {error}") from None
        fields.append(pa.field(name, c.type, metadata={"label": c.label, "unit": c.unit}))
    return pa.table(arrays, schema=pa.schema(fields))
