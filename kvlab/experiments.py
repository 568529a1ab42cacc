"""Experiment name -> notebook, parameter model and measuring function; running or replaying one.

To add an experiment: write a notebook, a parameter model, a ``measure(params, run)``, and one line here.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import runs
from kvlab.errors import BadInput, Interrupted
from kvlab.paths import shared_dir

if TYPE_CHECKING:
    from kvlab.params import Experiment as Params


@dataclass(frozen=True)
class Experiment:
    """One experiment: its names, what it asks, and what measuring needs."""

    name: str
    notebook: str
    params: str
    question: str
    #: default parameter file under params/NAME/; empty: the experiment only replays
    default: str = ""
    #: modules that measuring imports -> the extra that brings them
    needs: tuple[tuple[str, str], ...] = ()

    def model(self) -> type[Params]:
        """Return the parameter model, a class of :mod:`kvlab.params`."""
        model: type[Params] = getattr(importlib.import_module("kvlab.params"), self.params)
        return model

    @property
    def key(self) -> str:
        """The name as folders and modules spell it."""
        return self.name.replace("-", "_")

    @property
    def notebook_path(self) -> Path:
        """The notebook's file."""
        return shared_dir("notebooks") / self.notebook


_NIXL = (("nixl", "cpu"),)
_ENGINES = (("nixl", "cpu"), ("vllm", "gpu"))

EXPERIMENTS: dict[str, Experiment] = {
    e.name: e
    for e in (
        Experiment(
            "which-transport",
            "01_which_transport.ipynb",
            "WhichTransport",
            "Which transport carried the KV pull, and what in a log decides it?",
            default="recorded",
        ),
        Experiment(
            "post-vs-completion",
            "02_post_vs_completion.ipynb",
            "PostVsCompletion",
            "Where does the time of a KV pull go: into issuing the reads or into waiting for the data?",
            default="loopback",
            needs=_NIXL,
        ),
        Experiment(
            "descriptor-shape",
            "03_descriptor_shape.ipynb",
            "DescriptorShape",
            "Same bytes: many small descriptors or few large ones, and what does one descriptor cost?",
            default="loopback",
            needs=_NIXL,
        ),
        Experiment(
            "ttft-by-transport",
            "08_ttft_by_transport.ipynb",
            "TtftByTransport",
            "What does the transport add to the first token, and what are the 98 seconds over TCP made of?",
        ),
        Experiment(
            "tcp-tuning",
            "05_tcp_tuning.ipynb",
            "TcpTuning",
            "Which TCP settings of UCX and NIXL speed a pull up, on links of which rate, and which only seem to?",
            default="link_5gbit",
            needs=_NIXL,
        ),
        Experiment(
            "relative-to-nvlink",
            "04_relative_to_nvlink.ipynb",
            "RelativeToNvlink",
            "With real engines: how do pull, post, first token and throughput compare between transports?",
            default="cpu",
            needs=_ENGINES,
        ),
        Experiment(
            "post-stall",
            "09_post_stall.ipynb",
            "PostStall",
            "Does posting a pull's reads hold up the requests that the decode engine is running?",
            default="cpu",
            needs=_ENGINES,
        ),
        Experiment(
            "tcp-crossover",
            "07_tcp_crossover.ipynb",
            "TcpCrossover",
            "From what input length does 1P1D over TCP pay against tuned replicas, and does a prediction of it hold?",
            default="cpu",
            needs=_ENGINES,
        ),
        Experiment(
            "chunk-first",
            "06_chunk_first.ipynb",
            "ChunkFirst",
            "Which prefill chunk keeps stalls short, and does 1P1D still pay against replicas tuned so?",
            default="cpu",
            needs=_ENGINES,
        ),
    )
}


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
    return next(e.name for e in EXPERIMENTS.values() if e.params == type(params).__name__)


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
    run = runs.load(params.replay)
    experiment_name = name_of(params)
    if run.manifest["experiment"] != experiment_name:
        raise BadInput(f"{params.replay} is a run of {run.manifest['experiment']}, not of {experiment_name}")
    if params.run_dir:
        own = runs.create(experiment_name, params.model_dump(), run_dir=params.run_dir, label=params.label)
        own.update(outcome=run.manifest["outcome"], replay_of=str(run.path))
        run.out = own.path
    return run


def recordings(name: str) -> list[Path]:
    """Return the recordings of an experiment that ship under data/, newest name last."""
    folder = shared_dir("data") / get(name).key
    return sorted(p.parent for p in folder.glob("*/manifest.json"))


def defaults_as_code(name: str) -> dict[str, Any]:
    """Return what a notebook's parameters cell must name: every field with its default."""
    model = get(name).model()
    return {k: v for k, v in model().model_dump().items() if k in model.model_fields}
