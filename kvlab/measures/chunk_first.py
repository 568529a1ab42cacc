"""chunk-first: replicas at every prefill chunk, then 1P1D, under the same offered loads.

Every configuration has its own engines, started one after another in an order drawn from the seed; requests of one
load are the same for all.  Where asked for, step times are measured at each chunk too.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.engines import answers, launch
from kvlab.engines import pd as handover
from kvlab.engines.load import Generator, Load
from kvlab.engines.router import Router
from kvlab.engines.vllm import Command, Engine
from kvlab.errors import BadInput
from kvlab.measures.common import progress
from kvlab.measures.engines import Bench, Engines, engine, memory_of, model_of
from kvlab.params import ChunkFirst, EngineArm, TcpCrossover
from kvlab.runs import Run, safe_name

#: neighbouring whole steps differ by a chunk of prefix; by more than this factor: one of them carried something else
UNLIKE = 2.5
#: in an engine's /metrics: it has a running request
_RUNNING = re.compile(r"^vllm:num_requests_running(?:\{.*\})? [1-9]", re.MULTILINE)


def check_chunks(params: ChunkFirst, model: str) -> None:
    """Refuse a chunk that the engine itself would refuse at its start; BadInput says which and why.

    vLLM's scheduler needs max_num_batched_tokens of at least max_num_seqs, and of at least one multimodal item's
    tokens (max_tokens_per_mm_item) unless limit-mm-per-prompt sets every modality to 0.
    """
    smallest = min(params.chunk_tokens)
    if params.max_num_seqs and smallest < params.max_num_seqs:
        raise BadInput(f"chunk_tokens: {smallest} is less than max_num_seqs {params.max_num_seqs}, which vLLM refuses")
    allowed = {k: n for k, n in params.limit_mm_per_prompt.items() if n}
    off = params.limit_mm_per_prompt and not allowed
    if params.max_tokens_per_mm_item > smallest and not off:
        raise BadInput(
            f"chunk_tokens: {smallest} is less than one multimodal item ({params.max_tokens_per_mm_item} tokens): "
            'raise it, or serve text only with limit_mm_per_prompt: {"image": 0, "audio": 0, "video": 0}'
        )
    config = Path(model) / "config.json"
    if config.is_file() and not params.max_tokens_per_mm_item and not off:
        keys = json.loads(config.read_text("utf-8"))
        found = [k for k in ("vision_config", "audio_config", "video_config") if k in keys]
        if found:
            raise BadInput(
                f"{model} takes {found[0].split('_')[0]} input, whose largest item is a floor for the chunk: set "
                'max_tokens_per_mm_item, or limit_mm_per_prompt: {"image": 0, "audio": 0, "video": 0} for text only'
            )


def configurations(params: ChunkFirst, model: str) -> list[tuple[EngineArm, list[Engine], int]]:
    """Return (arm, engines, chunk) of every configuration, replicas first."""
    out = []
    limits = {"limit_mm_per_prompt": params.limit_mm_per_prompt}
    for chunk in params.chunk_tokens:
        arm = EngineArm(label=f"replicas, chunk {chunk}")
        spec = engine(params, arm, "replica", model, max_num_batched_tokens=chunk, **limits)
        out.append((arm, [spec.model_copy() for _ in range(params.replicas)], chunk))
    if params.one_p_one_d:
        chunk = params.pd_chunk_tokens
        roles = [
            engine(params, params.pd_arm, role, model, max_num_batched_tokens=chunk, **limits)
            for role in ("prefill", "decode")
        ]
        out.append((params.pd_arm, roles, chunk))
    return out


def dry_run(params: ChunkFirst) -> list[Command]:
    """Return what would be started, configuration after configuration."""
    model, out = model_of(params), []
    for arm, specs, _ in configurations(params, model):
        router = Router() if len(specs) > 1 and specs[0].role == "replica" else None
        folder = Path(params.out) / "RUN" / "logs" / safe_name(arm.label)
        out += launch.commands(specs, folder=folder, router=router)
    return out


def measure(params: ChunkFirst, run: Run) -> None:
    """Fill ``requests``, ``phases``, ``engine_metrics``, ``pulls`` and, where asked, ``steps``."""
    model, began = model_of(params), time.monotonic()
    check_chunks(params, model)
    todo = configurations(params, model)
    order = np.random.default_rng(params.seed).permutation(len(todo))
    with Generator(run.logs / "bench.log", model, began_s=began) as generator:
        bench = Bench(run, generator, began)
        with bench.evidence([params.pd_arm], memory_of(params)):
            _configurations(params, run, bench, [todo[i] for i in order])


def _configurations(
    params: ChunkFirst, run: Run, bench: Bench, todo: list[tuple[EngineArm, list[Engine], int]]
) -> None:
    steps: list[pd.DataFrame] = []
    for arm, specs, chunk in progress(todo, "configurations"):
        router = Router() if len(specs) > 1 and specs[0].role == "replica" else None
        with bench.up(arm, specs, router=router, limit_s=params.start_limit_s) as engines:
            for repetition in range(-1, params.repetitions):
                for rate in params.rates_rps if repetition >= 0 else params.rates_rps[:1]:
                    load = Load(
                        params.requests if repetition >= 0 else 2 * len(specs),
                        params.prompt_tokens,
                        params.output_tokens,
                        rate_rps=rate if repetition >= 0 else None,
                        concurrency=None if repetition >= 0 else len(specs),
                        seed=params.seed + repetition + round(1000 * rate),
                        phase=f"{rate:g} requests/s",
                        repetition=repetition,
                        warmup=repetition < 0,
                    )
                    engines.phase(load, chunk_tokens=chunk)
            if params.step_prompt_tokens and specs[0].role == "replica":
                steps.append(step_times(engines, params, chunk, bench.began_s).assign(arm=arm.label))
                write_steps(run, steps)


def write_steps(run: Run, found: list[pd.DataFrame]) -> None:
    """Write table ``steps``; a chunk whose prompts all had other gaps than chunks has no rows."""
    if kept := [frame for frame in found if len(frame)]:
        run.write("steps", pd.concat(kept, ignore_index=True))


def whole_chunks(lengths: Sequence[int], chunk: int) -> list[int]:
    """Return prompts of whole steps about as long as ``lengths``: one slot of a step is the running request's, and a
    last step of few tokens could not be told from its own."""
    own = chunk - 1
    return sorted({max(1, n // own) * own for n in lengths})


def step_times(engines: Engines, params: ChunkFirst | TcpCrossover, chunk: int, began_s: float) -> pd.DataFrame:
    """Measure the engine's steps at ``chunk``: one request decodes while a long prompt is prefilled beside it.

    Between two tokens of the running request lies one step; while the prompt is prefilled each step carries a chunk of
    it (less the one token of the running request), so the gaps in that time are the steps at prefix 0, chunk, ...
    Returns rows of table ``steps``; a prompt whose steps cannot be told from others is left out.
    """
    rows: list[dict[str, Any]] = []
    target = engines.cluster.engines[0]
    for tokens in whole_chunks(params.step_prompt_tokens, chunk):
        for repetition in range(-1, params.step_repetitions):
            prompt = answers.prompts(1, tokens, params.seed + 100 * repetition + tokens)[0]
            body = {"model": target.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
            # Long enough to outlast the prompt's prefill: as many tokens as steps, and some before and after.
            length = 64 + 2 * -(-tokens // max(1, chunk - 1))
            name: dict[str, Any] = {"phase": f"steps {tokens}", "repetition": repetition, "seed": params.seed}
            load = Load(1, 32, length, concurrency=1, warmup=True, **name)
            times: dict[str, float] = {}

            def send(body: dict[str, Any] = body, times: dict[str, float] = times) -> None:
                until = time.monotonic() + 60
                while not _RUNNING.search(target.metrics_text()) and time.monotonic() < until:
                    time.sleep(0.02)
                times["sent"] = time.monotonic() - began_s
                handover.post(target.url + "/v1/completions", body)
                times["done"] = time.monotonic() - began_s

            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            frame, _ = engines.bench.generator.phase(load, target, engines.arm.label)
            thread.join(300)
            one = frame.iloc[0]
            seen = {"arm": engines.arm.label, "chunk_tokens": chunk, "prompt_tokens": tokens, "repetition": repetition}
            with (engines.bench.run.logs / "steps.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps({**seen, **times, **one[["start_s", "ttft_ms", "gaps_ms"]].to_dict()}) + "\n")
            if repetition < 0 or "done" not in times or not isinstance(one["gaps_ms"], list):
                continue
            rows += [
                {**row, "repetition": repetition, "prompt_tokens": tokens}
                for row in prefill_steps(one, times["sent"], times["done"], tokens, chunk)
            ]
    return pd.DataFrame(rows)


def prefill_steps(request: pd.Series, sent_s: float, done_s: float, tokens: int, chunk: int) -> list[dict[str, Any]]:
    """Pick the steps of a prompt sent at ``sent_s`` and answered at ``done_s`` out of a running request's gaps.

    The prompt's answer and the running request's token leave the engine after the same step, so its steps are the gaps
    in a row, as many as it has chunks, that end next to the answer; a token delivered late may move them by one gap,
    so of these three places the one with the largest sum is taken.  Nothing is returned where a longer row lies
    elsewhere between sending and answer, or where neighbouring whole steps differ far too much.  ``ordinary_ms`` of the
    rows is the median gap before the sending and after the answer, when the request ran alone.
    """
    gaps = np.asarray(request["gaps_ms"], float)
    ends = request["start_s"] + (request["ttft_ms"] + np.cumsum(gaps)) / 1e3
    own = chunk - 1  # the running request's own token is part of the step
    count = -(-tokens // own)
    inside = np.flatnonzero((ends > sent_s) & (ends - gaps / 1e3 < done_s))
    if len(inside) < count:
        return []
    sums = np.convolve(gaps[inside], np.ones(count), "valid")
    answered = int(np.abs(ends[inside] - done_s).argmin()) - count + 1
    near = [i for i in (answered - 1, answered, answered + 1) if 0 <= i < len(sums)]
    at = max(near, key=lambda i: sums[i], default=-1)
    if at < 0 or sums.max() > 1.1 * sums[at]:
        return []
    found = gaps[inside][at:][:count]
    whole = found[: tokens // own]
    if (np.maximum(whole[1:], whole[:-1]) > UNLIKE * np.minimum(whole[1:], whole[:-1])).any():
        return []
    alone = gaps[(ends < sent_s) | (ends - gaps / 1e3 > done_s)]
    ordinary = float(np.median(alone)) if len(alone) else None
    return [
        {
            "prefix_tokens": i * own,
            "chunk_tokens": min(own, tokens - i * own),
            "step_ms": float(g),
            "ordinary_ms": ordinary,
        }
        for i, g in enumerate(found)
    ]
