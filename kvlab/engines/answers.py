"""The answer check: does decoding from a pulled KV cache give what one engine alone gives?

A pull that corrupts KV still returns HTTP 200.  With greedy decoding the tokens through 1P1D are compared one by one
with those of the prefill engine doing the whole request itself, and so are the log-probabilities of what was chosen,
because few weights soon repeat a token whatever the prompt was.  How far the log-probabilities may differ is found
from repeating the single engine's run (batching and kernels round differently), and never below FLOOR.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvlab.engines import pd as handover
from kvlab.engines.launch import Cluster
from kvlab.errors import RunFailed

#: smallest tolerance of a log-probability: half-precision logits of magnitude 16 are 2**-6 apart, here and there
FLOOR = 0.05
#: how many times the spread of repeated runs is still the same answer
TIMES = 4.0


def prompts(count: int, tokens: int, seed: int, vocab: int = 1000) -> list[list[int]]:
    """Return random prompts as token numbers below ``vocab``, which any model has; the first three are special."""
    rng = np.random.default_rng(seed)
    return [[int(x) for x in rng.integers(3, vocab, tokens)] for _ in range(count)]


def _answer(document: Mapping[str, Any]) -> tuple[list[str], list[float]]:
    choice = document["choices"][0]
    found = choice.get("logprobs") or {}
    return list(found.get("tokens") or []), [float(x) for x in found.get("token_logprobs") or []]


Answer = tuple[list[str], list[float]]


def difference(expected: Answer, got: Answer) -> tuple[int | None, float]:
    """Return where the tokens first differ (None: nowhere), and how far log-probabilities are apart up to there."""
    n = next((i for i, (a, b) in enumerate(zip(expected[0], got[0], strict=False)) if a != b), None)
    if n is None and len(expected[0]) != len(got[0]):
        n = min(len(expected[0]), len(got[0]))
    same = len(expected[1]) if n is None else n
    apart = [abs(a - b) for a, b in zip(expected[1][:same], got[1][:same], strict=False)]
    return n, max(apart, default=0.0)


def check(
    cluster: Cluster,
    asked: Sequence[list[int]],
    *,
    output_tokens: int = 16,
    alter: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> pd.DataFrame:
    """Compare answers through the pair with the prefill engine's own, prompt by prompt.

    :param alter: changes the decode request; tests corrupt the block list with it
    :returns: a row a prompt: ``prompt``, ``tokens``, ``largest_logprob_difference``, ``tolerance``
    :raises RunFailed: the tokens differ, or the log-probabilities by more than the tolerance; the first diverging
        token is shown
    """
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    path = "/v1/completions"
    alone, spread = [], 0.0
    bodies = [
        {"model": cluster.model, "prompt": p, "max_tokens": output_tokens, "temperature": 0, "logprobs": 1}
        for p in asked
    ]
    for body in bodies:
        first, again = (_answer(handover.post(prefill.url + path, {**body, "ignore_eos": True})) for _ in range(2))
        alone.append(first)
        spread = max(spread, difference(first, again)[1])
    tolerance = max(FLOOR, TIMES * spread)
    rows = []
    for number, (body, expected) in enumerate(zip(bodies, alone, strict=True)):
        answer = handover.post(prefill.url + path, handover.prefill_request(body))
        request = handover.decode_request({**body, "ignore_eos": True}, answer)
        got = _answer(handover.post(decode.url + path, alter(request) if alter else request))
        at, apart = difference(expected, got)
        if not got[0]:
            raise RunFailed(f"answer check, prompt {number}: the decode engine gave no tokens")
        if at is not None:
            want, have = (t[0][at] if at < len(t[0]) else "(end)" for t in (expected, got))
            raise RunFailed(
                f"answer check failed: prompt {number} ({len(asked[number])} tokens) gives {have!r} and not {want!r} "
                f"at token {at} of {output_tokens}: the pulled KV cache is not the one that was computed"
            )
        if apart > tolerance:
            raise RunFailed(
                f"answer check failed: prompt {number} ({len(asked[number])} tokens) gives the same tokens with "
                f"log-probabilities up to {apart:.3f} apart (tolerance {tolerance:.3f}): the pulled KV cache differs"
            )
        rows.append(
            {
                "prompt": number,
                "tokens": len(got[0]),
                "largest_logprob_difference": apart,
                "tolerance": tolerance,
            }
        )
    return pd.DataFrame(rows)


def shuffled_blocks(request: dict[str, Any]) -> dict[str, Any]:
    """Return a decode request that pulls the same blocks in the wrong order, as a corrupting pull would leave them."""

    def turn(ids: Any) -> Any:
        return [turn(x) for x in ids] if ids and isinstance(ids[0], list) else list(reversed(ids))

    params = request["kv_transfer_params"]
    return {**request, "kv_transfer_params": {**params, "remote_block_ids": turn(params["remote_block_ids"])}}
