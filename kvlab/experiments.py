"""Experiment name -> notebook, parameter model and measuring function; running or replaying one.

To add an experiment: write a notebook, a parameter model, a ``measure(params, run)``, and one line here.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlab import runs
from kvlab.errors import BadInput, Interrupted
from kvlab.paths import shared_dir

if TYPE_CHECKING:
    from kvlab.params import Experiment as Params


@dataclass(frozen=True)
class Experiment:
    """One experiment: its name, its notebook's number, what it asks, and what measuring needs."""

    name: str
    number: int
    question: str
    #: default parameter file under params/NAME/; empty: the experiment only replays
    default: str = ""
    #: modules that measuring imports -> the extra that brings them
    needs: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        """The name as folders and modules spell it."""
        return self.name.replace("-", "_")

    @property
    def notebook(self) -> str:
        """The notebook's file name."""
        return f"{self.number:02}_{self.key}.ipynb"

    @property
    def notebook_path(self) -> Path:
        """The notebook's file."""
        return shared_dir("notebooks") / self.notebook

    def model(self) -> type[Params]:
        """Return the parameter model, the class of :mod:`kvlab.params` that is named after the experiment."""
        name = self.name.title().replace("-", "")
        model: type[Params] = getattr(importlib.import_module("kvlab.params"), name)
        return model


_NIXL = (("nixl", "cpu"),)
_ENGINES = (*_NIXL, ("vllm", "gpu"))
#: in the order of `kvlab list`
_ALL = (
    ("which-transport", 1, "Which transport carried the KV pull, and what in a log decides it?", "recorded"),
    ("post-vs-completion", 2,
     "Where does the time of a KV pull go: into issuing the reads or into waiting for the data?", "loopback", _NIXL),
    ("descriptor-shape", 3,
     "Same bytes: many small descriptors or few large ones, and what does one descriptor cost?", "loopback", _NIXL),
    ("ttft-by-transport", 8,
     "What does the transport add to the first token, and what are the 98 seconds over TCP made of?"),
    ("tcp-tuning", 5,
     "Which TCP settings of UCX and NIXL speed a pull up, on links of which rate, and which only seem to?",
     "link_5gbit", _NIXL),
    ("relative-to-nvlink", 4,
     "With real engines: how do pull, post, first token and throughput compare between transports?", "cpu", _ENGINES),
    ("post-stall", 9, "Does posting a pull's reads hold up the requests that the decode engine is running?",
     "cpu", _ENGINES),
    ("tcp-crossover", 7,
     "From what input length does 1P1D over TCP pay against tuned replicas, and does a prediction of it hold?",
     "cpu", _ENGINES),
    ("chunk-first", 6,
     "Which prefill chunk keeps stalls short, and does 1P1D still pay against replicas tuned so?", "cpu", _ENGINES),
)  # fmt: skip
EXPERIMENTS = {one[0]: Experiment(*one) for one in _ALL}


def get(name: str) -> Experiment:
    """Return the experiment ``name`` (hyphens or underscores); BadInput lists the known ones."""
    key = name.replace("_", "-")
    if key not in EXPERIMENTS:
        raise BadInput(f"unknown experiment {name!r}; known: {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[key]


def require(experiment: Experiment) -> None:
    """Check that what measuring needs is installed; BadInput names the extra that brings it."""
    for module, extra in experiment.needs:
        if importlib.util.find_spec(module) is None:
            raise BadInput(
                f"measuring {experiment.name} needs {module}, which is not installed: "
                f"pip install 'kvlab[{extra}]' (README), or replay a recording with --replay"
            )


def name_of(params: Params) -> str:
    """Return the experiment's name that ``params`` belongs to."""
    return next(e.name for e in EXPERIMENTS.values() if e.model() is type(params))


def measure(params: Params) -> runs.Run:
    """Measure into a new run folder and return it; the manifest tells the outcome even on failure."""
    experiment = get(name_of(params))
    require(experiment)
    module = importlib.import_module(f"kvlab.measures.{experiment.key}")
    run = runs.create(experiment.name, params.model_dump(), out=params.out, run_dir=params.run_dir, label=params.label)
    try:
        with run.recording():
            module.measure(params, run)
    except KeyboardInterrupt:
        raise Interrupted(f"what was measured until then is in {run.path}") from None
    return run


def run_or_replay(params: Params) -> runs.Run:
    """Measure, or open the recording that ``params.replay`` names; what a notebook's run cell calls.

    A replay that ``kvlab run`` started gets a folder of its own for charts and summary; the recording
    is never written to.
    """
    if not params.replay:
        experiment = get(name_of(params))
        if not experiment.default:
            raise BadInput(f"{experiment.name} only replays; name a recording with replay=...")
        return measure(params)
    run, experiment_name = recording(params), name_of(params)
    if params.run_dir:
        own = runs.create(experiment_name, params.model_dump(), run_dir=params.run_dir, label=params.label)
        # A recording that broke off replays to the end; evidence that contradicts a label stays so.
        told = {k: run.manifest[k] for k in ("contradictions",) if k in run.manifest}
        outcome = run.manifest["outcome"] if told.get("contradictions") else "completed"
        own.update(outcome=outcome, replay_of=str(run.path), recorded_outcome=run.manifest["outcome"], **told)
        run.out = own.path
    return run


def recording(params: Params) -> runs.Run:
    """Open the run that ``params.replay`` names; BadInput when it is one of another experiment."""
    run, wanted = runs.load(params.replay), name_of(params)
    if (own := run.manifest.get("experiment")) != wanted:
        raise BadInput(f"{params.replay} is a run of {own}, not of {wanted}: replay it with `kvlab run {own} --replay`")
    return run


def recordings(name: str) -> list[Path]:
    """Return the recordings of an experiment that ship under data/, newest name last."""
    folder = shared_dir("data") / get(name).key
    return sorted(p.parent for p in folder.glob("*/manifest.json"))
