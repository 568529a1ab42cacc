"""The tidy tables of a run folder: every column with its type, label and unit, once, as data.

Charts and tables read labels and units from here (:func:`label`), Parquet files carry them as field
metadata, and :func:`conform` refuses a table that does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass

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

#: table name -> its columns.  A run may leave out optional columns; an unknown column is refused.
TABLES: dict[str, tuple[Column, ...]] = {
    "pulls": (
        Column("arm", _S, "Arm", required=True),
        Column("rank", _I, "Decode TP rank"),
        Column("pair", _I, "Agent pair"),
        Column("engine", _S, "Engine"),
        Column("request", _S, "Request"),
        Column("prompt_tokens", _I, "Prompt length", "tokens"),
        Column("case", _S, "Case"),
        Column("shape", _S, "Block placement"),
        Column("descriptors", _I, "Descriptors"),
        Column("descriptors_source", _S, "Descriptor count from"),
        Column("descriptor_bytes", _I, "Descriptor size", "B"),
        Column("bytes", _I, "Bytes", "B", required=True),
        Column("post_us", _F, "Post", "µs", required=True),
        Column("xfer_us", _F, "Pull (post + drain)", "µs", required=True),
        Column("post_clock_us", _F, "Post by our clock", "µs"),
        Column("xfer_clock_us", _F, "Pull by our clock", "µs"),
        Column("poll_interval_us", _F, "Poll interval", "µs"),
        Column("in_flight", _I, "Pulls in flight"),
        Column("nixl_threads", _I, "NIXL threads"),
        Column("link", _S, "Link"),
        Column("block_size", _I, "Block size", "tokens"),
        Column("start_s", _F, "Start since the run began", "s"),
        Column("start_uncertainty_s", _F, "Uncertainty of the start", "s"),
        Column("phase", _S, "Phase"),
        Column("start", _I, "Start of the engines"),
        Column("concurrency", _I, "Requests in flight"),
        Column("repetition", _I, "Repetition"),
        Column("warmup", _B, "Warm-up"),
        Column("verified", _B, "Content verified"),
        Column("error", _S, "Error"),
    ),
    "requests": (
        Column("arm", _S, "Arm", required=True),
        Column("request", _S, "Request", required=True),
        Column("phase", _S, "Phase"),
        Column("start", _I, "Start of the engines"),
        Column("repetition", _I, "Repetition"),
        Column("warmup", _B, "Warm-up"),
        Column("concurrency", _I, "Requests in flight"),
        Column("rate_rps", _F, "Offered rate", "requests/s"),
        Column("chunk_tokens", _I, "Prefill chunk (max-num-batched-tokens)", "tokens"),
        Column("block_size", _I, "Block size", "tokens"),
        Column("prompt_tokens", _I, "Prompt length", "tokens"),
        Column("output_tokens", _I, "Output", "tokens"),
        Column("pulled_tokens", _I, "Prompt length of the pulls beside it", "tokens"),
        Column("start_s", _F, "Start since the run began", "s"),
        Column("ttft_ms", _F, "Time to first token", "ms"),
        Column("prefill_ms", _F, "Prefill request", "ms"),
        Column("e2e_ms", _F, "Whole request", "ms"),
        Column("gaps_ms", pa.list_(_F), "Gaps between tokens", "ms"),
        Column("longest_gap_ms", _F, "Longest gap", "ms"),
        Column("error", _S, "Error"),
    ),
    "transports": (
        Column("arm", _S, "Arm", required=True),
        Column("process", _S, "Process"),
        Column("host", _S, "Host"),
        Column("pid", _I, "Process id"),
        Column("operation", _S, "Operation"),
        Column("locality", _S, "Where the peer is"),
        Column("local", _S, "Local memory"),
        Column("remote", _S, "Remote memory"),
        Column("min_bytes", _I, "From size", "B"),
        Column("max_bytes", _I, "To size", "B"),
        Column("description", _S, "Protocol"),
        Column("config", _S, "Lanes"),
        Column("selections", _I, "Times selected"),
        Column("transport", _S, "Transport"),
        Column("emulated", _B, "Software emulation"),
        Column("decides", _B, "Decides for the pull"),
        Column("file", _S, "File"),
        Column("line", _I, "Line"),
    ),
    "verdicts": (
        Column("arm", _S, "Arm", required=True),
        Column("expected", _S, "Expected transport"),
        Column("transport", _S, "Transport of the payload"),
        Column("likely", _S, "Likely transport"),
        Column("devices", _S, "Devices"),
        Column("emulated", _B, "Software emulation"),
        Column("agrees", _B, "Evidence agrees with the label"),
        Column("verdict", _S, "Verdict"),
        Column("evidence", _S, "Evidence"),
    ),
    "counters": (
        Column("arm", _S, "Arm", required=True),
        Column("device", _S, "Device", required=True),
        Column("kind", _S, "Kind of device"),
        Column("counter", _S, "Counter"),
        Column("before_bytes", _F, "Before", "B"),
        Column("after_bytes", _F, "After", "B"),
        Column("delta_bytes", _F, "Counted", "B"),
        Column("background_bytes", _F, "Background expected", "B"),
        Column("background_uncertainty_bytes", _F, "Uncertainty of the background", "B"),
        Column("usable", _B, "Usable"),
        Column("note", _S, "Note"),
    ),
    "limits": (
        Column("name", _S, "Limit", required=True),
        Column("kind", _S, "Kind"),
        Column("bytes", _I, "Bytes", "B"),
        Column("seconds", _F, "Duration", "s"),
        Column("gb_per_s", _F, "Rate", "GB/s", required=True),
        Column("link", _S, "Link"),
        Column("repetition", _I, "Repetition"),
        Column("prompt_tokens", _I, "Prompt length", "tokens"),
    ),
    "engine_metrics": (
        Column("arm", _S, "Arm", required=True),
        Column("engine", _S, "Engine"),
        Column("phase", _S, "Phase"),
        Column("metric", _S, "Metric", required=True),
        Column("labels", _S, "Labels"),
        Column("before", _F, "Before"),
        Column("after", _F, "After"),
        Column("delta", _F, "Difference"),
        Column("restarted", _B, "Counter restarted"),
    ),
    "steps": (
        Column("arm", _S, "Arm", required=True),
        Column("prefix_tokens", _I, "Tokens before the step", "tokens"),
        Column("chunk_tokens", _I, "Tokens in the step", "tokens"),
        Column("step_ms", _F, "Step", "ms", required=True),
        Column("prompt_tokens", _I, "Prompt length", "tokens"),
        Column("repetition", _I, "Repetition"),
    ),
    "phases": (
        Column("arm", _S, "Arm", required=True),
        Column("phase", _S, "Phase", required=True),
        Column("start", _I, "Start of the engines"),
        Column("repetition", _I, "Repetition"),
        Column("warmup", _B, "Warm-up"),
        Column("prompt_tokens", _I, "Prompt length", "tokens"),
        Column("output_tokens", _I, "Output", "tokens"),
        Column("concurrency", _I, "Requests in flight"),
        Column("chunk_tokens", _I, "Prefill chunk (max-num-batched-tokens)", "tokens"),
        Column("block_size", _I, "Block size", "tokens"),
        Column("rate_rps", _F, "Offered rate", "requests/s"),
        Column("requests", _I, "Requests"),
        Column("failed", _I, "Failed requests"),
        Column("start_s", _F, "Start since the run began", "s"),
        Column("span_s", _F, "Whole phase", "s"),
        Column("duration_s", _F, "Duration", "s"),
        Column("pulled_tokens", _I, "Prompt length of the pulls beside it", "tokens"),
        Column("requests_per_s", _F, "Requests per second", "1/s"),
        Column("output_tokens_per_s", _F, "Output tokens per second", "1/s"),
        Column("pulls", _I, "Pulls seen in the ring"),
        Column("pulled_bytes", _F, "Bytes by the ring", "B"),
        Column("vllm_transfers", _F, "Transfers by vLLM's counters"),
        Column("vllm_bytes", _F, "Bytes by vLLM's counters", "B"),
        Column("vllm_descriptors", _F, "Descriptors by vLLM's counters"),
        Column("note", _S, "Note"),
    ),
    "answers": (
        Column("arm", _S, "Arm", required=True),
        Column("start", _I, "Start of the engines"),
        Column("prompt", _I, "Prompt"),
        Column("tokens", _I, "Tokens compared"),
        Column("largest_logprob_difference", _F, "Largest difference of log-probabilities"),
        Column("tolerance", _F, "Tolerance"),
    ),
    "cells": (
        Column("arm", _S, "Arm"),
        Column("case", _S, "Case", required=True),
        Column("link", _S, "Link"),
        Column("outcome", _S, "Outcome"),
        Column("quantity", _S, "Quantity"),
        Column("value", _F, "Value"),
        Column("unit", _S, "Unit"),
        Column("repetition", _I, "Repetition"),
        Column("note", _S, "Note"),
    ),
}


def column(table: str, name: str) -> Column:
    """Return the column ``name`` of ``table``; raises KeyError when the schema has none."""
    return next(c for c in TABLES[table] if c.name == name)


def label(table: str, name: str) -> str:
    """Return the axis label: ``Post (µs)``."""
    c = column(table, name)
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
