"""post-stall: running requests' gaps while other requests' KV is pulled, by descriptor count, against a control.

Every repetition has, in random order and for every pulled prompt length, one phase ``pull`` (prefill, then the decode
request pulls) and one phase ``control`` (the same prefills at the same times, never pulled), each beside the same
steady load on the decode engine.  The prefill engine works equally in both, so that what differs is the pull.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from kvlab.engines import answers
from kvlab.engines import pd as handover
from kvlab.engines.load import Generator, Load
from kvlab.errors import RunFailed
from kvlab.measures.common import progress
from kvlab.measures.engines import Bench, Engines, dry_run, in_turn, memory_of, model_of, pair
from kvlab.params import PostStall
from kvlab.runs import Run

__all__ = ["dry_run", "measure"]


def _send(engines: Engines, prompt: list[int], pull: bool) -> None:
    cluster = engines.cluster
    body = {"model": cluster.model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    if pull:
        cluster.complete(body)
    else:
        handover.post(cluster.prefill[0].url + "/v1/completions", handover.prefill_request(body))


def _inject(params: PostStall, engines: Engines, tokens: int, pull: bool, seed: int) -> dict[str, Any]:
    """Send prompts ``interval_s`` apart, each from its own thread; return when all are through."""
    failed: list[str] = []

    def one(prompt: list[int]) -> None:
        try:
            _send(engines, prompt, pull)
        except RunFailed as error:
            failed.append(str(error))

    threads = []
    began = time.monotonic()
    for number, prompt in enumerate(answers.prompts(params.pulls, tokens, seed)):
        time.sleep(max(0.0, began + number * params.interval_s - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(prompt,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(120)
    return {"failed": len(failed), "note": failed[0][:200] if failed else ""}


def measure(params: PostStall, run: Run) -> None:
    """Fill ``requests`` (the steady ones), ``pulls``, ``phases``, ``transports``, ``verdicts``."""
    model, began = model_of(params), time.monotonic()
    rng = np.random.default_rng(params.seed)
    with Generator(run.logs / "bench.log", model, began_s=began) as generator:
        bench = Bench(run, generator, began)
        with bench.evidence(params.arms, memory_of(params)):
            _starts(params, bench, model, rng)


def _starts(params: PostStall, bench: Bench, model: str, rng: np.random.Generator) -> None:
    for start, arm in progress(in_turn(params.arms, params.starts), "engine starts"):
        with bench.up(arm, pair(params, arm, model), start=start, limit_s=params.start_limit_s) as engines:
            for tokens in params.pulled_prompt_tokens:  # NIXL's handshake and first shapes, kept out
                _send(engines, answers.prompts(1, tokens, params.seed + 7)[0], True)
            for repetition in range(-params.warmup, params.repetitions):
                todo = [(t, kind) for t in params.pulled_prompt_tokens for kind in ("pull", "control")]
                for number in rng.permutation(len(todo)):
                    tokens, kind = todo[number]
                    _phase(params, engines, tokens, kind, repetition)


def _phase(params: PostStall, engines: Engines, tokens: int, kind: str, repetition: int) -> None:
    load = Load(
        params.steady_requests,
        params.steady_prompt_tokens,
        params.steady_output_tokens,
        concurrency=params.steady_requests,
        seed=params.seed + repetition,
        phase=f"{kind} {tokens}",
        repetition=repetition,
        warmup=repetition < 0,
    )
    told: dict[str, Any] = {}

    def inject() -> None:
        time.sleep(0.5)  # let the steady requests' own prefill pass
        told.update(_inject(params, engines, tokens, kind == "pull", params.seed + 10 * repetition + tokens))

    thread = threading.Thread(target=inject, daemon=True)
    thread.start()
    # The steady load speaks with the decode engine alone: its prompts are prefilled there, nothing of it is pulled.
    engines.phase(load, engines.cluster.decode[0], pulled_tokens=tokens)
    thread.join(300)
    if told.get("failed"):
        raise RunFailed(f"{told['failed']} of {params.pulls} requests beside the steady load failed: {told['note']}")
