"""``kvlab run EXPERIMENT``: execute the experiment's notebook by papermill, keep everything in a run folder."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from kvlab import experiments, params, quick, runs
from kvlab.capture.provenance import committed_unchanged
from kvlab.capture.redact import hide, redact, redacted, secrets, without
from kvlab.errors import CONTRADICTED, FAILED, INTERRUPTED, OUTCOME_EXIT, BadInput, KvlabError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("experiment", help="name; `kvlab list` shows them")
    parser.add_argument("-f", "--file", help="parameter file: a path, or a name under params/EXPERIMENT/")
    parser.add_argument(
        "-p", "--parameter", action="append", default=[], metavar="KEY=VALUE", help="set one parameter (repeatable)"
    )
    parser.add_argument("--replay", metavar="RUN", help="render a recorded run instead of measuring")
    configure_place(parser)
    parser.add_argument("--label", help="a word for the run folder's name")
    parser.add_argument("--out", help="folder that takes the run (default: runs)")
    parser.add_argument(
        "--measure-only", action="store_true", help="measure without a notebook (a machine without Jupyter)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print every engine's command line and environment, start nothing"
    )


def configure_place(parser: argparse.ArgumentParser) -> None:
    """Add what says where processes run."""
    parser.add_argument("--on", choices=("here", "ray"), help="here (default), or on the nodes of a Ray cluster")
    parser.add_argument(
        "--address", help="with --on ray: the cluster, HOST:PORT (default: RAY_ADDRESS, or this host's)"
    )
    parser.add_argument(
        "--place", choices=("spread", "pack"), help="with --on ray: a node for each engine or agent, or one for all"
    )


def set_place(args: argparse.Namespace, chosen: params.Experiment, *, alone: bool = False) -> None:
    """Set the parameter ``ray`` as --on, --address and --place say; ``alone``: a node runs this all by itself."""
    asked = {k: v for k in ("address", "place") if (v := getattr(args, k)) is not None}
    if asked and args.on != "ray":
        raise BadInput(f"--{next(iter(asked))} goes with --on ray")
    if args.on == "ray" and not alone and not hasattr(chosen, "ray"):
        able = [e.name for e in experiments.EXPERIMENTS.values() if "ray" in e.model().model_fields]
        raise BadInput(
            f"{args.experiment} runs on one machine: sweep it with --place pack, a run on each node; --on ray: "
            f"{', '.join(able)}"
        )
    if args.on and hasattr(chosen, "ray"):
        given = chosen.ray.model_dump() if chosen.ray else {}
        chosen.ray = params.OnRay.model_validate(given | asked) if args.on == "ray" and not alone else None


def assignments(words: Sequence[str], takes: str = "-p takes KEY=VALUE") -> dict[str, str]:
    """Split KEY=VALUE words; values stay text, the parameter model gives them their types."""
    values = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key:
            raise BadInput(f"{takes}, this is {word!r}")
        values[key.strip()] = value
    return values


def gather(args: argparse.Namespace) -> tuple[params.Experiment, Path | None]:
    """Put the parameter file, -p, --replay, --label and --out together; return them and the file used."""
    experiment = experiments.get(args.experiment)
    name = args.file or ("" if args.replay else experiment.default)
    path = params.resolve_file(experiment.name, name) if name else None
    values: dict[str, Any] = params.read_file(path) if path else {}
    values = params.validate(experiment.name, values, str(path)).model_dump() if path else {}
    values |= assignments(args.parameter)
    for key in ("replay", "label", "out"):
        if getattr(args, key) is not None:
            values[key] = getattr(args, key)
    chosen = params.validate(experiment.name, values, "command line")
    set_place(args, chosen)
    if not chosen.replay and not experiment.default:
        recorded = experiments.recordings(experiment.name)
        if not recorded:
            raise BadInput(f"{experiment.name} only replays, and no recording of it ships with kvlab")
        chosen.replay = str(recorded[-1])
    return chosen, path


def main(args: argparse.Namespace) -> int:
    """Run, and print where everything is; the last line is one JSON document."""
    chosen, path = gather(args)
    experiment = experiments.get(args.experiment)
    if args.dry_run:
        return _dry_run(experiment, chosen)
    if chosen.replay:
        chosen.replay = str(experiments.recording(chosen).path)
    else:
        experiments.require(experiment)
    folder = _reserve(experiment.name, chosen)
    chosen.run_dir = str(folder)
    protocol = {
        "command": redact(["kvlab", *sys.argv[1:]]),
        "parameter_file": str(path) if path else None,
        # Of the time before the run, and None where no git can tell.
        "parameter_file_committed": committed_unchanged(path) if path else None,
    }
    hidden = secrets([chosen.model_dump(), dict(os.environ)])
    try:
        text = _measure(chosen) if args.measure_only else _execute(experiment, chosen, folder)
    finally:
        _settle(folder, protocol, hidden)
    return _finish(experiment, folder, without(text, hidden))


def _dry_run(experiment: experiments.Experiment, chosen: params.Experiment) -> int:
    """Print what a measuring run would start, as shell; engines only."""
    module: Any = importlib.import_module(f"kvlab.measures.{experiment.key}") if experiment.default else None
    if not hasattr(module, "dry_run"):
        raise BadInput(f"{experiment.name} starts no engines, so there is nothing to show")
    from kvlab.engines import launch

    print(launch.shell(module.dry_run(chosen)), end="")
    return 0


def _reserve(experiment: str, chosen: params.Experiment) -> Path:
    """Make the run folder now, so that the notebook and its errors have a place to go."""
    return runs.new_folder(experiment, out=chosen.out, run_dir=chosen.run_dir, label=chosen.label)


def _measure(chosen: params.Experiment) -> str:
    try:
        experiments.run_or_replay(chosen)
    except (KvlabError, OSError) as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted"
    return ""


@contextmanager
def _forwarding() -> Iterator[list[int]]:
    """Hand SIGINT and SIGTERM to the kernel, whose clean-up then runs; a second one ends kvlab itself."""
    got: list[int] = []

    def forward(signum: int, frame: object) -> None:
        got.append(signum)
        kernels = [p for p in psutil.Process().children() if "ipykernel" in " ".join(_cmdline(p))]
        if len(got) > 1 or not kernels:
            raise KeyboardInterrupt
        for kernel in kernels:
            os.kill(kernel.pid, signal.SIGINT)

    previous = {s: signal.signal(s, forward) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield got
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _execute(experiment: experiments.Experiment, chosen: params.Experiment, folder: Path) -> str:
    """Execute the notebook; return one line on what went wrong, or nothing."""
    import warnings

    quick.without_iris()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # papermill and nbclient warn about their own dependencies
        import papermill
        from nbclient.exceptions import DeadKernelError
        from papermill.exceptions import PapermillExecutionError
        from traitlets.config import Config

        # The kernel must import this kvlab wherever it is started.
        here = str(Path(runs.__file__).resolve().parent.parent)
        paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        try:
            with TemporaryDirectory(prefix="kvlab-") as sockets, _forwarding() as got:
                papermill.execute_notebook(
                    str(experiment.notebook_path),
                    str(folder / "notebook.ipynb"),
                    parameters=chosen.model_dump(),
                    kernel_name="python3",
                    progress_bar=True,
                    cwd=os.getcwd(),
                    # Unix sockets instead of TCP ports for the kernel's messages: no port to collide on.  In a folder
                    # of their own: Jupyter would put them into the current one, where two runs at once share them.
                    config=Config({"KernelManager": {"transport": "ipc", "ip": f"{sockets}/kernel"}}),
                )
        except PapermillExecutionError as error:
            if got or error.ename == "KeyboardInterrupt":
                return "interrupted"
            known = error.ename in {"BadInput", "RunFailed", "Contradicted"}
            return str(error.evalue) if known else f"cell {error.exec_count}: {error.ename}: {error.evalue}"
        except DeadKernelError:
            return (
                "interrupted" if got else "the notebook's kernel died; a recording of what it did is in the run folder"
            )
        except KeyboardInterrupt:
            return "interrupted"
        except (RuntimeError, OSError) as error:
            return f"the notebook could not be executed: {error}"
    return ""


def _settle(folder: Path, protocol: dict[str, Any], hidden: set[str]) -> None:
    """Give the manifest an outcome when the process that should have done it is gone; hide secrets."""
    notebook = folder / "notebook.ipynb"
    hide([notebook, folder / "summary.json", folder / "manifest.json", *(folder / "logs").rglob("*")], hidden)
    try:
        document = json.loads(notebook.read_text("utf-8"))
        # papermill writes the parameters, environments of arms included, into a cell and into the metadata.
        for cell in document["cells"]:
            if "injected-parameters" in cell["metadata"].get("tags", []):
                cell["source"] = redact("".join(cell["source"]))
        document["metadata"] = redacted(document["metadata"])
        runs.write_atomic(notebook, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    except (OSError, ValueError):
        # There is none; or the disk is full, and what is cut short or not cleaned of secrets is not kept.
        notebook.unlink(missing_ok=True)
    if not (folder / "manifest.json").exists():
        return
    run = runs.Run(folder, frozen=False)
    if run.manifest.get("outcome") == runs.RUNNING:
        run.update(outcome="failed", error="the measuring process ended without a word (killed, or out of memory)")
    run.update(**protocol)


def _finish(experiment: experiments.Experiment, folder: Path, text: str) -> int:
    """Render the report, print the places, and return the exit code that belongs to the outcome."""
    if not (folder / "manifest.json").exists():
        # Refused before anything was measured: nothing to keep.
        _discard(folder)
        if text == "interrupted":
            raise KeyboardInterrupt
        raise BadInput(text or "the notebook did not start a run")
    run = runs.Run(folder, frozen=False)
    outcome = str(run.manifest["outcome"])
    if text == "interrupted":
        outcome = "interrupted"
    elif text and outcome == "completed":
        outcome = "failed"
    if outcome != run.manifest["outcome"] or (text and not run.manifest.get("error")):
        run.update(outcome=outcome, error=text)
    report = None
    if (folder / "notebook.ipynb").is_file() and outcome != "interrupted":
        from kvlab import report as reports

        try:
            report = reports.render(folder)
        except (OSError, ValueError) as error:  # no place for it, or only half a notebook
            outcome, text = "failed", text or f"report.html could not be made: {error}"
            run.update(outcome=outcome, error=text)
    summary: dict[str, Any] = {}
    if (folder / "summary.json").is_file():
        summary = json.loads((folder / "summary.json").read_text("utf-8"))
    code = OUTCOME_EXIT.get(outcome, FAILED)
    text = text or str(run.manifest.get("error") or "")
    if code == CONTRADICTED:
        text = "; ".join(run.manifest.get("contradictions", [])) or text
    if code != 0:
        # A mistake in the input found by the measurement itself (a transport that does not exist, say).
        code = 2 if run.manifest.get("bad_input") and code == FAILED else code
        print(f"kvlab run {experiment.name}: {text or outcome}", file=sys.stderr)
    print(f"run       {folder}")
    for name in ("notebook.ipynb", "report.html", "charts"):
        if (folder / name).exists() and (name != "charts" or any((folder / name).iterdir())):
            print(f"{name.split('.')[0]:<9} {folder / name}")
    if summary.get("verdict"):
        print(f"verdict   {summary['verdict']}")
    document = {
        "run": str(folder),
        "experiment": experiment.name,
        "outcome": outcome,
        "report": str(report) if report else None,
        "verdict": summary.get("verdict"),
    }
    if text and code:
        document["error"] = text
    print(json.dumps(document))
    return INTERRUPTED if outcome == "interrupted" else code


def _discard(folder: Path) -> None:
    """Remove a reserved folder in which no run was started."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)
