"""The command line: ``kvlab VERB ...``.  Only the chosen verb's module is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from kvlab import __version__
from kvlab.errors import BAD_INPUT, FAILED, INTERRUPTED, KvlabError

#: verb -> (module, one line of help)
VERBS: dict[str, tuple[str, str]] = {
    "run": ("kvlab.verbs.run", "run an experiment (or replay a recording) and render its notebook"),
    "explain": ("kvlab.verbs.explain", "say from any log which transport carried the KV pull"),
    "check": ("kvlab.verbs.check", "say beforehand what will carry it on this machine, and what is in the way"),
    "plan": ("kvlab.verbs.plan", "say from which input length 1P1D pays, and the chunk to set"),
    "compare": ("kvlab.verbs.compare", "compare runs, across machines too"),
    "sweep": ("kvlab.verbs.sweep", "run an experiment over a grid of parameters"),
    "import": ("kvlab.verbs.import_", "turn logs and benchmark results from elsewhere into a run folder"),
    "list": ("kvlab.verbs.list", "list experiments, parameter files, recordings and runs"),
    "lab": ("kvlab.verbs.lab", "open JupyterLab on the notebooks"),
}

_EPILOG = """exit codes: 0 done; 1 the run or check failed; 2 bad input or usage;
3 transport not determined; 4 transport contradicts the label or --expect; 130 interrupted"""


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlab",
        description="Which transport carried the KV cache, what each pull cost and why, "
        "and whether prefill/decode disaggregation pays.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvlab {__version__}")
    sub = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, (module, text) in VERBS.items():
        one = sub.add_parser(verb, help=text, description=text[0].upper() + text[1:] + ".")
        if verb == chosen:
            importlib.import_module(module).configure(one)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code (table in :mod:`kvlab.errors`)."""
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # A terminal of another character set shows \xb5 for what it lacks; nothing ends for it.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    chosen = next((w for w in words if not w.startswith("-")), None)
    try:
        args = _parser(chosen if chosen in VERBS else None).parse_args(words)
    except SystemExit as stop:
        return BAD_INPUT if stop.code not in (0, None) else 0
    try:
        return int(importlib.import_module(VERBS[args.verb][0]).main(args))
    except KvlabError as error:
        print(f"kvlab {args.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"kvlab {args.verb}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except OSError as error:
        # A disk that is full or taken away, wherever it shows.
        print(f"kvlab {args.verb}: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    raise SystemExit(main())
