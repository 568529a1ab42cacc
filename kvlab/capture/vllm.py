"""What a vLLM engine says of its own pulls: the ``KV Transfer metrics`` log line and ``/metrics``.

Both pool the pulls of every TP rank of an engine, so a figure here is per rank transfer and never per
request unless TP is 1.  "MB" in vLLM's line is MiB (bytes / 2**20), and ``Throughput (MB/s)`` is the sum of
bytes over the sum of transfer durations: pulls that overlap count their shared time twice, so it is a
per-transfer figure and not the rate of a link.
"""

from __future__ import annotations

import math
import re
from typing import Any

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
