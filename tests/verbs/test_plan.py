"""``kvlab plan``: the published edges, a fitted machine, one line and exit code 2 for what cannot be planned."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from kvlab import runs
from kvlab.analysis.calibrate import case
from kvlab.cli import main

KV = {"token_bytes": 40_000, "window_bytes": 0, "window_tokens": 1, "prefill_chunk": 8192}


@pytest.fixture
def recording(tmp_path):
    """Steps of 8 ms + 0.05 ms a token + 1e-6 ms; t0 25 ms; transfer 20 ms and 1.1 times the wire; 1 % noise."""
    rng = np.random.default_rng(3)
    cells, steps = [], []
    for r in range(5):
        for prefix in (0, 1024, 4096, 8192):
            for chunk in (32, 64, 128, 256):
                ms = 8 + 0.05 * chunk + 1e-6 * chunk * (2 * prefix + chunk)
                steps.append(("replica", prefix, chunk, ms * rng.normal(1, 0.01), r))
        for n in (512, 1024):
            alone = 25 + 8 * (n // 128) + 0.05 * n + 1e-6 * n * n
            cells.append(("replica", case("calibrate", n, chunk=128), alone * rng.normal(1, 0.01), r))
            for rate in (0.5, 2):
                both = 25 + 8 + 0.05 * n + 1e-6 * n * n + 20 + 1.1 * n * 40_000 * 8 / (rate * 1e6)
                cells.append(("1P1D", case("calibrate", n, gbps=rate), both * rng.normal(1, 0.01), r))
    run = runs.create("tcp-crossover", {}, run_dir=tmp_path / "run")
    run.write("steps", pd.DataFrame(steps, columns=["arm", "prefix_tokens", "chunk_tokens", "step_ms", "repetition"]))
    frame = pd.DataFrame(cells, columns=["arm", "case", "value", "repetition"])
    run.write("cells", frame.assign(quantity="ttft_ms", unit="ms"))
    run.update(outcome="completed", kv=KV)
    return run.path


def planned(capsys, *words):
    code = main(["plan", *map(str, words)])
    return code, capsys.readouterr()


@pytest.mark.parametrize(("rate", "tokens"), [(14.3, 13824), (14.97, 13824), (95, 5632), (4.45, 34560)])
def test_published_last_line(capsys, rate, tokens):
    code, said = planned(capsys, "--published", "--rate-gbps", rate)
    assert code == 0 and said.out.splitlines()[-1] == f"1P1D pays from {tokens} tokens"


def test_published_document(capsys):
    code, said = planned(capsys, "--published", "--rate-gbps", 14.3, "--ttft-limit-ms", 1000, "--json")
    found = json.loads(said.out)
    assert code == 0
    assert (found["pays"], found["pays_from"], found["chunk_tokens"], found["gap_limit_ms"]) == (True, 13824, 672, 50)
    assert (found["window"]["upper"], found["window"]["ends_by"]) == (16128, "TTFT limit")


@pytest.mark.parametrize(
    "words",
    [["--rate-gbps", 1], ["--rate-gbps", 14.3, "--gap-limit-ms", 10], ["--rate-gbps", 14.3, "--ttft-limit-ms", 500]],
)
def test_does_not_pay(capsys, words):
    code, said = planned(capsys, "--published", *words)
    assert code == 0 and said.out.splitlines()[-1] == "1P1D does not pay"


def test_more_kv_a_token_pays_later(capsys):
    light = planned(capsys, "--layout", "gemma-4-26b-a4b", "--rate-gbps", 50, "--json")[1].out
    heavy = planned(capsys, "--layout", "llama-3.1-8b", "--rate-gbps", 50, "--json")[1].out
    # 5 global layers of 4 KiB a token against 32 layers of 4 KiB
    assert 6400 < json.loads(light)["pays_from"] < 7400 < json.loads(heavy)["pays_from"]
    assert "not calibrated here" in json.loads(heavy)["basis"][0]


def by_hand(rate, gap):
    """The first multiple of 64 where 1P1D is sooner, tried out chunk by chunk on the true constants."""
    for n in range(64, 65536, 64):
        fits = 0
        for chunk in range(16, n + 16, 16):
            ends = [*range(chunk, n, chunk), n]
            longest = max(8 + 0.05 * (e - s) + 1e-6 * (e * e - s * s) for s, e in zip([0, *ends], ends, strict=False))
            fits = chunk if longest <= gap else fits
        if 8 * -(-n // fits) > 8 * -(-n // 8192) + 20 + 1.1 * n * 40_000 * 8 / (rate * 1e6):
            return n
    return None


def test_a_fitted_machine(capsys, recording):
    code, said = planned(capsys, "--calibration", recording, "--rate-gbps", 4, "--gap-limit-ms", 16, "--json")
    found = json.loads(said.out)
    true = by_hand(4, 16)
    assert code == 0 and true and found["window"]["low"] <= true <= found["window"]["high"]
    assert found["pays_from"] == pytest.approx(true, rel=0.1)
    assert found["window"]["draws"] == 500 and found["window"]["never"] == 0
    code, said = planned(capsys, "--calibration", recording, "--rate-gbps", 0.2, "--gap-limit-ms", 16)
    assert code == 0 and said.out.splitlines()[-1] == "1P1D does not pay"
    assert "never pays in 100% of 500 draws" in said.out


def test_layout_over_a_fitted_machine(capsys, recording):
    words = ["--calibration", recording, "--rate-gbps", 4, "--gap-limit-ms", 16, "--layout", "llama-3.1-8b", "--json"]
    found = json.loads(planned(capsys, *words)[1].out)
    # 131,072 B a token cost 0.29 ms at 4 Gbps; a step of about 128 tokens saves 8 ms, 0.06 ms a token.
    assert found["pays"] is False and "KV of llama-3.1-8b" in found["basis"]


def test_steps_of_a_chunk_first_recording_and_a_layout(capsys):
    words = ["--calibration", "chunk_first/h200-one-gpu", "--layout", "llama-3.1-8b", "--rate-gbps", 25]
    code, said = planned(capsys, *words)
    assert code == 0 and said.out.splitlines()[-1] == "1P1D does not pay"
    assert "no transfer measured" in said.out and "never to never" not in said.out
    code, said = planned(capsys, *words[:2], "--rate-gbps", 25)
    assert code == 2 and "add --layout" in said.err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--published"], "--rate-gbps is missing"),
        (["--published", "--rate-gbps", "fast"], "--rate-gbps: a number above 0"),
        (["--published", "--rate-gbps", "nan"], "--rate-gbps: a number above 0"),
        (["--published", "--rate-gbps", "0"], "--rate-gbps: a number above 0"),
        (["--published", "--rate-gbps", "9", "--gap-limit-ms", "-1"], "--gap-limit-ms: a number above 0"),
        (["--published", "--rate-gbps", "9", "--ttft-limit-ms", "x"], "--ttft-limit-ms: a number above 0"),
        (["--published", "--rate-gbps", "9", "--calibration", "x"], "exclude each other"),
        (["--rate-gbps", "9"], "--layout MODEL, --calibration RUN or --published"),
        (["--rate-gbps", "9", "--layout", "no-such"], "no layout"),
        (["--rate-gbps", "9", "--calibration", "no-such"], "no run at"),
        (["--rate-gbps", "9", "--calibration", "which_transport/recorded"], "no step times"),
    ],
)
def test_bad_input_is_one_line(capsys, words, part):
    code, said = planned(capsys, *words)
    assert code == 2 and said.out == ""
    assert part in said.err and said.err.count("\n") == 1
