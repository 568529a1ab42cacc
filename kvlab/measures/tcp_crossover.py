"""tcp-crossover: predict from short runs from what input length 1P1D pays, then measure on both sides of it.

First the calibration: replicas at each chunk give step times and TTFTs, a prefill and a decode engine with a shaped
link between them give TTFTs at each rate.  From these the prediction is made and written into the manifest, with the
chunk that the gap limit allows at each length of the check.  Only then are the points of the check measured: 1P1D at
each rate, and replicas with those chunks.  One request at a time throughout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab import kv_layout
from kvlab.analysis import cases, steps
from kvlab.engines import launch
from kvlab.engines.load import Generator, Load
from kvlab.engines.vllm import Command, Engine
from kvlab.measures.chunk_first import step_times, write_steps
from kvlab.measures.common import progress
from kvlab.measures.engines import Bench, Engines, engine, memory_of, model_of
from kvlab.params import EngineArm, TcpCrossover
from kvlab.placement.link import Link
from kvlab.runs import Run, safe_name

#: lengths between which edges are looked for
GRID_TOKENS = 64


def replicas(params: TcpCrossover, model: str, chunk: int) -> tuple[EngineArm, list[Engine]]:
    """Return the arm and the specs of replicas with ``chunk``: as many engines as 1P1D has, set up like its own.

    Each has the connector too, though it never uses it: NIXL's progress thread polls without a pause, and where an
    engine has one core that is half of it.  The neighbour idles, as the decode engine does during a prefill.
    """
    arm = params.pd_arm.model_copy(update={"label": f"replicas, chunk {chunk}"})
    more: dict[str, Any] = {"max_num_batched_tokens": chunk}
    if not params.one_p_one_d:
        return arm, [engine(params, arm, "replica", model, **more)]
    gpus = (params.prefill_gpus, params.decode_gpus)
    return arm, [
        engine(params, arm, "prefill", model, name=f"replica-{i}", gpu_set=g, **more) for i, g in enumerate(gpus)
    ]


def pair(params: TcpCrossover, model: str) -> list[Engine]:
    """Return the prefill and the decode engine."""
    arm, chunk = params.pd_arm, params.pd_chunk_tokens
    return [engine(params, arm, role, model, max_num_batched_tokens=chunk) for role in ("prefill", "decode")]


def dry_run(params: TcpCrossover) -> list[Command]:
    """Return what calibration would start; the check's replicas depend on the prediction."""
    model, folder = model_of(params), Path(params.out) / "RUN" / "logs"
    todo = [replicas(params, model, chunk) for chunk in params.chunk_tokens]
    todo += [(params.pd_arm, pair(params, model))] if params.one_p_one_d else []
    return [c for arm, specs in todo for c in launch.commands(specs, folder=folder / safe_name(arm.label))]


def kv_of(params: TcpCrossover, model: str) -> dict[str, Any]:
    """Return the model's KV bytes (a token, full windows) and the prefill engine's chunk, for the step-time model."""
    config = Path(model) / "config.json"
    dtype = params.dtype or ("bfloat16" if params.prefill_gpus else "float16")
    layout = kv_layout.load(config if config.is_file() else model, dtype=dtype, tp=params.tp)
    m = steps.with_layout(steps.PUBLISHED, layout)
    kv = {k: getattr(m, k) * params.tp for k in ("token_bytes", "window_bytes")}
    return {**kv, "window_tokens": m.window_tokens, "prefill_chunk": params.pd_chunk_tokens}


def predict(run: Run, params: TcpCrossover, rates: Sequence[float]) -> dict[str, Any]:
    """Return the prediction as it goes into the manifest: the constants, the window by rate, the chunks of the check.

    ``crossover``: a document a rate (see :func:`kvlab.analysis.calibrate.crossover`); ``chunks``: length of the check
    -> largest chunk that keeps the gap limit there, 0 where none does.
    """
    from kvlab.analysis import calibrate  # with scipy, which a machine that only measures step times may lack

    base = replace(steps.PUBLISHED, **run.manifest["kv"])
    models = calibrate.calibrate(run.table("steps"), cases.points(run.table("cells")), base=base)
    limits: dict[str, Any] = {"gap_ms": params.gap_limit_ms, "ttft_ms": params.ttft_limit_ms or math.inf}
    limits |= {"grid": GRID_TOKENS, "most": params.most_tokens}
    chunks = steps.largest_chunk(models[0], params.check_tokens, params.gap_limit_ms)
    return {
        "constants": calibrate.constants(models).to_dict("records"),
        "crossover": [{"gbps": r, **calibrate.crossover(models, r, **limits)} for r in rates],
        "chunks": {str(n): int(c) for n, c in zip(params.check_tokens, chunks, strict=True)},
    }


class Points:
    """TTFTs as rows of table ``cells``; each phase is one kind of request, one at a time."""

    def __init__(self, params: TcpCrossover, run: Run, rates: Sequence[float]) -> None:
        self.params, self.run, self.rates, self.cells = params, run, rates, list[dict[str, Any]]()

    def add(
        self, engines: Engines, phase: str, tokens: int, repetition: int, *, chunk: int | None = None,
        gbps: float | None = None,
    ) -> None:  # fmt: skip
        """Send the requests of one case; a repetition below 0 is warm-up and kept in ``requests`` only."""
        case = cases.case(phase, tokens, chunk=chunk, gbps=gbps)
        # The same prompts on both sides, others in every repetition.
        seed = self.params.seed + 1000 * (repetition + 1) + tokens
        more: dict[str, Any] = {"repetition": repetition, "warmup": repetition < 0, "phase": case, "seed": seed}
        count = self.params.requests if repetition >= 0 else 1
        load = Load(count, tokens, output_tokens=1, concurrency=1, **more)
        rows = engines.phase(load, engines.cluster.engines[0] if chunk else None, chunk_tokens=chunk)
        if repetition >= 0:
            side = {"arm": "1P1D" if chunk is None else "replica", "case": case, "quantity": "ttft_ms", "unit": "ms"}
            link = f"{gbps:g} Gbps" if gbps else None
            self.cells += [
                {**side, "value": ms, "link": link, "repetition": repetition, "note": error}
                for ms, error in zip(rows["ttft_ms"], rows["error"], strict=True)
            ]
            self.run.write("cells", pd.DataFrame(self.cells))

    def replica(self, engines: Engines, phase: str, lengths: Sequence[int], chunk: int) -> None:
        """Measure the first of the replicas at ``lengths``."""
        for repetition in range(-1, self.params.repetitions):
            for tokens in lengths:
                self.add(engines, phase, tokens, repetition, chunk=chunk)

    def both(self, engines: Engines, phase: str, lengths: Sequence[int], link: Link) -> None:
        """Measure 1P1D at ``lengths``, the link's rate changed in every round."""
        for repetition in range(-1, self.params.repetitions):
            for gbps in self.rates:
                if link.kind == "veth":
                    link.set_rate(gbps)
                for tokens in lengths:
                    self.add(engines, phase, tokens, repetition, gbps=gbps)


def loopback_gbps(engines: Engines, tokens: int) -> float:
    """Return the rate that one pull of ``tokens`` reaches, by vLLM's counters, where no rate can be set."""
    for seed in (1, 2):  # the first pull also makes the connection
        engines.phase(Load(1, tokens, 1, concurrency=1, phase="rate", seed=seed, repetition=seed, warmup=True))
    rows = engines.bench.metrics[-1]
    total = rows[rows["engine"].astype(str).str.startswith("decode")].groupby("metric")["delta"].sum()
    seconds = total["vllm:nixl_xfer_time_seconds_sum"]
    return float(f"{8e-9 * total['vllm:nixl_bytes_transferred_sum'] / seconds:.3g}")


def measure(params: TcpCrossover, run: Run) -> None:
    """Fill ``steps``, ``cells``, ``requests``, ``phases``, ``pulls``, ``transports``, and the manifest's prediction."""
    model, began = model_of(params), time.monotonic()
    run.update(kv=kv_of(params, model))
    points, found = Points(params, run, params.rates_gbps), list[pd.DataFrame]()
    memory = memory_of(params)
    with Generator(run.logs / "bench.log", model, began_s=began) as generator:
        bench = Bench(run, generator, began)
        with bench.evidence([params.pd_arm], memory):
            order = np.random.default_rng(params.seed).permutation(params.chunk_tokens)
            for chunk in progress([int(c) for c in order], "replicas"):
                arm, specs = replicas(params, model, chunk)
                with bench.up(arm, specs, limit_s=params.start_limit_s) as engines:
                    found.append(step_times(engines, params, chunk, began).assign(arm=arm.label))
                    write_steps(run, found)
                    points.replica(engines, "calibrate", params.calibrate_tokens, chunk)
            if not params.one_p_one_d:
                return
            across(params, run, bench, points, model)
            chunks = {int(n): c for n, c in run.manifest["prediction"]["chunks"].items()}
            for chunk in progress(sorted({c for c in chunks.values() if c}), "tuned replicas"):
                arm, specs = replicas(params, model, chunk)
                with bench.up(arm, specs, start=1, limit_s=params.start_limit_s) as engines:
                    points.replica(engines, "check", [n for n, c in chunks.items() if c == chunk], chunk)


def across(params: TcpCrossover, run: Run, bench: Bench, points: Points, model: str) -> None:
    """Measure 1P1D over the link: the calibration, then, when the prediction is in the manifest, the check."""
    with Link(params.rates_gbps[0]) as link:
        places = dict(zip(("prefill", "decode"), link.places, strict=True))
        with bench.up(params.pd_arm, pair(params, model), places=places, limit_s=params.start_limit_s) as engines:
            if link.kind != "veth":
                points.rates = [loopback_gbps(engines, max(params.calibrate_tokens))]
            run.update(link={"kind": link.kind, "reason": link.reason, "rates_gbps": points.rates})
            points.both(engines, "calibrate", params.calibrate_tokens, link)
            run.update(prediction={"fixed_s": time.monotonic() - bench.began_s, **predict(run, params, points.rates)})
            points.both(engines, "check", params.check_tokens, link)
