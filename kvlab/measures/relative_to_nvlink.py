"""relative-to-nvlink: one prefill and one decode engine an arm; the same prompts over every arm's transport.

Arms' engines are started in turn, in reversed order at every other start, so that a drift of the machine does not
fall on one arm alone.  Each start is a block: warm-up, answer check (first start), then rounds of every prompt
length, one request at a time and several at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pandas as pd

from kvlab.engines import answers
from kvlab.engines.load import Generator, Load
from kvlab.errors import BadInput
from kvlab.measures.common import counted, progress
from kvlab.measures.engines import Bench, dry_run, front_of, in_turn, memory_of, model_of, pair
from kvlab.params import RelativeToNvlink
from kvlab.placement import ray
from kvlab.placement.ray import Node
from kvlab.runs import Run

__all__ = ["dry_run", "measure"]


def measure(params: RelativeToNvlink, run: Run) -> None:
    """Fill ``pulls``, ``requests``, ``phases``, ``answers``, ``engine_metrics``, ``transports``, ``verdicts``."""
    model, began = model_of(params), time.monotonic()
    generator = Generator(run.logs / "bench.log", model, began_s=began)
    bench = Bench(run, generator, began)
    # The logs of other nodes are here, to be read for evidence, when these are left.
    with bench.evidence(params.arms, memory_of(params)), _placed(params, run) as (nodes, turn):
        if nodes:
            generator.place = nodes["load"].place
            generator.tokenizer = params.model or nodes["load"].stand_in(params.stand_in)
        with generator:
            _starts(params, run, bench, model, nodes, turn)


Turn = Callable[[str], AbstractContextManager[None]]


@contextmanager
def _placed(params: RelativeToNvlink, run: Run) -> Iterator[tuple[Mapping[str, Node], Turn]]:
    """Yield the actors by role, none on this machine, and what counts an arm's bytes on their nodes.

    Router and load generator lie on the prefill engine's node, with three nodes on the third.
    """
    if params.ray is None:
        yield {}, lambda arm: nullcontext()
        return
    if params.hand_over == "dynamo":
        raise BadInput("hand_over=dynamo finds its workers by files on one machine; on Ray take client or router")
    if params.ray.nodes > 3:
        raise BadInput(f"ray.nodes={params.ray.nodes}: engines take 2 nodes, or a third for router and load generator")
    gpus = max(len([g for g in words.split(",") if g]) for words in (params.prefill_gpus, params.decode_gpus))
    engine, beside = ray.share(params.ray, gpus), 0 if params.ray.nodes == 2 else 2
    seats: dict[str, tuple[int, Mapping[str, float]]] = {"prefill": (0, engine), "decode": (1, engine)}
    seats["load"] = beside, {"CPU": params.ray.load_cpus}
    if params.hand_over == "router":
        seats["router"] = beside, {"CPU": params.ray.router_cpus}
    with (
        ray.up(params.ray, run.logs, seats, run.update) as nodes,
        counted(run, look=lambda: ray.look(list(nodes.values()))) as turn,
    ):
        cores = [nodes[role].facts["affinity"] for role in ("prefill", "decode")]
        if params.ray.place == "pack" and len(cores[0]) > 1:  # on one node each engine gets cores of its own
            nodes["prefill"].facts["affinity"], nodes["decode"].facts["affinity"] = cores[0][::2], cores[1][1::2]
        yield nodes, turn


def _starts(
    params: RelativeToNvlink, run: Run, bench: Bench, model: str, nodes: Mapping[str, Node], turn: Turn
) -> None:
    checked: list[pd.DataFrame] = []
    for start, arm in progress(in_turn(params.arms, params.starts), "engine starts"):
        specs, limit_s = pair(params, arm, model), params.start_limit_s
        if nodes:
            specs = [nodes[e.role].settle(e, None if params.model else params.stand_in) for e in specs]
        places = {role: node.place for role, node in nodes.items()}
        up = bench.up(arm, specs, start=start, router=front_of(params), places=places, limit_s=limit_s)
        with up as engines, turn(arm.label):
            # A Dynamo worker takes no requests of its own, so there is no single engine to compare with.
            if params.answer_prompts and start == 0 and params.hand_over != "dynamo":
                asked = answers.prompts(params.answer_prompts, min(params.prompt_tokens), params.seed)
                checked.append(answers.check(engines.cluster, asked).assign(arm=arm.label, start=start))
                run.write("answers", pd.concat(checked, ignore_index=True))
            rounds = params.repetitions if params.concurrent_rounds is None else params.concurrent_rounds
            first_concurrent = max(0, params.repetitions - rounds)
            for repetition in range(-1, params.repetitions):
                for tokens in params.prompt_tokens:
                    shape = {"prompt_tokens": tokens, "output_tokens": params.output_tokens}
                    # The same prompts in every arm and start, other ones in every repetition.
                    common: dict[str, Any] = {**shape, "repetition": repetition, "warmup": repetition < 0}
                    seed = params.seed + 1000 * (repetition + 1) + tokens
                    count = 1 if repetition < 0 else params.serial_requests
                    engines.phase(Load(count, concurrency=1, phase=f"one at a time {tokens}", seed=seed, **common))
                    if params.concurrent_requests and repetition >= first_concurrent:
                        load = Load(
                            params.concurrent_requests,
                            concurrency=params.concurrency,
                            phase=f"{params.concurrency} at a time {tokens}",
                            seed=seed + 500,
                            **common,
                        )
                        engines.phase(load)
