"""``kvlab sweep EXPERIMENT --grid key=a,b,c ...``: a grid of parameter sets, one run a cell, resumable.

Cells are executed by ``kvlab run`` in processes of their own, one after another, so that no two share a core, a GPU
or a link.  ``sweep.json`` in the sweep's folder says what is done: the same command with ``--resume FOLDER`` goes on
where it stopped and repeats no finished cell.

``--on ray`` with ``--place pack``, or an experiment of one machine: every free node of the cluster runs a cell at a
time and is claimed whole.  With ``--place spread`` a cell runs across nodes, one cell after another.
"""

from __future__ import annotations

import argparse
import html
import itertools
import json
import queue
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import experiments, params, runs, tables
from kvlab.errors import DONE, FAILED, BadInput, RunFailed
from kvlab.measures.common import progress
from kvlab.verbs.run import assignments, configure_place, set_place

Cell = dict[str, Any]
#: the parameter file on a node
_GIVEN = "parameters.yaml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("experiment", help="name; `kvlab list` shows them")
    parser.add_argument(
        "--grid", action="append", default=[], metavar="KEY=A,B,C", help="values of one parameter (repeatable)"
    )
    parser.add_argument("-f", "--file", help="parameter file that every cell starts from")
    parser.add_argument("-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="for every cell")
    parser.add_argument("--out", default="runs", help="folder that takes the sweep (default: runs)")
    parser.add_argument("--resume", metavar="FOLDER", help="go on with a sweep that stopped")
    parser.add_argument("--measure-only", action="store_true", help="no notebooks")
    parser.add_argument("--dry-run", action="store_true", help="print the parameters of every cell, run nothing")
    configure_place(parser)


def grid(words: Sequence[str]) -> list[dict[str, str]]:
    """Return every combination of KEY=A,B,C words, the last key running fastest; BadInput for a key named twice."""
    axes: dict[str, list[str]] = {}
    for word in words:
        for key, values in assignments([word], "--grid takes KEY=A,B,C").items():
            if key in axes:
                raise BadInput(f"--grid names {key!r} twice: give all its values at once, {key}=A,B")
            axes[key] = [v.strip() for v in values.split(",") if v.strip()]
            if not axes[key]:
                raise BadInput(f"--grid {word!r} has no values")
    if not axes:
        raise BadInput("a sweep needs --grid KEY=A,B,C")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def begin(args: argparse.Namespace) -> dict[str, Any]:
    """Return the state of a sweep: all cells waiting."""
    experiment = experiments.get(args.experiment)
    if not args.dry_run:
        experiments.require(experiment)
    name = args.file or experiment.default
    path = params.resolve_file(experiment.name, name) if name else None
    cells: list[Cell] = [
        {"cell": i, "parameters": {**assignments(args.parameter), **values}, "axes": values, "outcome": "waiting"}
        for i, values in enumerate(grid(args.grid))
    ]
    return {"experiment": experiment.name, "file": str(path) if path else "", "cells": cells}


def resume(args: argparse.Namespace) -> dict[str, Any]:
    """Return the state of the sweep to go on with."""
    try:
        state: dict[str, Any] = json.loads((Path(args.resume) / "sweep.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"{args.resume}: no sweep to resume ({error})") from None
    if state["experiment"] != experiments.get(args.experiment).name:
        raise BadInput(f"{args.resume} is a sweep of {state['experiment']}")
    return state


def save(folder: Path, state: dict[str, Any]) -> None:
    """Write sweep.json."""
    runs.write_atomic(folder / "sweep.json", (json.dumps(state, indent=2, ensure_ascii=False) + "\n").encode())


def command(experiment: str, file: str, cell: Cell, folder: Path, more: Sequence[str]) -> list[str]:
    """Return the ``kvlab run`` of one cell; its run folder lies in the sweep's."""
    words = [sys.executable, "-m", "kvlab.cli", "run", experiment, *(["-f", file] if file else [])]
    words += [w for k, v in cell["parameters"].items() for w in ("-p", f"{k}={v}")]
    label = "_".join(f"{k}-{v}" for k, v in cell["axes"].items())[:60]
    return [*words, "--out", str(folder), "--label", label, *more]


def execute(words: Sequence[str]) -> tuple[int, str]:
    """Run one cell; return its exit code and last stdout line.  Ctrl-C reaches the cell and then ends the sweep."""
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        text, _ = process.communicate()
    except KeyboardInterrupt:
        process.wait()
        raise
    lines = text.strip().splitlines()
    return process.returncode, lines[-1] if lines else ""


def finish(cell: Cell, code: int, last: str) -> None:
    """Note a cell's outcome; what gave no document failed."""
    try:
        document = json.loads(last)
    except ValueError:
        document = {}
    cell |= {"outcome": document.get("outcome", "failed"), "exit_code": code, "run": document.get("run")}
    cell |= {"verdict": document.get("verdict"), "error": document.get("error")}


def main(args: argparse.Namespace) -> int:
    """Run what is not done, then write one table and one report over all cells."""
    able = "ray" in experiments.get(args.experiment).model().model_fields
    # A cell for each node, or a cell across nodes.
    alone = args.on == "ray" and args.place != "spread" and (args.place == "pack" or not able)
    state = resume(args) if args.resume else begin(args)
    todo = [c for c in state["cells"] if c["outcome"] not in ("completed", "contradicted")]
    base = params.read_file(Path(state["file"])) if state["file"] else {}
    for cell in todo:  # all are checked before the first runs
        chosen = params.validate(state["experiment"], {**base, **cell["parameters"]}, f"cell {cell['axes']}")
        set_place(args, chosen, alone=alone)
    if args.dry_run:
        for cell in todo:
            print(f"cell {cell['cell']}:", shlex.join(f"{k}={v}" for k, v in cell["parameters"].items()))
        return DONE
    folder = Path(args.resume) if args.resume else runs.new_folder(f"{state['experiment']}-sweep", out=args.out)
    save(folder, state)
    place = {"on": "here"} if alone else {k: v for k in ("on", "address", "place") if (v := getattr(args, k))}
    more = [w for k, v in place.items() for w in (f"--{k}", v)] + ["--measure-only"] * args.measure_only
    given = Path(state["file"]).read_bytes() if state["file"] and alone else b""
    for cell in todo:
        file = str(folder / _GIVEN) if given else state["file"]
        cell["words"] = command(state["experiment"], file, cell, folder, more)
    try:
        for cell, code, last in _on_nodes(todo, given, folder, args.address or "") if alone else _local(todo):
            finish(cell, code, last)
            save(folder, state)
    finally:
        save(folder, state)
        table = collect(state)
        runs.write_atomic(folder / "cells.csv", table.to_csv(index=False).encode())
        runs.write_atomic(folder / "report.html", report(state, table).encode())
    failed = sum(c["outcome"] not in ("completed", "contradicted") for c in state["cells"])
    print(table.to_string(index=False, max_colwidth=60))
    print(json.dumps({"sweep": str(folder.resolve()), "cells": len(state["cells"]), "failed": failed}))
    return FAILED if failed else DONE


def _local(todo: list[Cell]) -> Iterator[tuple[Cell, int, str]]:
    for cell in progress(todo, "cells"):
        yield cell, *execute(cell["words"])


def _on_nodes(todo: list[Cell], given: bytes, folder: Path, address: str) -> Iterator[tuple[Cell, int, str]]:
    """Run a cell at a time on every node of a cluster; with a lost node its cell fails and the others go on."""
    from kvlab.placement import ray

    waiting: queue.SimpleQueue[Cell] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[Cell, int, str]] = queue.SimpleQueue()
    for cell in todo:
        waiting.put(cell)
    with ray.every_node(address, folder) as nodes:

        def serve(node: ray.Node) -> None:
            while not (node.lost and any(not n.lost for n in nodes)):
                try:
                    cell = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((cell, *node.execute(cell["words"], f"cell-{cell['cell']}.log", {_GIVEN: given})))
                except Exception as error:  # or the sweep waits for this cell for ever
                    done.put((cell, FAILED, json.dumps({"outcome": "failed", "error": str(error)})))

        for node in nodes:
            threading.Thread(target=serve, args=(node,), daemon=True).start()
        for _ in progress(todo, "cells"):
            yield done.get()


def collect(state: dict[str, Any]) -> pd.DataFrame:
    """Return a row a cell: its axes, outcome, run, median pull, first token and verdict, where the run has them."""
    rows = []
    for cell in state["cells"]:
        row = {**cell["axes"], "outcome": cell["outcome"], "run": Path(cell["run"]).name if cell.get("run") else ""}
        if cell.get("run"):
            try:
                run = runs.load(cell["run"])
            except (BadInput, RunFailed):
                run = None
            for table, value in (("pulls", "xfer_us"), ("requests", "ttft_ms")):
                frame = run.table(table) if run and run.has(table) else pd.DataFrame()
                if len(frame):
                    for arm, own in frame[~frame["warmup"].astype(bool)].groupby("arm", sort=False):
                        row[f"{value} {arm}"] = own[value].median()
        rows.append(row | {"note": cell.get("error") or cell.get("verdict") or ""})
    return pd.DataFrame(rows)


def report(state: dict[str, Any], table: pd.DataFrame) -> str:
    """Return one page with the table over all cells and a link to each cell's own report."""
    frame = table.copy()
    labels = {c: c for c in frame.columns}
    numbers = {c: 2 for c in frame.columns if pd.api.types.is_float_dtype(frame[c])}
    shown = tables.show(frame, "sweep", title=f"Sweep of {state['experiment']}", labels=labels, decimals=numbers)
    links = "".join(
        f"<li><a href='{html.escape(Path(c['run']).relative_to(Path(c['run']).parents[1]).as_posix())}/report.html'>"
        f"{html.escape(str(c['axes']))}</a></li>"
        for c in state["cells"]
        if c.get("run")
    )
    head = "<!doctype html><html lang=en><meta charset=utf-8><title>kvlab sweep</title>"
    return f"{head}{shown.as_raw_html()}<ul>{links}</ul></html>\n"
