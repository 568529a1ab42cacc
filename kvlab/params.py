"""One pydantic model an experiment: what papermill injects, what a parameter file may say.

Unknown keys are refused (papermill only warns), types and ranges are checked, units are in the names.
papermill guesses types from text alone (``-p sizes [1,2]`` arrives as a string, ``-p tp 2.0`` as a
float), so the models take those forms too, and refuse what only looks like a number.
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvlab.errors import BadInput
from kvlab.paths import shared_dir


def _structured(value: Any) -> Any:
    """Accept YAML or JSON text for a list or a mapping."""
    if not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ValueError(f"{value!r} is not YAML") from None


def _listed(value: Any) -> Any:
    """Accept ``a,b``, YAML or JSON text for a list, and a lone scalar for a list of one."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return _structured(value)
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, list | tuple) else [value]


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a number is wanted, not a truth value")
    return value


def _text(value: Any) -> Any:
    # YAML reads a bare no/off/on as a truth value, which UCX_TLS or a switch never means.
    if isinstance(value, bool):
        raise ValueError(f"YAML read this as {value}; put the value in quotes")
    return str(value) if isinstance(value, int | float) else value


_LIST, _DATA, _NUMBER = BeforeValidator(_listed), BeforeValidator(_structured), BeforeValidator(_not_bool)
Count = Annotated[int, _NUMBER, Field(ge=1)]
Whole = Annotated[int, _NUMBER, Field(ge=0)]
Positive = Annotated[float, _NUMBER, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, _NUMBER, Field(ge=0, allow_inf_nan=False)]
Text = Annotated[str, BeforeValidator(_text)]
Counts = Annotated[list[Count], _LIST, Field(min_length=1)]
Texts = Annotated[list[Text], _LIST, Field(min_length=1)]
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Env = Annotated[dict[EnvName, Text], _DATA]
#: fields of kvlab.engines.model.StandIn
StandIn = Annotated[dict[str, Any], _DATA]


class Strict(BaseModel):
    """Unknown keys are refused; values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True, str_strip_whitespace=True)


class Arm(Strict):
    """One side of a comparison: a label, an environment, and the transport that the label claims."""

    label: Annotated[Text, Field(min_length=1, max_length=60)]
    #: environment of both sides, then what only one of them gets
    env: Env = {}
    initiator_env: Env = {}
    target_env: Env = {}
    #: the transport the label claims (``cma``, ``tcp``, ``rc_mlx5``, ``nvlink``, ...); empty claims nothing
    expect: Text = ""
    #: NIXL's UCX worker threads (vLLM passes 4); None takes the experiment's value
    nixl_threads: Whole | None = None
    #: NIXL's progress thread; None takes the experiment's value
    progress_thread: bool | None = None


Arms = Annotated[list[Arm], _DATA, Field(min_length=1)]


class Experiment(Strict):
    """What every experiment takes."""

    #: a run folder, or EXPERIMENT/NAME under data/: read it instead of measuring
    replay: Text = ""
    #: the run folder to write, chosen by ``kvlab run``; empty: ``out``/EXPERIMENT/TIME-LABEL
    run_dir: Text = ""
    out: Text = "runs"
    label: Annotated[Text, Field(max_length=80)] = ""

    @model_validator(mode="after")
    def _unique_arms(self) -> Experiment:
        labels = [arm.label for arm in getattr(self, "arms", [])]
        twice = {x for x in labels if labels.count(x) > 1}
        if twice:
            raise ValueError(f"two arms have the label {sorted(twice)[0]!r}")
        # Logs are named after arms.
        named: dict[str, str] = {}
        for label in labels:
            if (other := named.setdefault(re.sub(r"[\W_]+", "-", label).strip("-"), label)) != label:
                raise ValueError(f"the labels {other!r} and {label!r} must differ in letters or digits")
        return self


class WhichTransport(Experiment):
    """which-transport: read logs of anyone's engines and say what carried the pull."""

    #: logs to read, each on its own: paths; gzip and zstd too.  With logs nothing is replayed
    log_path: Annotated[list[Text], _LIST] = []
    #: size of one descriptor; None: from vLLM's metrics lines, or assumed
    descriptor_bytes: Count | None = None
    #: the transport that the logs are expected to show; empty expects nothing
    expect: Text = ""

    @model_validator(mode="before")
    @classmethod
    def _logs_or_replay(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("log_path"):
            data = {**data, "replay": ""}
        return data

    @field_validator("log_path")
    @classmethod
    def _tells(cls, value: list[str]) -> list[str]:
        from kvlab.capture import logs

        for path in value:
            # Before anything is started; a pipe can be read only once.
            if path != "-" and not Path(path).is_fifo() and (fault := logs.nothing_in(path)):
                raise BadInput(f"log_path: {path} {fault}; {logs.WANTED}")
        return value


class TtftByTransport(Experiment):
    """ttft-by-transport: published figures only; nothing is measured."""

    #: a run folder, or EXPERIMENT/NAME under data/, to place among the published figures; empty: none
    own_run: Text = ""

    @field_validator("own_run")
    @classmethod
    def _there(cls, value: str) -> str:
        from kvlab import runs

        if value:
            runs.find(value)  # its BadInput comes before anything is started
        return value


class OnRay(Strict):
    """Where on a Ray cluster an experiment's processes run; each of ``nodes`` bundles of resources lies on one node."""

    #: of a running cluster, HOST:PORT; empty: RAY_ADDRESS, else the one on this machine
    address: Text = ""
    #: ``spread``: every bundle on a node of its own; ``pack``: all on one node
    place: Literal["spread", "pack"] = "spread"
    #: pulls: with more than two every node pulls from every other one; engines: a third takes router and load generator
    nodes: Annotated[int, _NUMBER, Field(ge=2)] = 2
    #: of each engine, or a bundle's agents; GPUs None: as many as the engine has, or one where the KV lies on GPUs
    cpus: NotNegative = 1
    gpus: Whole | None = None
    resources: Annotated[dict[Text, Positive], _DATA] = {}
    #: of the router and of the load generator, beside the prefill engine or on a third node
    router_cpus: NotNegative = 1
    load_cpus: NotNegative = 1
    #: seconds to wait for room in the cluster
    wait_s: Positive = 60


#: None: everything on this machine
Ray = Annotated[OnRay | None, _DATA]


class PullParams(Experiment):
    """What every experiment that pulls between two NIXL agents takes."""

    arms: Arms
    memory: Literal["DRAM", "VRAM"] = "DRAM"
    initiator_gpu: Whole = 0
    target_gpu: Whole = 0
    shape: Literal["scattered", "contiguous"] = "scattered"
    in_flight: Count = 1
    repetitions: Count = 10
    warmup: Whole = 2
    nixl_threads: Whole = 0
    #: ``auto``: off below 8 cores, where a spinning progress thread costs the transport half its rate
    progress_thread: Literal["auto", "on", "off"] = "auto"
    #: 0 polls without pause; N imitates an engine that looks once per N ms step
    poll_interval_ms: NotNegative = 0
    #: a pull that takes longer ends the run (in a sweep: the cell)
    pull_time_limit_s: Positive = 60
    #: measure a memory copy and a plain socket in the same run, drawn as limits
    limits: bool = True
    seed: Whole = 1

    @model_validator(mode="before")
    @classmethod
    def _switch(cls, data: Any) -> Any:
        # YAML turns a bare on/off into a truth value.
        if isinstance(data, dict) and isinstance(data.get("progress_thread"), bool):
            data = {**data, "progress_thread": "on" if data["progress_thread"] else "off"}
        return data


_LOCAL = {"env": {"UCX_TLS": "sm,self,cma,tcp"}, "expect": "shared memory"}
SHARED_MEMORY_AND_TCP: Any = [
    {"label": "shared memory", **_LOCAL},
    {"label": "TCP", "env": {"UCX_TLS": "tcp"}, "expect": "tcp"},
]


class PostVsCompletion(PullParams):
    """post-vs-completion: the pull of a model's KV at several prompt lengths, split into post and drain."""

    arms: Arms = Field(SHARED_MEMORY_AND_TCP, validate_default=True)
    #: a name of kvlab/layouts, or a path to a model's config.json
    layout: Text = "gemma-4-31b"
    tp: Count = 4
    kv_dtype: Text = "bfloat16"
    #: tokens a KV block; None takes the layout's own
    block_size: Count | None = None
    prompt_tokens: Counts = [4096, 8192, 16384]
    #: pairs of agents that pull at once in each arm; on more than two nodes: of each two nodes, in each direction
    pairs: Count = 1
    ray: Ray = None


class DescriptorShape(PullParams):
    """descriptor-shape: the same bytes in many small descriptors or few large ones, over each arm's transport.

    Every pull size is pulled at every descriptor size, scattered and alone.  The variations (contiguous,
    more in flight, a slower poll) change one thing at a time, at the first pull size.
    """

    arms: Arms = Field(SHARED_MEMORY_AND_TCP, validate_default=True)
    pull_bytes: Counts = [128 << 20]
    descriptor_bytes: Counts = [8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20]
    #: one descriptor of the whole pull, too
    whole: bool = True
    #: descriptor sizes at which the variations are measured; empty: none
    varied_descriptor_bytes: Annotated[list[Count], _LIST] = [8 << 10, 128 << 10]
    contiguous: bool = True
    varied_in_flight: Annotated[list[Count], _LIST] = [4]
    varied_poll_interval_ms: Annotated[list[Positive], _LIST] = [10]
    #: a cell (arm, case) that has taken this long gets no further repetition; one that would is left out
    cell_limit_s: Positive = 60


class EngineArm(Arm):
    """An arm of real engines: the environment of both, and what differs in how they are started."""

    block_size: Count | None = None
    max_num_batched_tokens: Count | None = None
    kv_connector_extra_config: Annotated[dict[str, Any], _DATA] = {}


EngineArms = Annotated[list[EngineArm], _DATA, Field(min_length=1)]


class EngineParams(Experiment):
    """What every experiment with real engines takes: the model and how engines are started."""

    #: a hub name or a folder; empty: the stand-in model of ``stand_in``
    model: Text = ""
    #: shape of the stand-in
    stand_in: StandIn = {}
    #: KV cache and weights; empty: float16 on CPU, the model's own on GPU
    dtype: Text = ""
    load_format: Text = ""
    tp: Count = 1
    block_size: Count | None = None
    max_model_len: Count | None = None
    max_num_batched_tokens: Count | None = None
    max_num_seqs: Count | None = None
    kv_cache_bytes: Count | None = None
    gpu_memory_utilization: Positive | None = None
    #: GPUs of the prefill (or only) engine and of the decode engine, ``0,1``; empty: CPU engines
    prefill_gpus: Text = ""
    decode_gpus: Text = ""
    #: further words of each engine's command line
    engine_words: Annotated[list[Text], _LIST] = []
    #: environment of every engine, below the arm's
    engine_env: Env = {}
    start_limit_s: Positive = 300
    seed: Whole = 1


class RelativeToNvlink(EngineParams):
    """relative-to-nvlink: 1P1D engines, one arm a transport: pull, post, first token and throughput, relative."""

    arms: EngineArms = Field(SHARED_MEMORY_AND_TCP, validate_default=True)
    prompt_tokens: Counts = [512, 1024, 2048]
    output_tokens: Count = 16
    #: requests one at a time, and as many at once as ``concurrency`` says, in each repetition
    serial_requests: Count = 3
    concurrent_requests: Whole = 6
    concurrency: Count = 6
    repetitions: Count = 3
    #: in how many of a start's repetitions, its last ones, requests come at once; None: in all
    concurrent_rounds: Whole | None = None
    #: how often each arm's engines are started, arms in turn; a start is a block of its own
    starts: Count = 1
    #: prompts of the answer check at the first start of each arm; 0 leaves it out
    answer_prompts: Whole = 3
    #: prefill and decode engine on a node each, router and load generator beside the prefill engine
    ray: Ray = None
    #: ``client``: kvlab does prefill and decode requests itself and tells them apart; ``router``: vllm-router;
    #: ``dynamo``: Dynamo's frontend, and its workers in place of the engines, which leaves the answer check out
    hand_over: Literal["client", "router", "dynamo"] = "client"


_BLOCKS: Any = [{"label": f"{n} tokens a block", "block_size": n, **_LOCAL} for n in (32, 128)]


class PostStall(EngineParams):
    """post-stall: does posting thousands of reads hold up the requests that the decode engine is running?

    A steady load decodes while other requests' KV arrives.  Arms differ only in how many descriptors the same bytes
    are cut into.  Control: the same prefills at the same rate, whose KV nobody pulls.
    """

    arms: EngineArms = Field(_BLOCKS, validate_default=True)
    #: requests that decode all the time, from short prompts of their own
    steady_requests: Count = 4
    steady_prompt_tokens: Count = 32
    steady_output_tokens: Count = 400
    #: prompts whose KV arrives meanwhile, this many seconds apart; they get one token
    pulled_prompt_tokens: Counts = [2048]
    pulls: Count = 8
    interval_s: Positive = 1.0
    repetitions: Count = 3
    warmup: Whole = 1
    starts: Count = 1


LinkName = Annotated[Text, Field(pattern=r"^(none|\d+(\.\d+)?( per flow)?)$")]


class TcpTuning(PullParams):
    """tcp-tuning: one knob of UCX's TCP and of NIXL at a time, over links of several rates between two places.

    Without ``arms`` they are made from the lists: UCX's own sizes first (the baseline), then each segment size;
    threads, socket buffers and RMA rails at ``base_segment``, threads at UCX's own size too.
    """

    arms: Arms = Field(default_factory=list, validate_default=False)
    #: ``none``, a cap in Gbps for all connections together, or ``N per flow`` for each TCP connection
    links: Annotated[list[LinkName], _LIST, Field(min_length=1)] = ["none", "4.97", "1.25 per flow"]
    #: UCX_TCP_TX_SEG_SIZE and UCX_TCP_RX_SEG_SIZE; UCX's own are 8k and 64k
    segment_sizes: Texts = ["16k", "64k", "256k", "1m"]
    base_segment: Text = "256k"
    #: NIXL worker threads, each with a TCP connection of its own
    thread_counts: Annotated[list[Count], _LIST] = [4]
    #: UCX_TCP_SNDBUF and UCX_TCP_RCVBUF; UCX's own leaves them to the kernel
    socket_buffers: Annotated[list[Text], _LIST] = ["8m"]
    rma_rails: Annotated[list[Count], _LIST] = [4]
    #: arms with threads pull each of these, others the first only: NIXL hands its threads pieces of 1,024
    descriptor_counts: Counts = [1023, 1024, 4096]
    descriptor_bytes: Count = 128 << 10
    repetitions: Count = 8
    pull_time_limit_s: Positive = 10
    warmup: Whole = 1

    @model_validator(mode="before")
    @classmethod
    def _arms_from_lists(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("arms"):
            return data
        take = {n: data.get(n, f.get_default(call_default_factory=True)) for n, f in cls.model_fields.items()}
        base, lists = str(take["base_segment"]), {k: _listed(take[k]) or [] for k in _TCP_KNOBS}

        def arm(label: str, segment: str = "", threads: int | None = None, **env: str) -> dict[str, Any]:
            sizes = dict.fromkeys(("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"), segment) if segment else {}
            env = {"UCX_TLS": "tcp", **sizes, **env}
            return {"label": label, "env": env, "nixl_threads": threads, "expect": "tcp"}

        arms = [arm("UCX default"), *(arm(s, s) for s in map(str, lists["segment_sizes"]))]
        for n in lists["thread_counts"]:
            arms += [arm(f"UCX default, {n} threads", "", n), arm(f"{base}, {n} threads", base, n)]
        for size in lists["socket_buffers"]:
            arms += [arm(f"{base}, buffers {size}", base, UCX_TCP_SNDBUF=str(size), UCX_TCP_RCVBUF=str(size))]
        arms += [arm(f"{base}, {n} rails", base, UCX_MAX_RMA_RAILS=str(n)) for n in lists["rma_rails"]]
        return {**data, "arms": arms}


_TCP_KNOBS = ("segment_sizes", "thread_counts", "socket_buffers", "rma_rails")


def _pd_arm(**more: Any) -> Any:
    return Field({"label": "1P1D", "nixl_threads": 0, **more}, validate_default=True)


class ChunkFirst(EngineParams):
    """chunk-first: replicas over the prefill chunk (max-num-batched-tokens), then against 1P1D on equal hardware."""

    #: large enough that a whole prompt in one step holds up a running request for many ordinary steps
    stand_in: StandIn = {
        "layers": 8, "hidden": 512, "heads": 8, "kv_heads": 8, "head_dim": 64, "intermediate": 1408,
    }  # fmt: skip
    max_model_len: Count | None = 2048
    max_num_seqs: Count | None = 16
    #: chunks to try, each with its own start of the replicas
    chunk_tokens: Counts = [2048, 512, 256]
    replicas: Count = 2
    #: one prefill and one decode engine beside the replicas; off where there is room for one engine only
    one_p_one_d: bool = True
    #: the prefill chunk of 1P1D, which no running request waits for
    pd_chunk_tokens: Count = 2048
    prompt_tokens: Count = 1024
    output_tokens: Count = 64
    #: offered loads in requests a second, over all engines (Poisson arrivals)
    rates_rps: Annotated[list[Positive], _LIST, Field(min_length=1)] = [0.5, 1]
    #: 36 and more: with fewer even a load that all of them keep has a Wilson interval that reaches below 90 percent
    requests: Count = 36
    repetitions: Count = 1
    #: environment and expected transport of 1P1D; NIXL's own threads would spin on the cores of CPU engines
    pd_arm: Annotated[EngineArm, _DATA] = _pd_arm(**_LOCAL)
    #: of an image, audio clip or video: the engine takes no smaller chunk unless their limits are 0
    max_tokens_per_mm_item: Whole = 0
    limit_mm_per_prompt: Annotated[dict[str, Whole], _DATA] = {}
    #: limits that configurations are ranked over
    ttft_limits_ms: Annotated[list[Positive], _LIST] = [
        250, 350, 500, 700, 1000, 1400, 2000, 2800, 4000, 5600, 8000, 11200,
    ]  # fmt: skip
    gap_limits_ms: Annotated[list[Positive], _LIST] = [
        20, 30, 40, 60, 80, 110, 150, 200, 300, 400, 550, 750, 1000, 1400, 2000, 3000,
    ]  # fmt: skip
    #: also measure step times at each chunk, for tcp-crossover's model: one long prompt beside one running request
    step_prompt_tokens: Annotated[list[Count], _LIST] = []
    step_repetitions: Count = 3


class TcpCrossover(EngineParams):
    """tcp-crossover: step times and transfer at short inputs, the crossover predicted from them, then measured."""

    #: few KV heads and many layers: a step costs much beside its tokens, and a token's KV is small (2 KiB)
    stand_in: StandIn = {
        "layers": 8, "hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 64, "intermediate": 512,
    }  # fmt: skip
    max_model_len: Count | None = 8192
    max_num_seqs: Count | None = 8
    #: chunks (max-num-batched-tokens) of the replicas that are calibrated, each with its own start
    chunk_tokens: Counts = [512, 64]
    #: prompts whose steps are timed at each chunk: the attention cost is known as far as the longest
    step_prompt_tokens: Counts = [1024, 4096]
    step_repetitions: Count = 3
    #: short inputs at which TTFT is measured on both sides
    calibrate_tokens: Counts = [256, 512, 1024]
    #: inputs of the check, on both sides of the crossover that is expected
    check_tokens: Counts = [192, 1024, 4096]
    #: a prefill and a decode engine with the shaped link between them; off where there is room for one engine only
    one_p_one_d: bool = True
    #: the prefill chunk of 1P1D
    pd_chunk_tokens: Count = 512
    #: rates of the link, at the calibration and at the check, in turn
    rates_gbps: Annotated[list[Positive], _LIST, Field(min_length=1)] = [0.05, 0.8]
    #: requests of one kind in a repetition, one at a time
    requests: Count = 2
    repetitions: Count = 5
    #: longest gap that a replica may make between two tokens: sets its chunk
    gap_limit_ms: Positive = 60
    #: None: no limit
    ttft_limit_ms: Positive | None = None
    #: end of the input lengths looked at
    most_tokens: Count = 8192
    #: environment and expected transport of 1P1D; segments above UCX's own 8 KiB, which is slow over a veth pair
    pd_arm: Annotated[EngineArm, _DATA] = _pd_arm(
        env={"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}, expect="tcp"
    )


def explain(error: ValidationError, where: str) -> BadInput:
    """Turn pydantic's errors into one line: where, which key, what is wrong."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        text = f"unknown parameter {key!r}"
    else:
        message = first["msg"].removeprefix("Value error, ")
        given = "" if isinstance(first["input"], dict | BaseModel) else f" (got {first['input']!r})"
        text = f"parameter {key!r}: {message}{given}" if key else message
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return BadInput(f"{where}: {text}{more}")


def model_of(experiment: str) -> type[Experiment]:
    """Return the parameter model of ``experiment``; BadInput names the known ones."""
    from kvlab.experiments import get

    return get(experiment).model()


def validate(experiment: str, values: Mapping[str, Any], where: str = "parameters") -> Experiment:
    """Check ``values`` against the experiment's model; BadInput says what is wrong in one line."""
    model = model_of(experiment)
    unknown = [k for k in values if k not in model.model_fields]
    if unknown:
        import difflib

        near = difflib.get_close_matches(str(unknown[0]), model.model_fields, 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(model.model_fields)}"
        raise BadInput(f"{where}: unknown parameter {unknown[0]!r}{hint}")
    try:
        return model(**values)
    except ValidationError as error:
        raise explain(error, where) from None


def resolve_file(experiment: str, name: str) -> Path:
    """Find a parameter file: a path, or NAME meaning params/EXPERIMENT/NAME.yaml."""
    folder = shared_dir("params") / experiment.replace("-", "_")
    for path in (Path(name), folder / name, folder / f"{name}.yaml"):
        if path.is_file():
            return path
    known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml"))) or "none"
    raise BadInput(f"no parameter file {name!r}; for {experiment} kvlab ships: {known}")


def read_file(path: Path) -> dict[str, Any]:
    """Read a parameter file with yaml.safe_load; BadInput when it is no mapping, or empty."""
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise BadInput(f"{path}: not a readable YAML file: {detail}") from None
    if document is None:
        raise BadInput(f"{path} is empty: write KEY: VALUE into it, or leave -f out")
    if not isinstance(document, dict):
        raise BadInput(f"{path}: a mapping of parameters is wanted, this is a {type(document).__name__}")
    return {str(k): v for k, v in document.items()}


_NOTEBOOK_NAMES = {"In", "Out", "get_ipython", "exit", "quit", "open"}


def parameters(experiment: str, scope: Mapping[str, Any]) -> Experiment:
    """Collect and check a notebook's parameters: call it as ``kvlab.parameters(NAME, globals())``.

    Any plain value (number, text, list, mapping) among the globals that the model does not know is
    refused: it is a parameter that papermill injected under a mistyped name.
    """
    model = model_of(experiment)
    plain = {
        name: value
        for name, value in scope.items()
        if not name.startswith("_")
        and name not in _NOTEBOOK_NAMES
        and not callable(value)
        and not isinstance(value, types.ModuleType)
        and isinstance(value, bool | int | float | str | list | tuple | dict | None)
    }
    given = {n: v for n, v in plain.items() if not (v is None and n not in model.model_fields)}
    return validate(experiment, given, f"notebook of {experiment}")
