"""``kvlab explain FILE...``: say from any log which transport carried the KV pull, why, and what to do next."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from typing import Any

from kvlab.capture import ucx
from kvlab.errors import CONTRADICTED, DONE, NOT_DETERMINED, BadInput

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(i?)B?", re.IGNORECASE)
WIDTH = 100


def size(text: str) -> int:
    """Read ``131072``, ``128KiB`` or ``128K`` (1,024 bytes each) or ``128kB`` (1,000) as bytes."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 131072 or 128KiB")
    unit = found[2].upper()
    step = 1000 if unit and not found[3] and text.strip().upper().endswith("B") else 1024
    value = float(found[1]) * step ** " KMG".index(unit or " ")
    if value < 1 or value != int(value) or value > 1 << 50:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a descriptor in whole bytes")
    return int(value)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("files", nargs="*", default=["-"], metavar="FILE", help="logs, - or none: standard input")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the card")
    parser.add_argument(
        "--descriptor-bytes", type=size, metavar="N", help="size of one descriptor of the pull, e.g. 131072 or 128KiB"
    )
    parser.add_argument(
        "--expect", metavar="T", help="gate: exit 4 unless the pull took T (rc_mlx5, rdma, nvlink, tcp...)"
    )


def main(args: argparse.Namespace) -> int:
    """Read the logs, print the card or the document, and return the exit code."""
    if args.expect is not None:
        require_known(args.expect, "--expect")
    evidence = ucx.read(args.files or ["-"], descriptor_bytes=args.descriptor_bytes)
    if evidence.totals.get("problem nothing-to-read") == len(evidence.files):
        raise BadInput(evidence.problems[0]["advice"])
    document = evidence.document()
    print(json.dumps(document) if args.json else card(evidence, args.expect))
    return exit_code(evidence, args.expect)


def require_known(expect: str, where: str) -> None:
    """Refuse a transport or alias that :func:`kvlab.capture.ucx.agrees` does not know."""
    for name in expect.split(","):
        if not ucx.known_transport(name):
            known = ", ".join(sorted({*ucx.ALIASES, *ucx.KNOWN_TRANSPORTS}))
            raise BadInput(f"{where} {name!r}: not a transport; known: {known}")


def exit_code(evidence: ucx.Evidence, expect: str | None) -> int:
    """Return 0, 3 (not determined), or 4 (the evidence contradicts ``expect``)."""
    if evidence.pull.transport is None:
        return NOT_DETERMINED
    return DONE if expect is None or ucx.agrees(evidence.pull.transport, expect) else CONTRADICTED


def card(evidence: ucx.Evidence, expect: str | None = None) -> str:
    """Return the card: the answer, the lines it rests on, what else is there, and what to do next."""
    pull, many = evidence.pull, len(evidence.files) > 1
    subject = "The KV pull went over " if pull.transport else "The transport of the KV pull is "
    out = [textwrap.fill(f"{subject}{pull.verdict}.", WIDTH)]
    if expect is not None:
        says = "not determined" if not pull.transport else "yes" if ucx.agrees(pull.transport, expect) else "NO"
        out.append(textwrap.fill(f"Expected {expect}: {says}.", WIDTH))
    if evidence.deciding:
        out += ["", "Evidence (remote memory read, the row that covers the descriptors)"]
        shown: dict[str, list[str]] = {}
        for table, row, line in evidence.deciding:
            config = f"cfg#{table.config}" if table.config is not None else ""
            place = " ".join(x for x in (table.locality, config) if x) or "endpoint not named"
            most = "inf" if row.max_bytes is None else row.max_bytes
            sizes = row.min_bytes if row.max_bytes == row.min_bytes else f"{row.min_bytes}..{most}"
            text = f"{sizes} | {row.description} | {row.config} | {table.local} <- {table.remote}, {place}"
            shown.setdefault(text, []).append(f"{table.file}:{line}" if many else str(line))
        for text, lines in list(shown.items())[:8]:
            more = f" and {len(lines) - 4} more" if len(lines) > 4 else ""
            out.append(f"  line {', '.join(lines[:4])}{more}: {text}")
        counted = sum(r.selections or 0 for _, r, _ in evidence.deciding)
        pulled = round(evidence.kv_sums[4])
        if counted:
            beside = "the pulls' descriptors should add up to this"
            beside = f"vLLM's metrics lines add up to {pulled:,} descriptors" if pulled else beside
            out.append(f"  UCX counted {counted:,} reads in these rows; {beside}")
    elif pull.lines:
        out += ["", f"See line {', '.join(map(str, pull.lines[:8]))}"]
    return "\n".join([*out, *_beside(evidence), *_steps(evidence)])


def _beside(evidence: ucx.Evidence) -> list[str]:
    """Return what the log holds besides, with what it is worth."""
    out = []
    others: dict[str, set[str]] = {}
    for table in evidence.tables.values():
        if not table.is_read:
            kind = table.operation.split(" by ")[0]
            others.setdefault(kind, set()).update(x for r, _ in table.rows for x in r.transports)
    for kind, transports in sorted(others.items()):
        names = ", ".join(sorted(transports)) or "no rows"
        out.append(f"{kind} tables ({names}): another operation, they do not decide")
    if evidence.lanes:
        lanes = sorted({x.split("/")[0] for e in evidence.lanes for v in e["lanes"].values() for x in v})
        out.append(f"lane lists ({', '.join(lanes)}): what endpoints may use, not what they used")
    for value in evidence.environment.get("UCX_TLS", [])[:3]:
        out.append(f"UCX_TLS={value['value']} (line {value['line']}): allowed, not used")
    count, xfer, post, mib, descriptors = evidence.kv_sums
    if count and xfer and descriptors:
        text = f"vLLM's metrics: {count:,.0f} transfers (one a rank, not one a request), {xfer / count:,.1f} ms each, "
        each = f"{descriptors / count:,.0f} descriptors of {mib / descriptors * 1024:,.0f} KiB"
        text += f"{post / xfer:.0%} of it post; {each}. "
        out.append(text + "Its 'Throughput' is per transfer, not the rate of a link")
    for pull in evidence.telemetry_pulls[:3]:
        parts = ", ".join(f"{k.removesuffix('_us')} {v / 1e3:g} ms" for k, v in pull.items() if k.endswith("_us"))
        out.append(f"NIXL telemetry: {parts}, {pull.get('bytes', 0):,} bytes (events paired by their order)")
    return ["", "Also in the log", *(_item(x) for x in out)] if out else []


def _steps(evidence: ucx.Evidence) -> list[str]:
    """Return the troubles in the order they appear, each with its next step."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for problem in sorted(evidence.problems, key=lambda p: p["line"] or 0):
        groups.setdefault(problem["code"], []).append(problem)
    # What was seen in the log comes before what only the whole reading says.
    ordered = sorted(groups.items(), key=lambda g: g[1][0]["line"] is None)
    out = []
    for code, found in ordered:
        lines = [str(p["line"]) for p in found if p["line"] is not None]
        total = evidence.totals.get(f"problem {code}", len(found))
        at = f" (line {', '.join(lines[:4])}{f' and {total - 4:,} more' if total > 4 else ''})" if lines else ""
        out.append(_item(f"{code}{at}: {found[0]['advice']}"))
    return ["", "What to do next", *out] if out else []


def _item(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  - ", subsequent_indent="    ")
