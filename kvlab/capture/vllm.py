"""What a vLLM engine says of its own pulls: the ``KV Transfer metrics`` log line and ``/metrics``.

Both pool the pulls of every TP rank of an engine, so a figure here is per rank transfer and never per
request unless TP is 1.  "MB" in vLLM's line is MiB (bytes / 2**20), and ``Throughput (MB/s)`` is the sum of
bytes over the sum of transfer durations: pulls that overlap count their shared time twice, so it is a
per-transfer figure and not the rate of a link.
"""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from kvlab.errors import BadInput

#: name in the log line -> key here.  The first eight are printed by every vLLM with NIXL telemetry (from
#: 0.11 on); the failure counts came later ("Num failed transfers" then holds failed handshakes and
#: notifications too); "Num failed recvs" is the Mooncake connector's.
KV_FIELDS = {
    "Num successful transfers": "num_successful_transfers",
    "Avg xfer time (ms)": "avg_xfer_time_ms",
    "P90 xfer time (ms)": "p90_xfer_time_ms",
    "Avg post time (ms)": "avg_post_time_ms",
    "P90 post time (ms)": "p90_post_time_ms",
    "Avg MB per transfer": "avg_mb_per_transfer",
    "Throughput (MB/s)": "throughput_mb_per_s",
    "Avg number of descriptors": "avg_number_of_descriptors",
    "Num failed transfers": "num_failed_transfers",
    "Num failed notifications": "num_failed_notifications",
    "Num failed handshakes": "num_failed_handshakes",
    "Num failed recvs": "num_failed_recvs",
    "Num KV expired reqs": "num_kv_expired_reqs",
}
_MARK = "KV Transfer metrics:"
#: `name=value` of one connector, or `'name': value` where MultiConnector prints a dict for each connector
_FIELD = re.compile(
    r"(?P<name>[A-Z][A-Za-z0-9 ]*(?: \([A-Za-z/%]+\))?)'?\s*[=:]\s*(?:np\.\w+\()?"
    r"(?P<value>[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf))(?![\w.])"
)


def kv_metrics(text: str) -> dict[str, Any] | None:
    """Read one ``KV Transfer metrics`` log line, whatever stands before the words; None for any other line.

    Every key of ``KV_FIELDS`` is there, None where this vLLM version does not print the field; a field that
    is not known stands under ``other``.  ``failed_interval`` is True for the line of zeros that vLLM prints
    when something happened and nothing succeeded: it weighs nothing in a mean.
    """
    at = text.find(_MARK)
    if at < 0:
        return None
    found: dict[str, Any] = dict.fromkeys(KV_FIELDS.values())
    other: dict[str, float] = {}
    rest = text[at + len(_MARK) :]
    nixl = rest.find("NixlConnector")
    for match in _FIELD.finditer(rest, max(nixl, 0)):
        name, value = match["name"].strip(), float(match["value"])
        if not math.isfinite(value):
            continue
        number = int(value) if name.startswith("Num ") and value.is_integer() else value
        key = KV_FIELDS.get(name)
        if key is None:
            other.setdefault(name, number)
        elif found[key] is None:  # of several connectors in one line the first one counts
            found[key] = number
    found["other"] = other
    found["failed_interval"] = found["num_successful_transfers"] == 0
    return found


def kv_derived(line: dict[str, Any]) -> dict[str, float | None]:
    """Derive, from one line, what it implies; None where a field is missing or nothing succeeded.

    ``post_share`` of the transfer, ``after_post_ms`` (the drain), ``post_us_per_descriptor``,
    ``kib_per_descriptor``, ``total_mib`` and ``per_transfer_mib_s`` (mean size over mean duration, which is
    what vLLM prints as throughput).
    """
    xfer, post = line["avg_xfer_time_ms"], line["avg_post_time_ms"]
    mib, descriptors, count = (
        line["avg_mb_per_transfer"],
        line["avg_number_of_descriptors"],
        line["num_successful_transfers"],
    )

    def ratio(a: float | None, b: float | None, scale: float = 1.0) -> float | None:
        return None if a is None or not b else a / b * scale

    return {
        "post_share": ratio(post, xfer),
        "after_post_ms": None if not xfer or post is None else xfer - post,
        "post_us_per_descriptor": ratio(post, descriptors, 1e3),
        "kib_per_descriptor": ratio(mib, descriptors, 1024.0),
        "total_mib": None if mib is None or not count else mib * count,
        "per_transfer_mib_s": ratio(mib, xfer, 1e3),
    }


def kv_summary(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Pool several ``KV Transfer metrics`` lines, each mean weighted by its transfers.

    A failed interval weighs nothing and is counted.  The rate of a link cannot be had from these lines: how
    many pulls were in flight is not in them.
    """
    all_lines = list(lines)
    good = [line for line in all_lines if line["num_successful_transfers"]]

    def mean(key: str) -> float | None:
        pairs = [(line["num_successful_transfers"], line[key]) for line in good if line[key] is not None]
        weight = sum(n for n, _ in pairs)
        return sum(n * value for n, value in pairs) / weight if weight else None

    means = {key: mean(key) for key in KV_FIELDS.values() if key.startswith("avg_")}
    transfers = sum(line["num_successful_transfers"] for line in good)
    failed = sum(line["failed_interval"] for line in all_lines)
    notes = [
        "transfers are rank transfers: one request is as many as the decode engine has TP ranks",
        "Throughput (MB/s) is bytes over summed transfer durations, per transfer and not of the link; "
        "the pulls in flight are unknown",
    ]
    if failed:
        notes.append(f"{failed} interval(s) without one success: look at vllm:nixl_num_failed_transfers")
    return {
        "lines": len(all_lines),
        "num_successful_transfers": transfers,
        "failed_intervals": failed,
        **means,
        **kv_derived({**means, "num_successful_transfers": transfers}),
        "notes": notes,
    }


#: What a summary needs -> the exact Prometheus names, over vLLM's versions; a histogram's sum and count, a
#: counter with or without ``_total``.  Since the release after 0.30 failed transfers hold failed handshakes
#: and notifications too.  Buckets are no use: the first ends at 5 ms, above most pulls on a fast transport.
HISTOGRAMS = {
    "xfer_s": ("vllm:nixl_xfer_time_seconds",),
    "post_s": ("vllm:nixl_post_time_seconds",),
    "bytes": ("vllm:nixl_bytes_transferred",),
    "descriptors": ("vllm:nixl_num_descriptors",),
}
COUNTERS = {
    "failed_transfers": ("vllm:nixl_num_failed_transfers",),
    "failed_notifications": ("vllm:nixl_num_failed_notifications",),
    "expired_requests": ("vllm:nixl_num_kv_expired_reqs",),  # counted by the prefill engine
    "external_cache_queries": ("vllm:external_prefix_cache_queries",),
    "external_cache_hits": ("vllm:external_prefix_cache_hits",),
}
_SAMPLES = {
    f"{name}{suffix}": (key, suffix.strip("_") or "total")
    for table, suffixes in ((HISTOGRAMS, ("_sum", "_count")), (COUNTERS, ("", "_total")))
    for key, names in table.items()
    for name in names
    for suffix in suffixes
}
_BIRTHS = {"process_start_time_seconds"} | {
    f"{name}_created" for table in (HISTOGRAMS, COUNTERS) for names in table.values() for name in names
}


def scrape(url: str, timeout_s: float = 10.0) -> str:
    """Fetch an engine's ``/metrics`` (the path may be left out), through no proxy; BadInput if it fails."""
    target = url if url.rstrip("/").endswith("/metrics") else url.rstrip("/") + "/metrics"
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(target, timeout=timeout_s) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise BadInput(f"{target}: no metrics: {error}") from None


_Key = tuple[str, tuple[tuple[str, str], ...]]


def _samples(text: str) -> tuple[dict[_Key, float], dict[_Key, float]]:
    """Return the samples we know by exact name and labels, and the birth times of processes and series."""
    from prometheus_client.parser import text_string_to_metric_families

    known: dict[_Key, float] = {}
    births: dict[_Key, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                if sample.name in _BIRTHS:
                    births[key] = sample.value
                elif sample.name in _SAMPLES and math.isfinite(sample.value):
                    known[key] = sample.value
    except (ValueError, KeyError, IndexError) as error:
        raise BadInput(f"not Prometheus text: {error}") from None
    return known, births


def _source(labels: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    return tuple(value for name, value in labels if name in ("instance", "pod", "engine", "model_name"))


def difference(before: str | None, after: str, arm: str, engine: str = "", phase: str | None = None) -> pd.DataFrame:
    """Return rows of table ``engine_metrics`` from two scrapes of one address, by exact names.

    ``engine`` names the address; the engine number that vLLM puts into the labels is appended.  ``before``
    None: the totals since the engine's start, with ``before`` missing.  A counter that restarted (it went
    down, or its birth time changed) is flagged, and its difference is what it counted since: a lower bound,
    never negative.  A series that is gone in the second scrape is flagged and has no difference.
    """
    now, births = _samples(after)
    then, old_births = _samples(before) if before is not None else ({}, {})
    restarted = {_source(key[1]) for key, value in then.items() if (key in now and now[key] < value) or key not in now}
    restarted |= {_source(key[1]) for key, value in old_births.items() if key[1] and births.get(key, value) != value}
    whole = any(births.get(key, value) != value for key, value in old_births.items() if not key[1])
    rows = []
    for key in sorted({*then, *now}):
        name, labels = key
        again = whole or _source(labels) in restarted
        old = then.get(key, None if before is None else 0.0)
        new = now.get(key)
        delta = None if new is None else new if again or old is None else new - old
        number = dict(labels).get("engine")
        rows.append(
            {
                "arm": arm,
                "engine": ":".join(part for part in (engine, number) if part),
                "phase": phase,
                "metric": name,
                "labels": ",".join(f"{k}={v}" for k, v in labels),
                "before": old,
                "after": new,
                "delta": delta,
                "restarted": again,
            }
        )
    columns = ["arm", "engine", "phase", "metric", "labels", "before", "after", "delta", "restarted"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"before": float, "after": float, "delta": float, "restarted": bool})


def summary(rows: pd.DataFrame) -> dict[str, Any]:
    """Total the rows of :func:`difference` and derive means; ``engines`` holds the same for each engine.

    Keys: pulls, bytes, descriptors, xfer_s, post_s, post_share, mean_xfer_ms, mean_post_ms, mean_bytes,
    mean_descriptors, failed_transfers, failed_notifications, expired_requests, restarted (engines), over (the
    words that say what the means are over), notes.  A figure no engine reports is None, not 0.
    """
    total = _totals(rows)
    engines = {str(name): _totals(own) for name, own in rows.groupby("engine", sort=True)}
    single = bool(len(rows)) and bool(rows["before"].isna().all())
    notes = []
    if single:
        notes.append("one scrape: totals since each engine started, not of a run")
    restarted = sorted({str(name) for name in rows.loc[rows["restarted"], "engine"]})
    if restarted:
        notes.append(f"counters restarted: {', '.join(restarted)}; their totals are lower bounds")
    if total["expired_requests"]:
        notes.append("expired requests are counted by the prefill engine")
    over = (
        f"mean over {total['pulls']} rank transfers (all TP ranks pooled) of "
        f"{sum(1 for e in engines.values() if e['pulls'])} engine(s), "
        + ("since they started" if single else "between the two scrapes")
    )
    return {**total, "engines": engines, "restarted": restarted, "over": over, "notes": notes}


_PASTED = re.compile(r"^\s*(vllm:\w+(?:\{[^{}]*\})?\s+[-+.\w]+)\s*$", re.M)


def read_text(text: str) -> dict[str, Any] | None:
    """Summarise pasted ``/metrics`` lines that stand among other text; None when there are none of NIXL's."""
    lines = [line for line in _PASTED.findall(text) if re.split(r"[{\s]", line, maxsplit=1)[0] in _SAMPLES]
    if not lines:
        return None
    try:
        return summary(difference(None, "\n".join(lines) + "\n", arm="pasted"))
    except BadInput:
        return None


def _totals(rows: pd.DataFrame) -> dict[str, Any]:
    sums: dict[tuple[str, str], float] = {}
    for name, delta in zip(rows["metric"], rows["delta"], strict=True):
        if name in _SAMPLES and not math.isnan(delta):
            sums[_SAMPLES[name]] = sums.get(_SAMPLES[name], 0.0) + delta
    out: dict[str, Any] = {key: sums.get((key, "sum")) for key in HISTOGRAMS}
    count = sums.get(("xfer_s", "count"), sums.get(("bytes", "count")))
    out["pulls"] = None if count is None else round(count)
    for key in ("bytes", "descriptors"):
        out[key] = None if out[key] is None else round(out[key])
    for key in COUNTERS:
        value = sums.get((key, "total"))
        out[key] = None if value is None else round(value)

    def ratio(a: float | None, b: float | None, scale: float = 1.0) -> float | None:
        return None if a is None or not b else a / b * scale

    out["post_share"] = ratio(out["post_s"], out["xfer_s"])
    out["mean_xfer_ms"] = ratio(out["xfer_s"], sums.get(("xfer_s", "count")), 1e3)
    out["mean_post_ms"] = ratio(out["post_s"], sums.get(("post_s", "count")), 1e3)
    out["mean_bytes"] = ratio(out["bytes"], sums.get(("bytes", "count")))
    out["mean_descriptors"] = ratio(out["descriptors"], sums.get(("descriptors", "count")))
    return out


def _union_s(start: np.ndarray[Any, Any], end: np.ndarray[Any, Any]) -> float:
    order = np.argsort(start)
    start, end = start[order], end[order]
    reached = np.maximum.accumulate(np.concatenate([[-np.inf], end[:-1]]))
    return float(np.maximum(end - np.maximum(start, reached), 0.0).sum())


def rate_from_intervals(pulls: pd.DataFrame) -> dict[str, float] | None:
    """Return the rate while at least one pull was in flight: bytes over the union of the pulls' intervals.

    ``pulls`` has start_s, xfer_us, bytes and perhaps start_uncertainty_s (seconds, +-).  The result has
    bytes, busy_s, summed_s, mean_in_flight, bytes_per_s with its bounds bytes_per_s_low and _high (every
    interval at its longest, and at its surest), and per_transfer_bytes_per_s, which is what vLLM calls
    throughput.  Rows without a start are left out; None when none is left.
    """
    known = pulls[pulls["start_s"].notna() & (pulls["xfer_us"] > 0)]
    if known.empty:
        return None
    start = known["start_s"].to_numpy(float)
    span = known["xfer_us"].to_numpy(float) * 1e-6
    unsure = np.zeros(len(known))
    if "start_uncertainty_s" in known:
        unsure = known["start_uncertainty_s"].fillna(0.0).to_numpy(float)
    total = float(known["bytes"].sum())
    busy = _union_s(start, start + span)
    most = _union_s(start - unsure, start + span + unsure)
    sure = span > 2 * unsure
    surest = _union_s((start + unsure)[sure], (start + span - unsure)[sure]) if sure.any() else 0.0
    least = max(float(span.max()), surest)
    return {
        "bytes": total,
        "busy_s": busy,
        "summed_s": float(span.sum()),
        "mean_in_flight": float(span.sum()) / busy,
        "bytes_per_s": total / busy,
        "bytes_per_s_low": total / most,
        "bytes_per_s_high": total / least,
        "per_transfer_bytes_per_s": total / float(span.sum()),
    }
