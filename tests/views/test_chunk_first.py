"""chunk-first's ranking, heat map and verdict on a run made by hand, and on the recording from one GPU."""

import json

import pandas as pd
import pytest

from kvlab import params, runs
from kvlab.views import chunk_elsewhere as elsewhere
from kvlab.views import chunk_first as view

#: arm -> chunk, TTFT and the one long gap of every request
ARMS = {"replicas, chunk 1024": (1024, 300, 500), "replicas, chunk 256": (256, 300, 100), "1P1D": (2048, 1000, 20)}


@pytest.fixture
def run(tmp_path):
    values = {"chunk_tokens": [1024, 256], "rates_rps": [1, 2], "ttft_limits_ms": [500, 2000]}
    given = params.validate("chunk-first", {**values, "gap_limits_ms": [50, 200, 1000]})
    made = runs.create("chunk-first", given.model_dump(), run_dir=tmp_path / "run")
    rows = []
    for arm, (chunk, ttft, stall) in ARMS.items():
        same = {"arm": arm, "chunk_tokens": chunk, "ttft_ms": ttft, "gaps_ms": [10.0] * 199 + [stall]}
        for rate in (1, 2):
            for i in range(40):  # 40 of 40 is 0.912 at least by Wilson
                own = {"request": f"{rate}-{i}", "rate_rps": rate, "start_s": i / rate, "e2e_ms": 3000}
                rows.append({**same, **own, "output_tokens": 201, "repetition": 0, "warmup": False})
    made.write("requests", pd.DataFrame(rows))
    made.update(outcome="completed")
    return made


def test_summary_puts_chunks_from_large_to_small_then_1p1d(run):
    rows = view.summary(run)
    assert rows["arm"].tolist() == list(ARMS) * 2
    assert rows["gap_median_ms"].tolist() == [500, 100, 20] * 2
    # One gap of 200 is long: the p99 is an ordinary gap, and every request has a stall above it.
    assert rows["itl_p99_ms"].tolist() == [10] * 6
    assert rows["hidden"].tolist() == [1] * 6


def test_ranking_takes_the_best_chunk_at_each_pair(run):
    ranked = view.ranking(run).set_index(["ttft_limit_ms", "gap_limit_ms"])
    assert ranked["outcome"].to_dict() == {
        (500, 50): "none supports it",
        (500, 200): "tuned replicas",
        (500, 1000): "tuned replicas",
        (2000, 50): "1P1D",
        (2000, 200): "tie",
        (2000, 1000): "tie",
    }
    assert ranked["chunk"].dropna().to_dict() == {
        (500, 200): 256,
        (500, 1000): 1024,
        (2000, 200): 256,
        (2000, 1000): 1024,
    }


def test_heat_map_marks_ties_and_the_chunk(run):
    shown = view.heat_map(view.ranking(run), run)
    data = next(iter(shown.bundle["application/vnd.vegalite.v5+json"]["datasets"].values()))
    assert [row["text"] for row in data] == ["", "256", "1024", "", "=", "="]


def test_verdict_is_computed(run):
    verdict = view.conclude(run, view.summary(run), view.ranking(run))
    assert "0.20 (0.20 to 0.20) at 1 requests/s" in verdict
    assert "shorter stalls holds" in verdict
    assert "hides the stall of 100% to 100% of requests" in verdict
    assert verdict.endswith("tuned replicas win more pairs than they lose holds.")
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["ranking"] == {"tuned replicas": 2, "tie": 2, "none supports it": 1, "1P1D": 1}


def test_predictions_can_be_refuted(run):
    requests = run.table("requests")
    other = {"replicas, chunk 1024": "replicas, chunk 256", "replicas, chunk 256": "replicas, chunk 1024"}
    run.write(
        "requests",
        requests.assign(
            arm=requests["arm"].replace(other),
            chunk_tokens=requests["arm"].map({"replicas, chunk 1024": 256, "replicas, chunk 256": 1024, "1P1D": 2048}),
            ttft_ms=5000 - requests["ttft_ms"],
        ),
    )
    ranked = view.ranking(run)
    verdict = view.conclude(run, view.summary(run), ranked.assign(outcome="1P1D"))
    assert "shorter stalls REFUTED" in verdict
    assert verdict.endswith("lose REFUTED.")


def test_recordings_from_one_gpu_beside_published_bars(run):
    gpu = runs.load(elsewhere.GPU)
    rows = elsewhere.beside(run)
    assert set(rows["status"]) == {"measured", "figure"}
    published = rows[rows["where"] == "Gemma 4 26B-A4B FP8, 4K fixed, 0.5 requests/s"]
    assert published.set_index("chunk_tokens")["gap_median_ms"].to_dict() == {2560: 62.2, 1024: 43.2, 512: 26.8}
    own = view.summary(gpu).set_index("chunk_tokens")["gap_median_ms"]
    assert own[256] < own[1024] < own[2560]
    # A panel for each load of this run, one for the recording, three published; a recording is not beside itself.
    assert rows["where"].nunique() == 6
    assert elsewhere.beside(gpu)["where"].nunique() == 4
    assert elsewhere.steps_table(run) == "no step times were measured"
    assert not isinstance(elsewhere.steps_table(run, gpu), str)
    gpu.manifest["outcome"] = "interrupted"
    verdict = view.conclude(gpu, view.summary(gpu), view.ranking(gpu))
    assert verdict.startswith("The run is not whole (interrupted).")
    assert "prediction that tuned" not in verdict
