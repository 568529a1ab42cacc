"""``kvlab import FILE...``: logs and benchmark results from elsewhere, made into a run folder that notebooks replay."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab import runs, schema
from kvlab.capture import foreign
from kvlab.errors import BadInput
from kvlab.params import WhichTransport

#: format -> the experiment whose notebook replays it
EXPERIMENTS = {
    "log": "which-transport",
    "metrics": "post-vs-completion",
    "vllm-bench": "chunk-first",
    "aiperf": "chunk-first",
    "guidellm": "chunk-first",
    "nixlbench": "descriptor-shape",
}
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("files", nargs="+", metavar="FILE", help=f"{foreign.READ}; compressed too")
    parser.add_argument("--arm", action="append", default=[], metavar="LABEL", help="name of an arm, in order")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="prompt length, where the files do not say")
    parser.add_argument("--label", default="", help="a word for the run folder's name")
    parser.add_argument("--out", default="runs", help="folder that takes the run (default: runs)")


def labels(files: Sequence[str]) -> list[str]:
    """Name each arm after its file, after its folder too where names repeat; a number where even that repeats."""
    paths = [Path(f) for f in files]
    short = [p.name.split(".")[0] or p.name for p in paths]
    names = [s if short.count(s) == 1 else f"{p.resolve().parent.name}/{s}" for s, p in zip(short, paths, strict=True)]
    return [n if names.count(n) == 1 else f"{n} ({names[: i + 1].count(n)})" for i, n in enumerate(names)]


def _read(kind: str, contents: Sequence[Any], files: list[str], arms: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return (table name -> rows, what is not known) of files of one kind."""
    tables: dict[str, list[pd.DataFrame]] = {}
    unknown: list[str] = []
    for i, arm in enumerate(arms):
        file = files[min(2 * i + 1, len(files) - 1) if kind == "metrics" else i]
        try:
            if kind == "metrics":
                *before, after = contents[2 * i : 2 * i + 2]
                counted, pulls, said = foreign.metrics(before[0] if before else None, after, arm)
                if pulls.empty:
                    raise BadInput("no NIXL transfer was counted in these dumps; take them of the decode engine")
                found = {"engine_metrics": counted, "pulls": pulls}
            else:
                rows, said = getattr(foreign, kind.replace("-", "_"))(contents[i], arm)
                found = {"pulls" if kind == "nixlbench" else "requests": rows}
                if "requests" in found and (rows.empty or rows["ttft_ms"].isna().all()):
                    raise BadInput("no request with a first token in it")
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        except _MALFORMED as error:
            raise BadInput(f"{file}: looks like {kind} and is not whole: {type(error).__name__}: {error}") from None
        unknown += [u for u in said if u not in unknown]
        for name, frame in found.items():
            tables.setdefault(name, []).append(frame)
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}, unknown


def _limits(values: pd.Series) -> list[float]:
    """Return six limits that spread over what was seen, to two digits."""
    seen = values[values > 0]
    ends = np.geomspace(seen.quantile(0.1), seen.max() * 1.1, 6) if len(seen) else np.array([1.0])
    return sorted({float(f"{v:.2g}") for v in ends})


def parameters(kind: str, tables: dict[str, Any], contents: Sequence[Any]) -> dict[str, Any]:
    """Return what the notebook must know of the run; nothing that the files do not say."""
    if kind == "log":
        return {}
    if "requests" in tables:
        rows = tables["requests"]
        middle = rows[["prompt_tokens", "output_tokens"]].astype(float).median().fillna(0).round().astype(int).to_dict()
        limits = {"ttft_limits_ms": _limits(rows["ttft_ms"]), "gap_limits_ms": _limits(rows["longest_gap_ms"])}
        return {**middle, **limits, "pd_arm": {"label": "1P1D"}}
    pulls = tables["pulls"]
    arms = [{"label": a, "env": {}, "expect": ""} for a in pulls["arm"].unique()]
    given = {"arms": arms, "shape": "placement unknown"}
    if kind == "metrics":
        return given
    in_flight = int(pulls["in_flight"].max())
    return given | {"memory": foreign.memory(contents[0]), "in_flight": in_flight, "poll_interval_ms": 0}


def main(args: argparse.Namespace) -> int:
    """Import, and print where the run is; the last line is one JSON document."""
    if "-" in args.files:
        raise BadInput("import reads files by name: save standard input to a file first")
    kinds, contents = zip(*(foreign.recognise(f) for f in args.files), strict=True)
    kind = kinds[0]
    for file, other in zip(args.files, kinds, strict=True):
        if other != kind:
            raise BadInput(f"one kind at a time: {args.files[0]} is {kind}, {file} is {other}")
    pairs = kind == "metrics" and len(contents) > 1
    if pairs and len(contents) % 2:
        raise BadInput(f"/metrics dumps come in pairs, BEFORE AFTER; these are {len(contents)}")
    # A pair of dumps is one arm, named after the second.
    arms = labels(args.files[1::2] if pairs else args.files)
    if args.arm:
        if len(args.arm) != len(arms) or len({runs.safe_name(a) for a in args.arm}) != len(arms):
            wanted = "labels that differ in letters or digits are" if len(arms) > 1 else "label is"
            raise BadInput(f"--arm: {len(arms)} {wanted} wanted, one for each arm, in order")
        arms = args.arm
    unknown, tables = ["times, bytes and descriptors of single pulls"], dict[str, pd.DataFrame]()
    if kind != "log":
        tables, unknown = _read(kind, contents, args.files, arms)
    for name, frame in tables.items():
        if name != "engine_metrics" and (args.prompt_tokens or name == "pulls"):
            known = frame["prompt_tokens"] if "prompt_tokens" in frame else pd.Series(np.nan, frame.index)
            frame["prompt_tokens"] = known.astype(float).fillna(args.prompt_tokens or np.nan)
    if kind == "metrics" and not args.prompt_tokens:
        unknown.append("the prompt length (--prompt-tokens N)")
    experiment = EXPERIMENTS[kind]
    sources = [{"file": f, "sha256": hashlib.sha256(Path(f).read_bytes()).hexdigest()} for f in args.files]
    run = runs.create(experiment, parameters(kind, tables, contents), out=args.out, label=args.label)
    with run.recording():
        # The machine of the import says nothing of the machine that was measured.
        run.update(provenance={}, imported={"format": kind, "files": sources, "unknown": unknown})
        for name, frame in tables.items():
            # Every column is there, empty where nothing is known, so that views need not ask.
            run.write(name, frame.reindex(columns=[c.name for c in schema.TABLES[name]]))
        if kind == "log":
            from kvlab.measures import which_transport

            which_transport.measure(WhichTransport(log_path=args.files), run, arms)
    rows = {p.stem: len(run.table(p.stem)) for p in sorted(run.path.glob("*.parquet"))}
    for text in unknown:
        print(f"unknown   {text}")
    print(f"run       {run.path}\nreplay    kvlab run {experiment} --replay {run.path}")
    whole = {"run": str(run.path), "experiment": experiment, "format": kind, "rows": rows, "unknown": unknown}
    print(json.dumps(whole))
    return 0
