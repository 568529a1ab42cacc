"""The tidy tables of a run folder: every column with its type, label and unit, once, as data.

Charts and tables read labels and units from here (:func:`label`), Parquet files carry them as field
metadata, and :func:`conform` refuses a table that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


_S, _I, _F, _B = pa.string(), pa.int64(), pa.float64(), pa.bool_()

#: column -> type, label for people, unit
_COLUMNS: dict[str, tuple[Any, ...]] = {
    "arm": (_S, "Arm"),
    "rank": (_I, "Decode TP rank"),
    "pair": (_I, "Agent pair"),
    "engine": (_S, "Engine"),
    "request": (_S, "Request"),
    "prompt_tokens": (_I, "Prompt length", "tokens"),
    "case": (_S, "Case"),
    "shape": (_S, "Block placement"),
    "descriptors": (_I, "Descriptors"),
    "descriptors_source": (_S, "Descriptor count from"),
    "descriptor_bytes": (_I, "Descriptor size", "B"),
    "bytes": (_I, "Bytes", "B"),
    "post_us": (_F, "Post", "µs"),
    "xfer_us": (_F, "Pull (post + drain)", "µs"),
    "post_clock_us": (_F, "Post by our clock", "µs"),
    "xfer_clock_us": (_F, "Pull by our clock", "µs"),
    "poll_interval_us": (_F, "Poll interval", "µs"),
    "in_flight": (_I, "Pulls in flight"),
    "nixl_threads": (_I, "NIXL threads"),
    "link": (_S, "Link"),
    "block_size": (_I, "Block size", "tokens"),
    "start_s": (_F, "Start since the run began", "s"),
    "start_uncertainty_s": (_F, "Uncertainty of the start", "s"),
    "phase": (_S, "Phase"),
    "start": (_I, "Start of the engines"),
    "concurrency": (_I, "Requests in flight"),
    "repetition": (_I, "Repetition"),
    "warmup": (_B, "Warm-up"),
    "verified": (_B, "Content verified"),
    "error": (_S, "Error"),
    "rate_rps": (_F, "Offered rate", "requests/s"),
    "chunk_tokens": (_I, "Prefill chunk (max-num-batched-tokens)", "tokens"),
    "output_tokens": (_I, "Output", "tokens"),
    "pulled_tokens": (_I, "Prompt length of the pulls beside it", "tokens"),
    "ttft_ms": (_F, "Time to first token", "ms"),
    "prefill_ms": (_F, "Prefill request", "ms"),
    "e2e_ms": (_F, "Whole request", "ms"),
    "gaps_ms": (pa.list_(_F), "Gaps between tokens", "ms"),
    "longest_gap_ms": (_F, "Longest gap", "ms"),
    "process": (_S, "Process"),
    "host": (_S, "Host"),
    "pid": (_I, "Process id"),
    "operation": (_S, "Operation"),
    "locality": (_S, "Where the peer is"),
    "local": (_S, "Local memory"),
    "remote": (_S, "Remote memory"),
    "min_bytes": (_I, "From size", "B"),
    "max_bytes": (_I, "To size", "B"),
    "description": (_S, "Protocol"),
    "config": (_S, "Lanes"),
    "selections": (_I, "Times selected"),
    "transport": (_S, "Transport"),
    "emulated": (_B, "Software emulation"),
    "decides": (_B, "Decides for the pull"),
    "file": (_S, "File"),
    "line": (_I, "Line"),
    "expected": (_S, "Expected transport"),
    "likely": (_S, "Likely transport"),
    "devices": (_S, "Devices"),
    "agrees": (_B, "Evidence agrees with the label"),
    "verdict": (_S, "Verdict"),
    "evidence": (_S, "Evidence"),
    "device": (_S, "Device"),
    "kind": (_S, "Kind of device"),
    "counter": (_S, "Counter"),
    "before_bytes": (_F, "Before", "B"),
    "after_bytes": (_F, "After", "B"),
    "delta_bytes": (_F, "Counted", "B"),
    "background_bytes": (_F, "Background expected", "B"),
    "background_uncertainty_bytes": (_F, "Uncertainty of the background", "B"),
    "usable": (_B, "Usable"),
    "note": (_S, "Note"),
    "name": (_S, "Limit"),
    "seconds": (_F, "Duration", "s"),
    "gb_per_s": (_F, "Rate", "GB/s"),
    "metric": (_S, "Metric"),
    "labels": (_S, "Labels"),
    "before": (_F, "Before"),
    "after": (_F, "After"),
    "delta": (_F, "Difference"),
    "restarted": (_B, "Counter restarted"),
    "prefix_tokens": (_I, "Tokens before the step", "tokens"),
    "step_ms": (_F, "Step", "ms"),
    "ordinary_ms": (_F, "Ordinary step", "ms"),
    "requests": (_I, "Requests"),
    "failed": (_I, "Failed requests"),
    "span_s": (_F, "Whole phase", "s"),
    "duration_s": (_F, "Duration", "s"),
    "requests_per_s": (_F, "Requests per second", "1/s"),
    "output_tokens_per_s": (_F, "Output tokens per second", "1/s"),
    "pulls": (_I, "Pulls seen in the ring"),
    "pulled_bytes": (_F, "Bytes by the ring", "B"),
    "vllm_transfers": (_F, "Transfers by vLLM's counters"),
    "vllm_bytes": (_F, "Bytes by vLLM's counters", "B"),
    "vllm_descriptors": (_F, "Descriptors by vLLM's counters"),
    "prompt": (_I, "Prompt"),
    "tokens": (_I, "Tokens compared"),
    "largest_logprob_difference": (_F, "Largest difference of log-probabilities"),
    "tolerance": (_F, "Tolerance"),
    "outcome": (_S, "Outcome"),
    "quantity": (_S, "Quantity"),
    "value": (_F, "Value"),
    "unit": (_S, "Unit"),
}
#: where a column means something else in one table
_OWN: dict[tuple[str, str], tuple[Any, ...]] = {
    ("steps", "chunk_tokens"): (_I, "Tokens in the step", "tokens"),
    ("verdicts", "transport"): (_S, "Transport of the payload"),
    ("limits", "kind"): (_S, "Kind"),
}
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
        kind, text, unit = (*_OWN.get((table, plain), _COLUMNS[plain]), "")[:3]
        found.append(Column(plain, kind, text, unit, name != plain))
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
