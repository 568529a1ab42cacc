"""``kvlab check``: say before a run what will carry the pull on this machine, and what is in the way."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvlab import check, experiments, params
from kvlab.capture import machine
from kvlab.errors import DONE, FAILED, BadInput
from kvlab.verbs.run import assignments

WIDTH = 110


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "-f", "--file", metavar="PARAMS", help="check the arms of a parameter file, or of an experiment's default file"
    )
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="set one parameter (repeatable)"
    )
    parser.add_argument("--no-probe", action="store_true", help="predict only, without the tiny pull of each arm")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def main(args: argparse.Namespace) -> int:
    """Print machine, arms and findings; 1 when an arm cannot do what its label claims."""
    if args.parameter and not args.file:
        raise BadInput("-p changes a parameter of an experiment: name one with -f")
    chosen = _chosen(args.file, args.parameter) if args.file else None
    facts = machine.facts()
    views = check.arms(chosen, facts, live=not args.no_probe) if chosen else []
    findings = check.judge(facts, views)
    whole = check.document(facts, views, findings)
    if args.json:
        print(json.dumps(whole))
    else:
        print(text(whole, experiments.name_of(chosen) if chosen else ""))
    return FAILED if views and any(f.weight == "blocks" for f in findings) else DONE


def _chosen(name: str, parameters: Sequence[str]) -> params.Experiment:
    """Read the parameters that ``name`` means: an experiment, EXPERIMENT/NAME, or a file."""
    path, known = Path(name), experiments.EXPERIMENTS
    head, _, tail = name.partition("/")
    experiment = known.get(head.replace("_", "-"))
    if experiment and not path.is_file():
        if not (tail or experiment.default):
            raise BadInput(f"{experiment.name} has no parameter file: it only replays")
        path = params.resolve_file(experiment.name, tail or experiment.default)
    if not path.is_file():
        raise BadInput(f"-f {name}: neither a parameter file nor an experiment; known: {', '.join(known)}")
    values = {**params.read_file(path), **assignments(parameters)}
    of_folder = path.resolve().parent.name.replace("_", "-")
    # A file from elsewhere: the first experiment with arms that takes it.
    refused = ""
    for one in [of_folder] if of_folder in known else [e for e in known if "arms" in known[e].model().model_fields]:
        try:
            chosen = params.validate(one, values, str(path))
            if getattr(chosen, "arms", None):
                return chosen
            raise BadInput(f"{path}: {one} has no arms to check")
        except BadInput as error:
            if one == of_folder:
                raise
            refused = refused or f"as {one}: {error}"
    raise BadInput(refused)


def text(whole: dict[str, Any], experiment: str = "") -> str:
    """Lay the document out for reading: the machine, the arms, what was found with its remedy."""
    out = [_line(name, value) for name, value in _machine(whole["machine"]) if value]
    if whole["arms"]:
        first = whole["arms"][0]
        out += [
            "",
            f"arms of {experiment}: READ of {first['memory']}, descriptors of {first['descriptor_bytes']:,} bytes",
        ]
        out += [_arm(a, [f for f in whole["findings"] if f["arm"] == a["arm"]]) for a in whole["arms"]]
    out += ["", *(_found(whole["findings"]) or ["nothing found that is in the way"])]
    return "\n".join(out)


def _found(findings: list[dict[str, Any]]) -> list[str]:
    """Return the findings, what blocks first; one entry a rule, its texts with the arms that they hold for."""
    out = []
    for weight in ("blocks", "trap", "note"):
        for rule in dict.fromkeys(f["rule"] for f in findings if f["weight"] == weight):
            own = [f for f in findings if f["rule"] == rule]
            arms = _grouped((f["text"], f["arm"] or "") for f in own)
            texts = _grouped((", ".join(filter(None, labels)), said) for said, labels in arms.items())
            said = "; ".join(f"{labels + ': ' if labels else ''}{', '.join(t)}" for labels, t in texts.items())
            known = check.RULES[rule]
            out.append(_item(f"{weight:<7}{rule}: {known.what}. {said}"))
            out.append(_item(f"remedy: {known.remedy} ({known.source})", " " * 9))
    return out


def _machine(m: dict[str, Any]) -> list[tuple[str, str]]:
    library, nixl = m["ucx"] or {}, m["nixl"]
    has = {"cuda": "cuda", "verbs": "ib", "mlx5": "ib_mlx5", "efa": "ib_efa", "gdrcopy": "cuda_gdrcopy", "rocm": "rocm"}
    modules = library.get("modules", [])
    build = ", ".join(f"{word} {'yes' if module in modules else 'no'}" for word, module in has.items())
    places = _grouped(t.split("/", 1) for t in library.get("transports", []))
    usable = [t + (f" ({', '.join(d)})" if d[0] not in ("memory", "cuda") else "") for t, d in places.items()]
    reasons = _grouped((why, transport) for transport, why in m["why_not"].items())
    speeds = {i["name"]: f" {i['mbit_per_s'] / 1000:g} Gbit/s" for i in m["interfaces"] if i["mbit_per_s"]}
    up = [f"{i['name']}{speeds.get(i['name'], '')} MTU {i['mtu']}" for i in m["interfaces"] if i["up"]]
    ports = [
        f"{p['device']}:{p['port']} {p['state']}, {p['link_layer']}, {p['rate']}, GID {p['gid'] or 'none'}"
        f"{' ' + p['gid_type'] if p['gid_type'] else ''}, NUMA {p['numa_node']}"
        for p in m["rdma"]
    ]
    gpus = [f"GPU {g['index']} {g['name']}, {g['nvlinks_up']} of {g['nvlinks']} NVLinks up" for g in m["gpus"]]
    links = [f"{a}-{b} {v}" for a, row in m["topology"].items() for b, v in row.items() if a < b]
    own = [n for n, kind in m["namespaces"].items() if kind == "own"]
    lock = "unlimited" if m["memlock_bytes"] is None else f"{m['memlock_bytes'] >> 10} KiB"
    gpudirect = [w for w, k in (("nvidia_peermem", "peermem"), ("open driver (dma-buf)", "open_driver")) if m[k]]
    kernel = [
        f"lock limit {lock}",
        f"other processes' memory {'readable' if library.get('cma') else 'not readable' if library else 'not tried'}",
        f"/dev/shm {(m['shm_free_bytes'] or 0) >> 20:,} MiB free",
        *(f"{n.split('/')[1]} {v:,}" for n, v in m["sockets"].items() if v),
    ]
    side = m["side_channel"]
    return [
        ("NIXL", f"{nixl['version']} ({nixl['module']})" if nixl else "not installed"),
        ("UCX", f"{library['version']}; {build}" if library else ""),
        ("usable", ", ".join(usable)),
        ("not usable", "; ".join(f"{', '.join(t)}: {why}" for why, t in reasons.items())),
        ("GPU", "; ".join(gpus) or ("AMD (/dev/kfd)" if m["amd"] else "none")),
        ("topology", ", ".join(links)),
        ("GPUDirect", ", ".join(gpudirect)),
        ("RDMA", "; ".join(ports) or "none"),
        ("network", ", ".join(up)),
        ("container", f"{m['container'] or 'none'}{'; own namespaces: ' + ', '.join(own) if own else ''}"),
        ("kernel", "; ".join(kernel)),
        ("side channel", f"{side['host']}:{side['port']} {side['state']}"),
        ("environment", ", ".join(f"{k}={v}" for k, v in m["environment"].items())),
    ]


def _arm(a: dict[str, Any], findings: list[dict[str, Any]]) -> str:
    p, took = a["prediction"], a["probe"]
    expected = "not known" if p is None else " or ".join(p["transports"]) or "nothing"
    expected += " by software emulation" if p and p["emulated"] else ""
    said = f"{a['arm']}: claims {a['expect'] or 'nothing'}; expected {expected}"
    if took:
        pulled = f"a tiny pull took {took['verdict']}, {took['gb_per_s']} GB/s"
        said += f"; {'a tiny pull failed' if took['error'] else pulled}"
    verdict = "BLOCKED" if any(f["weight"] == "blocks" for f in findings) else "ok"
    return _item(f"{verdict:<8}{said}")


def _grouped(pairs: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _line(name: str, value: str) -> str:
    return textwrap.fill(f"{name:<13}{value}", WIDTH, subsequent_indent=" " * 13, break_on_hyphens=False)


def _item(said: str, indent: str = "  ") -> str:
    return textwrap.fill(said, WIDTH, initial_indent=indent, subsequent_indent=" " * 9, break_on_hyphens=False)
