"""The sliders' expressions say what the analysis says, in the picture and in the report's page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import nbformat
import numpy as np
import pandas as pd
import pytest

from kvlab import report, runs
from kvlab.analysis import calibrate, steps
from kvlab.analysis.calibrate import case
from kvlab.views import tcp_crossover as view

SPEC = "application/vnd.vegalite.v5+json"


def label(shown):
    """The verdict that Vega computed and wrote into the picture."""
    return re.search(r"1P1D (?:pays: [\d,]+ to [\d,]+ tokens|does not pay)", shown.bundle["image/svg+xml"])[0]


def test_published_points_within_one_percent():
    frame = view.published()
    assert len(frame) == 10
    assert frame[["error_replica", "error_1p1d"]].abs().max(axis=None) < 0.01
    assert (frame["model_chunk"] == frame["replica_chunk_tokens"]).all()


@pytest.mark.parametrize(
    ("gbps", "gap", "kv", "text"),
    [
        (14.3, 50, 20, "1P1D pays: 13,824 to 36,736 tokens"),
        (95, 50, 20, "1P1D pays: 5,632 to 36,736 tokens"),
        (2, 50, 20, "1P1D does not pay"),
    ],
)
def test_sliders_start_where_they_are_told(gbps, gap, kv, text):
    m = replace(steps.PUBLISHED, token_bytes=kv * 1024)
    assert label(view.explorer(m, gbps=gbps, gap_ms=gap)) == text


@pytest.mark.parametrize(
    ("gbps", "gap", "kv"), [(25, 30, 20), (50, 40, 80), (80, 35, 128), (9.54, 60, 40), (30, 20, 5)]
)
def test_vega_agrees_with_the_analysis(gbps, gap, kv):
    m = replace(steps.PUBLISHED, token_bytes=kv * 1024)
    w = steps.window(m, gbps, gap_ms=gap, most=49_152)
    said = label(view.explorer(m, gbps=gbps, gap_ms=gap)).replace(",", "")
    assert said == (f"1P1D pays: {w.lower} to {w.upper} tokens" if w.lower else "1P1D does not pay")


def test_pictures_are_the_same_twice():
    for draw in (view.published_chart, lambda: view.window_chart(steps.PUBLISHED)):
        assert draw()._repr_mimebundle_() == draw()._repr_mimebundle_()


@pytest.fixture
def page(tmp_path):
    bundle = view.explorer(steps.PUBLISHED, gbps=14.3, gap_ms=50).bundle
    assert {p["name"] for p in bundle[SPEC]["params"]} == {"rate", "gap", "ttft", "kv"}
    cell = nbformat.v4.new_code_cell("x", execution_count=1)
    cell.outputs = [nbformat.v4.new_output("display_data", data=bundle)]
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "notebook.ipynb")
    (tmp_path / "manifest.json").write_text(json.dumps({"experiment": "tcp-crossover", "outcome": "completed"}))
    return report.render(tmp_path)


def test_report_carries_the_sliders_and_fetches_nothing(page):
    page = page.read_text("utf-8")
    assert "vegaEmbed" in page and 'class="output live"' in page and "1P1D pays: 13,824" in page
    assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=.?https?:", page)


@pytest.fixture
def run(tmp_path):
    """Steps of 8 ms + 0.05 ms a token + 1e-6 ms; 40 kB a token over 1 and 4 Gbps; measured at 512 and 16,384 tokens."""
    rng = np.random.default_rng(1)
    steps_, cells = [], []
    for r in range(6):
        for s in (0, 1024, 4096):
            for n in (64, 128, 256):
                ms = (8 + 0.05 * n + 1e-6 * n * (2 * s + n)) * rng.normal(1, 0.01)
                steps_.append(("replica", s, n, ms, r))
        for phase, lengths in (("calibrate", (512, 1024)), ("check", (512, 16384))):
            for n in lengths:
                own = 20 + 0.05 * n + 1e-6 * n * n
                cells.append(("replica", case(phase, n, chunk=128), (own + 8 * n / 128) * rng.normal(1, 0.01), r))
                for rate in (1, 4):
                    ms = own + 8 * -(-n // 8192) + 30 + n * 40_000 * 8 / (rate * 1e6)
                    cells.append(("1P1D", case(phase, n, gbps=rate), ms * rng.normal(1, 0.01), r))
    asked = {"rates_gbps": [1, 4], "gap_limit_ms": 16, "most_tokens": 65536, "check_tokens": [512, 16384]}
    asked |= {"chunk_tokens": [64, 128, 256], "step_prompt_tokens": [9], "step_repetitions": 6}
    made = runs.create("tcp-crossover", asked, run_dir=tmp_path / "measured")
    made.write("steps", pd.DataFrame(steps_, columns=["arm", "prefix_tokens", "chunk_tokens", "step_ms", "repetition"]))
    frame = pd.DataFrame(cells, columns=["arm", "case", "value", "repetition"])
    made.write("cells", frame.assign(quantity="ttft_ms", unit="ms"))
    kv = {"token_bytes": 40_000, "window_bytes": 0, "window_tokens": 1, "prefill_chunk": 8192}
    made.update(outcome="completed", kv=kv)
    return made


def test_a_measured_run(run):
    models = view.models_of(run)
    found = calibrate.check(models, calibrate.points(run.table("cells")))
    # 512 tokens: 4 steps of 8 ms against one and 30 ms; 16,384 at 4 Gbps: 128 steps (1,024 ms) against 1,357 ms.
    assert found["outcome"].tolist() == ["hit"] * 4 and (found["ratio"] > 1).all()
    assert "8.0" in view.constants_table(models).as_raw_html()
    for shown in (view.check_chart(found, run), view.steps_chart(run)):
        assert "<svg" in shown.bundle["image/svg+xml"]
    said = view.conclude(run, models, found)
    assert "measured afterwards at 4 points: 4 hit, 0 miss, 0 unresolved" in said
    edges = json.loads((run.path / "summary.json").read_text())["crossover"]
    # At 1 Gbps a token costs 0.32 ms of link and saves 8 ms / chunk, at 65,536 tokens (chunk 32) still only 0.25 ms.
    assert [e["gbps"] for e in edges] == [1, 4] and edges[0]["lower"] is None
    assert "OTHER EDGES" not in view.fixed(run, models)
    assert "<svg" in view.here_chart(run, models, 4).bundle["image/svg+xml"]
    assert "Predicted" in view.prediction_table(run, models).as_raw_html()


def test_deviations_are_listed(run):
    run.update(parameter_file_committed=True, command="kvlab run tcp-crossover")
    run.write("steps", run.table("steps").assign(prompt_tokens=9, arm=lambda f: f["chunk_tokens"].astype(str)))
    assert view.deviations(run) == "none"
    link = {"kind": "loopback", "reason": "not allowed", "rates_gbps": [7.5]}
    prediction = {"chunks": {"512": 128, "16384": 0}, "crossover": [{"gbps": 7.5, "lower": 64}]}
    command = "kvlab run tcp-crossover -p repetitions=1 -p gap_limit_ms=16"
    run.update(parameter_file_committed=False, command=command, link=link, prediction=prediction)
    said = view.deviations(run).splitlines()
    assert [x.split(":")[0] for x in said] == [
        "- the parameter file was changed or not committed before the run",
        "- set on the command line",
        "- set on the command line",
        "- no shaped link (not allowed)",
        "- no chunk keeps the gap limit at 16,384 tokens",
        "- at 7.5 Gbps all lengths of the check lie on one side of the predicted crossover",
    ]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here")
def test_moving_a_slider_moves_the_window(page):
    head, tail = page.read_text("utf-8").rsplit("</body>", 1)
    move = (
        "<script>setTimeout(()=>{const i=document.querySelectorAll('input[type=range]');"
        "i[0].value=95;i[0].dispatchEvent(new Event('input'))},1500)</script>"
    )
    page.write_text(f"{head}{move}</body>{tail}")
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    dom = subprocess.run([*words, page.as_uri()], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "1P1D pays: 5,632 to 36,736 tokens" in dom


def test_a_run_without_1p1d_is_read_too(run):
    run.write("cells", run.table("cells").query("arm == 'replica' and case.str.startswith('calibrate')"))
    models = view.models_of(run)
    found = calibrate.check(models, calibrate.points(run.table("cells")))
    assert view.check_chart(found, run) == "this run has no point of the check"
    assert "no 1P1D" in view.fixed(run, models) and "measured afterwards" not in view.conclude(run, models, found)
    assert "<svg" in view.here_chart(run, models, 4).bundle["image/svg+xml"]
