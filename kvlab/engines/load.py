"""Load on running engines, by ``vllm bench serve``, and the truth about each request.

::

    with load.Generator(run.logs / "bench.log", tokenizer=model_folder) as generator:
        rows = generator.phase(load.Load(prompt_tokens=4096, output_tokens=64, requests=8, concurrency=4), target)

Prompts come from the seed alone, so every arm gets the same ones.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.engines.bench import BACKEND
from kvlab.engines.launch import Cluster, Running
from kvlab.errors import RunFailed
from kvlab.paths import shared_dir
from kvlab.placement import local
from kvlab.placement.local import LOCAL, Place

#: a small made-up conversation set in ShareGPT's format, shipped with kvlab
CHAT = "chat/synthetic_sharegpt.json"


@dataclass(frozen=True)
class Load:
    """What is offered in one phase.  ``rate_rps`` None: as fast as ``concurrency`` allows."""

    requests: int
    prompt_tokens: int = 512
    output_tokens: int = 16
    concurrency: int | None = None
    rate_rps: float | None = None
    #: 1 is Poisson; the larger, the more even
    burstiness: float = 1.0
    #: ``random``: fixed lengths; ``chat``: ShareGPT-like conversations, whose prompts have their own lengths
    dataset: str = "random"
    seed: int = 1
    phase: str = ""
    repetition: int = 0
    warmup: bool = False

    def words(self, url: str, model: str, tokenizer: str, backend: str) -> list[str]:
        """Return the words of ``vllm bench serve``."""
        if self.dataset == "chat":
            data = ["--dataset-name", "sharegpt", "--dataset-path", str(shared_dir("data") / CHAT)]
            data += ["--sharegpt-output-len", str(self.output_tokens)]
        else:
            data = ["--dataset-name", "random", "--random-input-len", str(self.prompt_tokens)]
            data += ["--random-output-len", str(self.output_tokens), "--random-range-ratio", "0"]
        rate = "inf" if self.rate_rps is None else str(self.rate_rps)
        words = ["--backend", backend, "--base-url", url, "--endpoint", "/v1/completions", "--model", model]
        words += ["--tokenizer", tokenizer, *data, "--num-prompts", str(self.requests), "--seed", str(self.seed)]
        words += ["--request-rate", rate, "--burstiness", str(self.burstiness), "--ignore-eos", "--temperature", "0"]
        words += [
            "--save-detailed",
            "--ready-check-timeout-sec",
            "0",
            "--disable-tqdm",
            "--request-id-prefix",
            f"{self.tag}-",
        ]
        return words + (["--max-concurrency", str(self.concurrency)] if self.concurrency else [])

    @property
    def tag(self) -> str:
        """The beginning of the phase's request ids."""
        return f"{self.phase or 'load'}-{self.repetition}"


class Generator:
    """The process of :mod:`kvlab.engines.bench`, kept through the run."""

    def __init__(
        self, log: Path, tokenizer: str, *, began_s: float, place: Place = LOCAL, start_limit_s: float = 180
    ) -> None:
        self.log, self.tokenizer, self.began_s, self._limit_s = log, tokenizer, began_s, start_limit_s
        self.place = place
        #: by how many seconds the start of a request may be off, on a node with a clock of its own
        self.off_by_s = 0.0
        self._process: local.Started | None = None
        self._ready = False

    def __enter__(self) -> Generator:
        env = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process, self._end = local.start_speaking("kvlab.engines.bench", env=env, log=self.log, place=self.place)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._end.send(None)
        self._end.close()
        if self._process is not None:
            local.stop(self._process, 3)

    def _reply(self, limit_s: float) -> dict[str, Any]:
        try:
            if not self._end.poll(limit_s):
                raise RunFailed(f"the load generator gave no answer within {limit_s:g} s (log: {self.log})")
            answer: dict[str, Any] = self._end.recv()
        except (EOFError, OSError):
            raise RunFailed(f"the load generator ended in mid-run (log: {self.log})") from None
        if "error" in answer:
            raise RunFailed(f"load generator: {answer['error']} (log: {self.log})")
        return answer

    def phase(
        self, load: Load, target: Cluster | Running, arm: str, *, limit_s: float = 1800
    ) -> tuple[pd.DataFrame, dict[str, Any]]:
        """Offer ``load`` and return rows of table ``requests``, and the phase's totals.

        A pair without a router gets both requests from the client; ``prefill_ms`` is then known.
        """
        prefill, url, model = "", target.url or "", target.model
        if isinstance(target, Cluster) and not url:
            prefill, url = target.prefill[0].url, target.decode[0].url
        if not self._ready:
            self._reply(self._limit_s)
            self._ready = True
        words = load.words(url, model, self.tokenizer, BACKEND if prefill else "openai")
        self._end.send({"words": words, "prefill_url": prefill})
        answer = self._reply(limit_s)
        _, shift_s, off_by_s = self.place.node.clock() if self.place.node else (0, 0, 0)
        self.off_by_s = max(self.off_by_s, off_by_s)
        totals = {k: answer[k] for k in ("duration", "completed", "request_throughput", "output_throughput")}
        return rows(load, arm, answer, self.began_s - shift_s), totals


def rows(load: Load, arm: str, answer: dict[str, Any], began_s: float) -> pd.DataFrame:
    """Turn a phase's detailed results into rows of table ``requests``; a failed request keeps its error."""
    made = []
    for i, ttft in enumerate(answer["ttfts"]):
        error = (answer["errors"][i] or "").strip()
        gaps = [1e3 * g for g in answer["itls"][i]]
        prefill = answer["prefill_s"][i]
        ok = not error and ttft > 0
        made.append(
            {
                "arm": arm,
                "request": f"{load.tag}-{i}",
                "phase": load.phase,
                "repetition": load.repetition,
                "warmup": load.warmup,
                "concurrency": load.concurrency,
                "rate_rps": load.rate_rps,
                "prompt_tokens": answer["input_lens"][i],
                "output_tokens": answer["output_lens"][i],
                "start_s": answer["start_times"][i] + answer["zero_s"] - began_s if answer["start_times"] else np.nan,
                "ttft_ms": ttft * 1e3 if ok else np.nan,
                "prefill_ms": prefill * 1e3 if prefill is not None and ok else np.nan,
                "e2e_ms": ttft * 1e3 + sum(gaps) if ok else np.nan,
                "gaps_ms": gaps,
                "longest_gap_ms": max(gaps) if gaps else np.nan,
                "error": error.splitlines()[-1][:300] if error else (None if ok else "no token came"),
            }
        )
    return pd.DataFrame(made)
