"""A real JupyterLab server, a real browser: open a notebook, restart and run all, see the chart."""

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[test]'")
from kvlab.engines.launch import free_ports  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium, chromium-browser or google-chrome on the path"),
    # Playwright's own loop and pipes end after the test's.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def lab(tmp_path):
    """A server on a copy of the notebooks, settings of its own; yields its address with the token."""
    folder = tmp_path / "notebooks"
    shutil.copytree(NOTEBOOKS, folder)
    for path in folder.glob("*.ipynb"):  # what the page shows was then made by this server's kernel
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    settings = tmp_path / "settings"
    # All cells in the page, not only those in view.
    (settings / "@jupyterlab" / "notebook-extension").mkdir(parents=True)
    (settings / "@jupyterlab" / "notebook-extension" / "tracker.jupyterlab-settings").write_text(
        '{"windowingMode": "none"}'
    )
    port, token = next(free_ports()), "for-this-test"
    words = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    words += ["--allow-root"] if os.getuid() == 0 else []
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--notebook-dir", str(folder), *words],
            stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(settings), "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
                 "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()[-2000:]
                time.sleep(0.3)
        yield lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}?reset&token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture
def page():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def test_restart_and_run_all_shows_the_charts(lab, page):
    page.goto(lab("02_post_vs_completion.ipynb"))
    notebook = page.locator(".jp-NotebookPanel")
    notebook.locator(".jp-CodeCell").first.wait_for()
    cells = nbformat.read(NOTEBOOKS / "02_post_vs_completion.ipynb", as_version=4).cells
    codes = sum(cell.cell_type == "code" for cell in cells)
    page.get_by_text("| Idle").wait_for()  # a kernel that is still starting is not restarted
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Restart Kernel and Run All Cells…", exact=True).click()
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    # Every code cell has got a number and none a star: they have all run.
    page.wait_for_function(
        """count => { const p = [...document.querySelectorAll('.jp-NotebookPanel .jp-CodeCell .jp-InputPrompt')]
             .map(e => e.innerText); return p.length === count && p.every(t => /\\[\\d+\\]/.test(t)); }""",
        arg=codes, timeout=120_000,
    )  # fmt: skip
    errors = notebook.locator("[data-mime-type='application/vnd.jupyter.error']").all_inner_texts()
    assert errors == []
    charts = notebook.locator(".vega-embed svg.marks, .vega-embed canvas.marks")
    charts.first.wait_for()
    drawn = [c.bounding_box() for c in charts.all()]
    assert len(drawn) >= 2 and all(box and box["width"] > 200 and box["height"] > 100 for box in drawn)
    # A chart speaks when pointed at, somewhere: the tooltip says what its mark stands for.
    charts.first.scroll_into_view_if_needed()
    box = charts.first.bounding_box()
    tooltip = page.locator("#vg-tooltip-element.visible")
    for step in range(400):
        across, down = step % 20, step // 20
        page.mouse.move(box["x"] + box["width"] * (across + 0.5) / 20, box["y"] + box["height"] * (down + 0.5) / 20)
        if tooltip.count():
            break
    assert "Pulls:" in tooltip.inner_text(timeout=5_000)
