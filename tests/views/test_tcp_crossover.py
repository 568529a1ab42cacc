"""The sliders' expressions say what the analysis says, in the picture and in the report's page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace

import nbformat
import pytest

from kvlab import report
from kvlab.analysis import steps
from kvlab.views import tcp_crossover as view

SPEC = "application/vnd.vegalite.v5+json"


def label(shown):
    """The verdict that Vega computed and wrote into the picture."""
    return re.search(
        r"1P1D (?:pays: [\d,]+ to [\d,]+ tokens|does not pay)", shown._repr_mimebundle_()["image/svg+xml"]
    )[0]


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
    bundle = view.explorer(steps.PUBLISHED, gbps=14.3, gap_ms=50)._repr_mimebundle_()
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
