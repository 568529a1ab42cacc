"""``kvlab list``: experiments, parameter files, recordings, and the runs in the current folder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvlab import experiments
from kvlab.paths import shared_dir


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--out", default="runs", help="folder of runs (default: runs)")


def inventory(out: Path) -> list[dict[str, Any]]:
    """Return for every experiment its question, parameter files, recordings and runs under ``out``."""
    found = []
    for e in experiments.EXPERIMENTS.values():
        files = sorted((shared_dir("params") / e.key).glob("*.yaml"))
        found.append(
            {
                "experiment": e.name,
                "question": e.question,
                "notebook": e.notebook,
                "default": e.default or None,
                "params": [p.stem for p in files],
                "recordings": [f"{e.key}/{p.name}" for p in experiments.recordings(e.name)],
                "runs": [_run(p.parent) for p in sorted((out / e.name).glob("*/manifest.json"))],
            }
        )
    return found


def _run(folder: Path) -> dict[str, Any]:
    try:
        outcome = json.loads((folder / "manifest.json").read_text("utf-8")).get("outcome")
    except (OSError, ValueError):
        outcome = "unreadable"
    return {"path": str(folder), "outcome": outcome}


def main(args: argparse.Namespace) -> int:
    """Print the inventory."""
    found = inventory(Path(args.out))
    if args.json:
        print(json.dumps(found))
        return 0
    for e in found:
        print(f"{e['experiment']}  ({e['notebook']})\n    {e['question']}")
        marked = [f"{p} (default)" if p == e["default"] else p for p in e["params"]]
        for title, names in (("params", marked), ("recordings", e["recordings"])):
            if names:
                print(f"    {title}: {', '.join(names)}")
        for run in e["runs"]:
            print(f"    run: {run['path']}  {run['outcome']}")
    return 0
