"""The load generator's process: vLLM's own ``vllm bench serve``, one phase after another, without the command line.

``python -m kvlab.engines.bench FD PARENT`` imports vLLM once (ten seconds and more on few cores) and then runs each
phase that it gets over the inherited socket FD: ``vllm.benchmarks.serve`` with the words of its own command line.
The ``vllm`` command itself fails with the CPU build, which is not named vllm.

For 1P1D without a proxy it registers one more backend, ``kvlab-pd``: the prefill request first, then the streamed
decode request with the blocks that the prefill engine named, as vllm-router does it.  Times then include both, and
the prefill request's own time is kept for each request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from kvlab.engines import pd
from kvlab.placement.local import die_with_parent

BACKEND = "kvlab-pd"
_prefill_url = ""
_prefill_s: dict[str, float] = {}


async def _hand_over(request_func_input: Any, session: Any, pbar: Any = None) -> Any:
    """Do one request in two steps; its time to first token counts from the prefill request on."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput, async_request_openai_completions

    request, began = request_func_input, time.perf_counter()
    body = {
        "model": request.model_name or request.model,
        "prompt": request.prompt,
        "max_tokens": request.output_len,
        "ignore_eos": request.ignore_eos,
        **(request.extra_body or {}),
    }
    try:
        answer = await pd.prefill(session, _prefill_url, body)
    except Exception as error:
        if pbar:
            pbar.update(1)
        return RequestFuncOutput(prompt_len=request.prompt_len, error=f"prefill: {error}", start_time=began)
    spent = time.perf_counter() - began
    _prefill_s[str(request.request_id)] = spent
    extra = {**(request.extra_body or {}), "kv_transfer_params": answer["kv_transfer_params"]}
    output = await async_request_openai_completions(replace(request, extra_body=extra), session, pbar)
    output.start_time = began
    output.latency += spent
    if output.success:
        output.ttft += spent
    return output


def _phase(words: list[str]) -> dict[str, Any]:
    from vllm.benchmarks import serve
    from vllm.benchmarks.lib import endpoint_request_func as functions

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser
    except ImportError:
        Parser = argparse.ArgumentParser
    if BACKEND not in functions.ASYNC_REQUEST_FUNCS:
        functions.ASYNC_REQUEST_FUNCS[BACKEND] = _hand_over
        # Sampling parameters and --ignore-eos are passed on for these backends only.
        functions.OPENAI_COMPATIBLE_BACKENDS.append(BACKEND)
    parser = Parser(prog="vllm bench serve")
    serve.add_cli_args(parser)
    _prefill_s.clear()
    try:
        args = parser.parse_args(words)
    except SystemExit:
        raise ValueError(f"vllm bench serve does not take these words: {' '.join(words)}") from None
    # The monotonic clock is one for all processes of a machine; vLLM reckons by the other.
    zero = time.monotonic() - time.perf_counter()
    result = asyncio.run(serve.main_async(args))
    kept = ("input_lens", "output_lens", "ttfts", "itls", "errors", "start_times")
    document: dict[str, Any] = {k: result.get(k) for k in kept}
    document |= {k: result.get(k) for k in ("duration", "completed", "request_throughput", "output_throughput")}
    ids = [f"{args.request_id_prefix}{i}" for i in range(len(document["ttfts"] or []))]
    return {**document, "zero_s": zero, "prefill_s": [_prefill_s.get(i) for i in ids]}


def main() -> None:
    """Answer phases until the controller goes away."""
    global _prefill_url
    die_with_parent(int(sys.argv[2]))
    end = Connection(int(sys.argv[1]))
    try:
        import vllm.benchmarks.serve  # noqa: F401

        end.send({"ready": True})
    except Exception as error:
        traceback.print_exc()
        end.send({"error": f"vLLM's benchmark cannot be imported: {error}"})
        return
    while True:
        try:
            message = end.recv()
        except (EOFError, OSError):
            return
        if message is None:
            return
        _prefill_url = message["prefill_url"]
        try:
            end.send(_phase(message["words"]))
        except Exception as error:
            traceback.print_exc()
            end.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
