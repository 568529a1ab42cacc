"""The load generator's words and what is made of its results; no engine is started here."""

import itertools
import json
import math

import pandas as pd
import pytest

from kvlab import schema
from kvlab.engines.load import CHAT, Load, rows
from kvlab.paths import shared_dir

ANSWER = {
    "input_lens": [512, 512],
    "output_lens": [3, 0],
    "ttfts": [0.25, 0.0],
    "itls": [[0.01, 0.04], []],
    "errors": ["", "Traceback\nConnectionError: refused\n"],
    "start_times": [100.0, 101.0],
    "zero_s": 1000.0,
    "prefill_s": [0.2, None],
}


def test_rows_hold_the_truth_of_each_request():
    load = Load(2, 512, 3, concurrency=2, phase="x", repetition=1)
    frame = rows(load, "arm", ANSWER, began_s=1050.0)
    schema.conform("requests", frame)
    good, bad = frame.iloc[0], frame.iloc[1]
    assert good["ttft_ms"] == 250 and good["prefill_ms"] == 200
    assert good["gaps_ms"] == [10, 40] and good["longest_gap_ms"] == 40
    assert good["e2e_ms"] == 300
    assert good["start_s"] == 50.0  # 100 + 1000 - 1050
    assert good["request"] == "x-1-0" and pd.isna(good["error"])
    assert math.isnan(bad["ttft_ms"]) and bad["error"] == "ConnectionError: refused"


def test_words_are_those_of_vllm_bench_serve():
    words = Load(8, 4096, 16, rate_rps=2.5, seed=7).words("http://u", "m", "/t", "openai")
    given = dict(itertools.pairwise(words))
    assert given["--request-rate"] == "2.5" and given["--random-input-len"] == "4096"
    assert given["--seed"] == "7" and "--max-concurrency" not in words
    chat = Load(8, dataset="chat", concurrency=4).words("http://u", "m", "/t", "openai")
    assert "sharegpt" in chat and dict(itertools.pairwise(chat))["--request-rate"] == "inf"


def test_vllm_takes_the_words():
    serve = pytest.importorskip("vllm.benchmarks.serve")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    for load in (Load(8, concurrency=1), Load(8, rate_rps=1.0, dataset="chat")):
        parser.parse_args(load.words("http://u", "m", "/t", "openai"))


def test_the_shipped_conversations_are_in_sharegpts_form():
    talks = json.loads((shared_dir("data") / CHAT).read_text())
    assert len(talks) >= 50
    for talk in talks:
        turns = talk["conversations"]
        assert len(turns) >= 2 and [t["from"] for t in turns[:2]] == ["human", "gpt"]
        assert len(turns[0]["value"].split()) >= 4
