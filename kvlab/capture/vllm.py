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
from typing import Any

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


#: what a summary needs -> the exact Prometheus name: a histogram's sum and count, a counter with or without
#: ``_total``.  Since the release after 0.30 failed transfers hold failed handshakes and notifications too.
#: Buckets are no use: the first ends at 5 ms, above most pulls on a fast transport.
HISTOGRAMS = {
    "xfer_s": "vllm:nixl_xfer_time_seconds",
    "post_s": "vllm:nixl_post_time_seconds",
    "bytes": "vllm:nixl_bytes_transferred",
    "descriptors": "vllm:nixl_num_descriptors",
}
COUNTERS = {
    "failed_transfers": "vllm:nixl_num_failed_transfers",
    "failed_notifications": "vllm:nixl_num_failed_notifications",
    "expired_requests": "vllm:nixl_num_kv_expired_reqs",  # counted by the prefill engine
    "external_cache_queries": "vllm:external_prefix_cache_queries",
    "external_cache_hits": "vllm:external_prefix_cache_hits",
}
#: sample -> what it is: ``xfer_s_count``, ``failed_transfers``
_SAMPLES = {f"{name}{end}": key + end for key, name in HISTOGRAMS.items() for end in ("_sum", "_count")}
_SAMPLES |= {f"{name}{end}": key for key, name in COUNTERS.items() for end in ("", "_total")}
_BIRTHS = {"process_start_time_seconds", *(f"{n}_created" for n in (*HISTOGRAMS.values(), *COUNTERS.values()))}


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
        which = ":".join(part for part in (engine, number) if part)
        rows.append((arm, which, phase, name, ",".join(f"{k}={v}" for k, v in labels), old, new, delta, again))
    columns = ["arm", "engine", "phase", "metric", "labels", "before", "after", "delta", "restarted"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.astype({"before": float, "after": float, "delta": float, "restarted": bool})


def summary(rows: pd.DataFrame) -> dict[str, Any]:
    """Total the rows of :func:`difference` and derive means; ``engines`` holds the same for each engine.

    All TP ranks of an engine are pooled.  Keys: pulls, bytes, descriptors, xfer_s, post_s, post_share, mean_xfer_ms,
    mean_post_ms, mean_bytes, mean_descriptors, those of ``COUNTERS``, restarted (engines), notes.  A figure no engine
    reports is None, not 0.
    """
    total = _totals(rows)
    notes = []
    if len(rows) and rows["before"].isna().all():
        notes.append("one scrape: totals since each engine started, not of a run")
    restarted = sorted({str(name) for name in rows.loc[rows["restarted"], "engine"]})
    if restarted:
        notes.append(f"counters restarted: {', '.join(restarted)}; their totals are lower bounds")
    if total["expired_requests"]:
        notes.append("expired requests are counted by the prefill engine")
    engines = {str(name): _totals(own) for name, own in rows.groupby("engine", sort=True)}
    return {**total, "engines": engines, "restarted": restarted, "notes": notes}


def _totals(rows: pd.DataFrame) -> dict[str, Any]:
    sums = rows["delta"].groupby(rows["metric"].map(_SAMPLES)).sum(min_count=1).dropna().to_dict()
    out: dict[str, Any] = {key: sums.get(f"{key}_sum") for key in HISTOGRAMS} | {key: sums.get(key) for key in COUNTERS}
    out["pulls"] = sums.get("xfer_s_count", sums.get("bytes_count"))
    for key in ("pulls", "bytes", "descriptors", *COUNTERS):
        out[key] = None if out[key] is None else round(out[key])

    def ratio(a: float | None, b: float | None, scale: float = 1.0) -> float | None:
        return None if a is None or not b else a / b * scale

    out["post_share"] = ratio(out["post_s"], out["xfer_s"])
    for name, key, scale in (("xfer_ms", "xfer_s", 1e3), ("post_ms", "post_s", 1e3)):
        out[f"mean_{name}"] = ratio(out[key], sums.get(f"{key}_count"), scale)
    for key in ("bytes", "descriptors"):
        out[f"mean_{key}"] = ratio(out[key], sums.get(f"{key}_count"))
    return out
