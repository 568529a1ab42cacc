"""which-transport: read each log on its own into ``transports`` and ``verdicts``, with its card and document.

The logs themselves are not copied: they may be large and may hold what should not travel.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from kvlab import schema
from kvlab.capture import ucx
from kvlab.capture.redact import redact, redacted
from kvlab.errors import BadInput
from kvlab.params import WhichTransport
from kvlab.runs import Run, safe_name, write_atomic
from kvlab.verbs.explain import card, require_known

#: what a person takes for the answer when several transports are listed: the fastest first
_PREFERRED = ("cuda_ipc", "rocm_ipc", *ucx.ALIASES["rdma"], *ucx.ALIASES["sm"], "tcp", "self")


def labels(paths: list[str]) -> list[str]:
    """Name each log after its file, without what says only how it is packed; a repeated name gets a number."""
    names: list[str] = []
    for path in paths:
        stem = Path(path).name.split(".log")[0] or Path(path).name
        n = sum(x == stem or x.startswith(f"{stem} (") for x in names)
        names.append(f"{stem} ({n + 1})" if n else stem)
    return names


def listed(evidence: ucx.Evidence, arm: str) -> pd.DataFrame:
    """Return lane lists and UCX_TLS as rows that decide nothing: what a person would take from them."""
    rows = []
    for entry in evidence.lanes:
        if entry["locality"] != "self":
            text = "  ".join(f"{name}({' '.join(lanes)})" for name, lanes in entry["lanes"].items())
            # Read as its keys say: the lane of remote access, else the fastest lane of all.
            remote = [lane for key in ("rma", "rma_am", "rma_bw") for lane in entry["lanes"].get(key, [])]
            lanes_ = remote or [lane for lanes in entry["lanes"].values() for lane in lanes]
            found = {lane.split("/")[0] for lane in lanes_}
            rows.append(("lane list", entry["locality"], text, found, entry["line"]))
    for value in evidence.environment.get("UCX_TLS", []):
        found = {t for n in value["value"].split(",") for t in ucx.ALIASES.get(n, (n,))}
        rows.append(("UCX_TLS", None, value["value"], found, value["line"]))
    return pd.DataFrame(
        [
            {
                "arm": arm,
                "operation": kind,
                "locality": where,
                "config": text,
                "transport": next((t for t in _PREFERRED if t in found), None),
                "decides": False,
                "line": line,
            }
            for kind, where, text, found, line in rows
        ]
    )


def measure(params: WhichTransport, run: Run, names: list[str] | None = None) -> None:
    """Fill ``transports`` and ``verdicts``; a log that contradicts ``expect`` makes the run contradicted.

    :param names: the logs' labels; None: after their files
    """
    if not params.log_path:
        raise BadInput("which-transport reads logs: name them with log_path=FILE, or a recording with replay=RUN")
    if params.expect:
        require_known(params.expect, "expect")
    rows, verdicts, against = [], [], []
    for label, path in zip(names or labels(params.log_path), params.log_path, strict=True):
        evidence = ucx.read(path, descriptor_bytes=params.descriptor_bytes)
        pull = evidence.pull
        agrees = ucx.agrees(pull.transport, params.expect) if params.expect and pull.transport else None
        if agrees is False:
            against.append(f"{label}: expected {params.expect}, and the payload went over {pull.verdict}")
        verdicts.append(
            {
                "arm": label,
                "expected": params.expect,
                "transport": pull.transport,
                "likely": pull.likely,
                "devices": ", ".join(pull.devices),
                "emulated": pull.emulated,
                "agrees": agrees,
                "verdict": pull.verdict,
                "evidence": "line " + ", ".join(map(str, pull.lines[:4])) if pull.lines else "",
            }
        )
        rows += [ucx.transport_rows(evidence, label, ""), listed(evidence, label)]
        stem = run.logs / safe_name(label)
        document = json.dumps(redacted(evidence.document()), ensure_ascii=False)
        text = redact(card(evidence, params.expect or None)) + "\n"
        write_atomic(stem.with_name(stem.name + ".card.txt"), text.encode())
        write_atomic(stem.with_name(stem.name + ".json"), document.encode())
    # Every column is there, in a log without tables too.
    found = pd.concat([r for r in rows if len(r)] or rows[:1], ignore_index=True)
    run.write("transports", found.reindex(columns=[c.name for c in schema.TABLES["transports"]]))
    run.write("verdicts", pd.DataFrame(verdicts))
    if against:
        run.update(outcome="contradicted", contradictions=against)
