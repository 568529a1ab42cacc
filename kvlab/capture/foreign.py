"""What people have from elsewhere: telling its format by its content, and reading it into tidy tables.

Formats, as their own sources say them:

- ``metrics``: ``/metrics`` of vLLM, Prometheus text (:mod:`kvlab.capture.vllm`).
- ``vllm-bench``: result JSON of ``vllm bench serve``; per-request lists (seconds) only with ``--save-detailed``.
- ``aiperf``: AIPerf's ``profile_export.jsonl``, a record a request: ``metadata``, ``metrics`` (value, unit), ``error``
  (docs.nvidia.com/aiperf, Working with Profile Export Files).
- ``guidellm``: GuideLLM's benchmarks JSON, ``benchmarks[].requests.{successful,errored,incomplete}[]``
  (vllm-project/guidellm, GenerativeRequestStats).
- ``nixlbench``: its text table.  It times ``postXferReq`` as Post, then starts anew and polls to the end as Tx
  (ai-dynamo/nixl, nixl_worker.cpp), so a pull is Post + Tx.  Avg Lat. is wall time over iterations *and* blocks of a
  batch (utils.cpp, printStats): with T threads a transfer takes Avg Lat. x batch x T.
- ``log``: whatever :mod:`kvlab.capture.ucx` finds evidence in.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any

import pandas as pd

from kvlab.capture import ucx, vllm
from kvlab.capture.logs import ESCAPES, Input
from kvlab.errors import BadInput

#: of a benchmark's file this much is read at most; a log may be longer
MOST_BYTES = 512 << 20
READ = (
    "a vLLM or UCX log with UCX_PROTO_INFO tables, /metrics dumps (before, after), vllm bench serve JSON "
    "(--save-detailed), AIPerf's profile_export.jsonl, GuideLLM's benchmarks JSON, nixlbench's table"
)
_SAMPLE = re.compile(r"[a-zA-Z_:][\w:]*(?:\{.*\})? +[-+.\w]+(?: +-?\d+)?\s*\Z")
_HEADER = re.compile(r"Block Size \(B\)\s+Batch Size\s+\S.*")
_COLUMN = re.compile(
    r"Block Size \(B\)|Batch Size|(?:Aggregate )?B/W \(\w+/Sec\)|Network Util \(%\)|(?:Avg|P99) [\w.]+ \(us\)"
)
_OPTION = re.compile(r"\(--(\w+)=[^)]*\)\s*:\s*(\S.*?)\s*$")
_AVERAGES = "single {}: every figure is an average, so there are no intervals"
_NO_LOG = "the transport (no UCX log here)"
_MS = {"s": 1e3, "sec": 1e3, "seconds": 1e3, "ms": 1.0, "milliseconds": 1.0, "us": 1e-3, "ns": 1e-6}


def recognise(path: str) -> tuple[str, Any]:
    """Return (format, content) of a file by its content alone; BadInput says in one line what is read."""
    with contextlib.closing(Input(path)) as source:
        data = source.read(MOST_BYTES + 1)
    if not data.strip():
        raise BadInput(f"{path} {source.fault}; kvlab import reads {READ}")
    if len(data) <= MOST_BYTES:
        text = data.decode("utf-8", "replace").lstrip("\ufeff")
        if name := _json_kind(path, documents := _documents(text)):
            return name, documents
        if _HEADER.search(text):
            return "nixlbench", text
        lines = [x for x in (line.strip() for line in text.splitlines()[:200]) if x]
        if sum(x.startswith(("# HELP ", "# TYPE ")) or bool(_SAMPLE.match(x)) for x in lines) > 0.9 * len(lines):
            return "metrics", text
    found = ucx.read(path)
    if found.tables or found.lanes or found.available or found.kv_metrics:
        return "log", None
    raise BadInput(f"{path}: nothing here that kvlab import reads, which is: {READ}")


def _documents(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects of a file that is one, or a line each (``--append-result``, JSON Lines); [] otherwise."""
    if text.lstrip()[:1] not in ("{", "["):
        return []
    for parts in ([text], text.splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            found = [json.loads(part) for part in parts if part.strip()]
            found = found[0] if len(found) == 1 and isinstance(found[0], list) else found
            return [d for d in found if isinstance(d, dict)]
    return []


def _json_kind(path: str, documents: list[dict[str, Any]]) -> str:
    if not documents:
        return ""
    first = documents[0]
    if isinstance(first.get("metadata"), dict) and "request_start_ns" in first["metadata"]:
        return "aiperf"
    if isinstance(first.get("benchmarks"), list) and any(isinstance(b, dict) for b in first["benchmarks"]):
        return "guidellm"
    if "request_throughput" in first and isinstance(first["request_throughput"], dict):
        raise BadInput(f"{path}: AIPerf's summary; give profile_export.jsonl from beside it, a record a request")
    if "ttfts" in first or {"duration", "completed", "request_throughput"} <= set(first):
        if any("ttfts" not in d or "itls" not in d for d in documents):
            raise BadInput(f"{path}: vllm bench serve kept only its summary; run it with --save-result --save-detailed")
        return "vllm-bench"
    return ""


def _number(value: Any, scale: float = 1.0) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) * scale if good else math.nan


def _whole(value: Any) -> int | None:
    number = _number(value)
    return round(number) if math.isfinite(number) and abs(number) < 2**62 else None


def _at(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _request(arm: str, name: Any, start: float, ttft_ms: float, e2e_ms: float, **more: Any) -> dict[str, Any]:
    """Make a row of ``requests``; ``more`` may bring ``gaps_ms`` (a list or None) and ``error`` (text or None)."""
    gaps = more.pop("gaps_ms", None)
    error = " ".join(str(more.pop("error", None) or "").split())[:300]
    ok = not error and ttft_ms > 0
    return {
        "arm": arm, "request": str(name), "repetition": 0, "warmup": False, "start_s": start,
        "ttft_ms": ttft_ms if ok else math.nan, "e2e_ms": e2e_ms if ok else math.nan, "gaps_ms": gaps,
        "longest_gap_ms": max(gaps, default=math.nan) if gaps else math.nan,
        "error": error or (None if ok else "no token came"), **more,
    }  # fmt: skip


def _requests(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return rows as a frame whose starts count from the first one."""
    frame = pd.DataFrame(rows)
    if len(frame):
        frame["start_s"] -= frame["start_s"].min()
    return frame


def vllm_bench(documents: list[dict[str, Any]], arm: str) -> tuple[pd.DataFrame, list[str]]:
    """Read results of ``vllm bench serve --save-detailed``: a row a request, and what is not known.

    The prefill chunk is taken from ``--metadata max_num_batched_tokens=N`` where it was given.
    """
    parts, unknown = [], ["the server's settings and transport"]
    for n, d in enumerate(documents):
        rate, chunk = _number(d.get("request_rate")), d.get("max_num_batched_tokens")
        chunk = int(str(chunk)) if str(chunk).isdecimal() and len(str(chunk)) < 9 else None
        if chunk is None and len(unknown) < 2:
            unknown.append("the prefill chunk (vllm bench serve --metadata max_num_batched_tokens=N keeps it)")
        rows, lists = [], {k: d.get(k) or [] for k in ("errors", "input_lens", "output_lens", "start_times")}
        for i, (ttft, itl) in enumerate(zip(d["ttfts"], d["itls"], strict=True)):
            own = {k: v[i] if i < len(v) else None for k, v in lists.items()}
            gaps = [_number(g, 1e3) for g in itl or []]
            rows.append(_request(
                arm, f"{n}-{i}", _number(own["start_times"]), _number(ttft, 1e3), _number(ttft, 1e3) + sum(gaps),
                gaps_ms=gaps, error=own["errors"], prompt_tokens=_whole(own["input_lens"]),
                output_tokens=_whole(own["output_lens"]), rate_rps=rate if math.isfinite(rate) else math.nan,
                concurrency=_whole(d.get("max_concurrency")), chunk_tokens=chunk, phase=f"result {n}",
            ))  # fmt: skip
        parts.append(_requests(rows))
    return pd.concat(parts, ignore_index=True), unknown


def aiperf(documents: list[dict[str, Any]], arm: str) -> tuple[pd.DataFrame, list[str]]:
    """Read AIPerf's records: a row a request, and what is not known."""

    def value(record: dict[str, Any], name: str) -> Any:
        return _at(record, "metrics", name, "value")

    def scale(record: dict[str, Any], name: str) -> float:
        return _MS.get(str(_at(record, "metrics", name, "unit")), math.nan)

    rows = []
    for i, r in enumerate(documents):
        meta, error = r.get("metadata"), r.get("error")
        chunks, each = value(r, "inter_chunk_latency"), scale(r, "inter_chunk_latency")
        ttft, e2e = (_number(value(r, n), scale(r, n)) for n in ("time_to_first_token", "request_latency"))
        if error:
            error = f"{_at(error, 'type') or ''} {_at(error, 'message') or ''}".strip() or str(error)
        prompt = value(r, "input_sequence_length")
        row = _request(
            arm, _at(meta, "x_request_id") or i, _number(_at(meta, "request_start_ns"), 1e-9), ttft, e2e, error=error,
            gaps_ms=[_number(c, each) for c in chunks] if isinstance(chunks, list) else None,
            prompt_tokens=_whole(value(r, "error_isl") if prompt is None else prompt),
            output_tokens=_whole(value(r, "output_sequence_length")), phase=str(_at(meta, "benchmark_phase") or ""),
        )  # fmt: skip
        rows.append(row | {"warmup": row["phase"] == "warmup"})
    unknown = ["the server's settings and transport", "the prefill chunk", "the offered rate and concurrency"]
    if any(r["gaps_ms"] is None and not r["error"] for r in rows):
        unknown.append("gaps of some requests: AIPerf keeps inter_chunk_latency only of streamed answers")
    unknown.append("gaps are between chunks as they came; a chunk may hold several tokens")
    return _requests(rows), unknown


def guidellm(documents: list[dict[str, Any]], arm: str) -> tuple[pd.DataFrame, list[str]]:
    """Read GuideLLM's benchmarks: a row a request, and what is not known; single gaps are not kept by GuideLLM."""
    parts = []
    unknown = [
        "gaps between tokens: GuideLLM keeps only the mean inter-token latency of a request, so stalls cannot be seen",
        "the server's settings and transport", "the prefill chunk",
    ]  # fmt: skip
    for n, b in enumerate(b for d in documents for b in d.get("benchmarks") or [] if isinstance(b, dict)):
        strategy = next((s for k in ("config", "scheduler", "args") if (s := _at(b, k, "strategy"))), None)
        kind = _at(strategy, "type_") or _at(strategy, "kind") or "benchmark"
        rows = []
        for status in ("successful", "errored", "incomplete"):
            for i, r in enumerate(_at(b, "requests", status) or []):
                times = _at(r, "info", "timings") or _at(r, "scheduler_info", "request_timings")
                starts = (_at(r, "request_start_time"), _at(times, "request_start"), _at(r, "start_time"))
                error = _at(r, "info", "error") or _at(r, "scheduler_info", "error") or _at(r, "error")
                rows.append(_request(
                    arm, _at(r, "request_id") or f"{n}-{status}-{i}",
                    next((_number(s) for s in starts if s is not None), math.nan),
                    _number(_at(r, "time_to_first_token_ms")), _number(_at(r, "request_latency"), 1e3),
                    error=error or (None if status == "successful" else status),
                    prompt_tokens=_whole(_at(r, "prompt_tokens")), output_tokens=_whole(_at(r, "output_tokens")),
                    rate_rps=_number(_at(strategy, "rate")), phase=f"{n} {kind}",
                    concurrency=_whole(_at(strategy, "streams") or _at(strategy, "max_concurrency")),
                ))  # fmt: skip
        total = _at(b, "request_totals", "total") or _at(b, "metrics", "request_totals", "total")
        if (_whole(total) or 0) > len(rows):
            unknown.append(f"benchmark {n} ran {total} requests and the file keeps {len(rows)}")
        parts.append(_requests(rows))
    return pd.concat(parts, ignore_index=True), unknown


def metrics(before: str | None, after: str, arm: str) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Read two dumps of one engine's ``/metrics``: rows of ``engine_metrics``, of ``pulls``, and what is not known.

    ``pulls`` has a row an engine that pulled, all of it averages; ``case`` says over how many transfers.
    """
    rows, pulls = vllm.difference(before, after, arm), []
    total = vllm.summary(rows)
    for engine, s in total["engines"].items():
        if s["pulls"] and None not in (s["mean_bytes"], s["mean_post_ms"], s["mean_xfer_ms"]):
            pulls.append({
                "arm": arm, "engine": engine, "case": f"average of {s['pulls']} transfers",
                "bytes": round(s["mean_bytes"]),
                "descriptors": _whole(s["mean_descriptors"]), "descriptors_source": "average by vLLM's /metrics",
                "post_us": 1e3 * s["mean_post_ms"], "xfer_us": 1e3 * s["mean_xfer_ms"],
                "repetition": 0, "warmup": False,
            })  # fmt: skip
    unknown = [_AVERAGES.format("pulls"), _NO_LOG, "pulls in flight", *total["notes"]]
    if total["restarted"] and before is not None:
        why = "the engine restarted between the dumps, or they are not in the order BEFORE AFTER"
        unknown.append(f"counters went down: {why}")
    return rows, pd.DataFrame(pulls), unknown


def _tables(text: str) -> list[tuple[dict[str, str], list[dict[str, float]]]]:
    """Return (configuration, rows) of every table of nixlbench in a log, whatever stands before or between lines."""
    options: dict[str, str] = {}
    names: list[str] = []
    found: list[tuple[dict[str, str], list[dict[str, float]]]] = []
    for line in text.splitlines():
        line = ESCAPES.sub("", line)
        if option := _OPTION.search(line):
            options, names = {**({} if names and found[-1][1] else options), option[1]: option[2]}, []
        elif _HEADER.search(line):
            names = _COLUMN.findall(line[line.index("Block Size (B)") :])
            found.append((options, []))
        elif names:
            with contextlib.suppress(ValueError):
                values = [float(word) for word in line.split()[-len(names) :]]
                if len(values) == len(names) > 2 and all(map(math.isfinite, values)) and min(values[:2]) >= 1:
                    found[-1][1].append(dict(zip(names, values, strict=True)))
    return [(options, rows) for options, rows in found if rows]


def nixlbench(text: str, arm: str) -> tuple[pd.DataFrame, list[str]]:
    """Read nixlbench's tables: a row of ``pulls`` for each line, all of it averages, and what is not known.

    Where a file holds several configurations each is an arm.  ``descriptors`` is the batch size (times the devices of
    mode MG); the older layout has no post, and ``post_us`` is then missing.
    """
    found, rows = _tables(text), []
    unknown = [_AVERAGES.format("transfers"), _NO_LOG]
    for options, lines in found:
        label = f"{arm}: {_configuration(options)}" if len(found) > 1 else arm
        threads = max(1, _whole(_option(options, "num_threads")) or 1)
        devices = max(1, _whole(_option(options, "num_initiator_dev")) or 1) if options.get("mode") == "MG" else 1
        for line in lines:
            block, count = int(line["Block Size (B)"]), int(line["Batch Size"]) * devices
            post = line.get("Avg Post (us)", math.nan)
            xfer = post + line.get("Avg Tx (us)", math.nan)
            if math.isnan(xfer):
                post, xfer = math.nan, line.get("Avg Lat. (us)", math.nan) * count * threads
            rows.append({
                "arm": label, "case": f"{count} block{'s' * (count > 1)} in {count:,} x {block} B",
                "descriptors": count, "descriptors_source": "nixlbench's batch size; times are averages",
                "descriptor_bytes": block, "bytes": block * count, "post_us": post, "xfer_us": xfer,
                "in_flight": threads, "repetition": 0, "warmup": False,
            })  # fmt: skip
        if not options:
            unknown.append(f"{label}: operation, backend and memory (no configuration block)")
        elif options.get("op_type", "READ").upper() != "READ":
            unknown.append(f"{label}: these are {options['op_type']} transfers, a pull of KV reads")
        if any("Avg Post (us)" not in line for line in lines):
            unknown.append(f"{label}: post and drain (the older table has only Avg Lat.)")
    if not rows:
        raise BadInput("a nixlbench header without one row of numbers under it")
    return pd.DataFrame(rows), unknown


def _option(options: dict[str, str], name: str) -> float:
    return float(options[name]) if options.get(name, "").isdecimal() and len(options[name]) < 9 else math.nan


def _configuration(options: dict[str, str]) -> str:
    names = ("backend", "op_type", "initiator_seg_type", "target_seg_type")
    return " ".join(options[n] for n in names if n in options) or "no configuration"


def memory(text: str) -> str:
    """Return DRAM or VRAM: the initiator's memory by nixlbench's first configuration."""
    return "VRAM" if re.search(r"\(--initiator_seg_type=[^)]*\)\s*:\s*VRAM", text) else "DRAM"
