"""What tcp-crossover starts, and that its prediction comes from the calibration alone."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from kvlab import params, runs
from kvlab.analysis import calibrate
from kvlab.analysis.cases import case
from kvlab.engines.model import StandIn
from kvlab.measures import tcp_crossover as measures

SHAPE = {"layers": 2, "hidden": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate": 64, "vocab": 64}
#: 5 ms a step, 0.05 ms a token, 1e-6 ms for each unit of e^2 - s^2
FIXED, TOKEN, ATTENTION = 5.0, 0.05, 1e-6


@pytest.fixture
def asked(tmp_path: Path) -> params.TcpCrossover:
    values = {"model": str(StandIn(**SHAPE).path(tmp_path / "model")), "chunk_tokens": [256, 64], "out": str(tmp_path)}
    values |= {"rates_gbps": [0.1, 4], "gap_limit_ms": 15, "check_tokens": [256, 8192], "most_tokens": 16384}
    values |= {"pd_chunk_tokens": 8192}
    made = params.validate("tcp-crossover", values)
    assert isinstance(made, params.TcpCrossover)
    return made


def test_kv_bytes_of_the_model(asked):
    # 2 layers x 1 head x 32 x (K and V) x 2 bytes
    assert measures.kv_of(asked, asked.model) == {
        "token_bytes": 256, "window_bytes": 0, "window_tokens": 1, "prefill_chunk": 8192,
    }  # fmt: skip


def test_what_is_started(asked):
    todo = measures.dry_run(asked)
    assert [c.name for c in todo] == ["replica-0", "replica-1"] * 2 + ["prefill-0", "decode-0"]
    chunks = [c.argv[c.argv.index("--max-num-batched-tokens") + 1] for c in todo]
    assert chunks == ["256", "256", "64", "64", "8192", "8192"]
    # Replicas have the cores, the connector and the environment of the pair.
    cores = [c.env["VLLM_CPU_OMP_THREADS_BIND"] for c in todo]
    assert cores == cores[:2] * 3
    assert all("--kv-transfer-config" in c.argv and c.env["UCX_TLS"] == "tcp" for c in todo)
    alone = measures.dry_run(asked.model_copy(update={"one_p_one_d": False}))
    assert [c.role for c in alone] == ["replica"] * 2 and not any("--kv-transfer-config" in c.argv for c in alone)


@pytest.fixture
def run(asked, tmp_path):
    """A calibration made by hand: 40 ms beside the steps; a transfer takes 10 ms and the link's whole rate."""
    made = runs.create("tcp-crossover", asked.model_dump(), run_dir=tmp_path / "run")
    steps, cells = [], []
    for r in range(3):
        for s in (0, 1024, 4096):
            for n in (63, 255):
                steps.append(("replica", s, n, FIXED + TOKEN * n + ATTENTION * n * (2 * s + n), r))
        for n in (256, 512):
            own = 40 + TOKEN * n + ATTENTION * n * n
            cells.append(("replica", case("calibrate", n, chunk=256), own + FIXED * n / 256, r))
            for rate in (0.1, 4):
                moved = 10 + n * 256 * 8 / (rate * 1e6)
                cells.append(("1P1D", case("calibrate", n, gbps=rate), own + FIXED + moved, r))
    made.write("steps", pd.DataFrame(steps, columns=["arm", "prefix_tokens", "chunk_tokens", "step_ms", "repetition"]))
    frame = pd.DataFrame(cells, columns=["arm", "case", "value", "repetition"]).assign(quantity="ttft_ms", unit="ms")
    made.write("cells", frame)
    made.update(kv=measures.kv_of(asked, asked.model))
    return made


def test_the_prediction_by_hand(run, asked):
    said = measures.predict(run, asked, asked.rates_gbps)
    fitted = {c["name"]: c["value"] for c in said["constants"]}
    assert fitted["fixed_ms"] == pytest.approx(FIXED) and fitted["attention_ms"] == pytest.approx(ATTENTION)
    assert fitted["t0_ms"] == pytest.approx(40) and fitted["transfer_ms"] == pytest.approx(10, abs=1e-3)
    assert fitted["link_share"] == pytest.approx(1, abs=1e-4)
    # Within 15 ms a step may cost 10 more than its 5: 192 tokens (9.6 + 0.04) at 256, where one step of 64 is left;
    # at 8,192 the last full step from 7,952 or so: 0.05 n + 1e-6 n (2 x 8,192 - n) is 10.6 at n = 160, 9.5 at 144.
    assert said["chunks"] == {"256": 192, "8192": 144}
    # 4 Gbps: a token costs 0.0005 ms; 10 ms are two steps of 5 and a bit, so 4 steps against 1 pay: 3 x 192 + 1 tokens
    # and up, the next multiple of 64 is 640.  0.1 Gbps: 0.02 ms a token against 5 / 192 = 0.026: far later.
    slow, fast = said["crossover"]
    assert fast["lower"] == 640 and (slow["lower"] is None or slow["lower"] > 1000)
    assert said["crossover"][0]["gbps"] == 0.1


def test_the_check_is_not_in_the_prediction(run, asked):
    before = measures.predict(run, asked, asked.rates_gbps)
    more = run.table("cells")
    case_ = calibrate.case("check", 8192, gbps=4)
    run.write("cells", pd.concat([more, more[:1].assign(arm="1P1D", case=case_, value=9e9)], ignore_index=True))
    assert measures.predict(run, asked, asked.rates_gbps) == before
