"""A real JupyterLab server, a real browser: run all, point, click, stop; the report on a phone, dark, in print."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[test]'")
from kvlab import experiments, report, runs  # noqa: E402
from kvlab.engines.launch import free_ports  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
#: how JupyterLab marks what goes to stderr, tracebacks too
ERROR = "[data-mime-type='application/vnd.jupyter.stderr']"
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not CHROMIUM, reason="no chromium, chromium-browser or google-chrome on the path"),
    # Playwright's own loop and pipes end after the test's.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the notebooks without outputs: what the page shows was then made by this server's kernels."""
    folder = tmp_path_factory.mktemp("lab") / "notebooks"
    shutil.copytree(NOTEBOOKS, folder)
    for path in folder.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    return folder


@pytest.fixture(scope="module")
def lab(folder):
    """A server on the copy, settings of its own, dark; gives a notebook's address with the token."""
    home = folder.parent
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # all cells in the page, not only those in view
        "apputils-extension/themes": {"theme": "JupyterLab Dark"},
        "apputils-extension/notification": {"fetchNews": "false"},
    }
    for name, values in settings.items():
        path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    port, token = next(free_ports()), "for-this-test"
    words = ["--no-browser", f"--port={port}", f"--IdentityProvider.token={token}", "--ServerApp.port_retries=0"]
    words += ["--allow-root"] if os.getuid() == 0 else []
    with open(home / "server.log", "w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--notebook-dir", str(folder), *words],
            stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTER_RUNTIME_DIR": str(home),
                 "JUPYTER_CONFIG_DIR": str(home / "config"), "KVLAB_TEST": str(home)},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            assert server.poll() is None, (home / "server.log").read_text()[-2000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api?token={token}", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (home / "server.log").read_text()[-2000:]
                time.sleep(0.3)
        yield lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}?reset&token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.set_default_timeout(60_000)
    yield page
    page.close()


def open_notebook(page, address):
    page.goto(address)
    page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()
    page.get_by_text("| Idle").wait_for()  # a kernel that is still starting is not restarted
    return page.locator(".jp-NotebookPanel")


def restart_and_run_all(page, notebook):
    page.get_by_role("menuitem", name="Kernel", exact=True).click()
    page.get_by_text("Restart Kernel and Run All Cells…", exact=True).click()
    page.locator(".jp-Dialog button.jp-mod-accept").click()
    # Every code cell has got a number and none a star: they have all run.
    page.wait_for_function(
        """() => { const p = [...document.querySelectorAll('.jp-NotebookPanel .jp-CodeCell .jp-InputPrompt')]
             .map(e => e.innerText); return p.length && p.every(t => /\\[\\d+\\]/.test(t)); }""",
        timeout=120_000,
    )
    assert notebook.locator(ERROR).all_inner_texts() == []


#: contrast of text with what lies behind it, as WCAG 2.2 reckons it (1.4.3 asks for 4.5 at least)
CONTRAST = """e => {
  const rgb = (e, key) => getComputedStyle(e)[key].match(/[\\d.]+/g).map(Number)
  const light = c => [0.2126, 0.7152, 0.0722].reduce((sum, share, i) => {
    const v = c[i] / 255
    return sum + share * (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4) }, 0)
  let ground = e
  while (rgb(ground, 'backgroundColor')[3] === 0) ground = ground.parentElement
  const a = light(rgb(e, e instanceof SVGElement ? 'fill' : 'color')), b = light(rgb(ground, 'backgroundColor'))
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
}"""


def readable(found):
    contrasts = [one.evaluate(CONTRAST) for one in found.all()]
    assert contrasts and min(contrasts) >= 4.5, contrasts


def test_run_all_then_point_and_click_at_charts_in_both_themes(lab, page):
    notebook = open_notebook(page, lab("02_post_vs_completion.ipynb"))
    restart_and_run_all(page, notebook)
    charts = notebook.locator(".vega-embed svg.marks")
    charts.first.wait_for()
    drawn = [c.bounding_box() for c in charts.all()]
    assert len(drawn) >= 3 and all(box and box["width"] > 200 and box["height"] > 100 for box in drawn)
    split, pulls = charts.nth(0), charts.nth(1)
    readable(split.locator("text"))
    cells = notebook.locator(".gt_table").first.locator("td, th")
    readable(cells)
    page.get_by_role("menuitem", name="Settings", exact=True).click()
    page.get_by_text("Theme", exact=True).hover()
    page.get_by_text("JupyterLab Light", exact=True).click()
    page.wait_for_function("document.body.dataset.jpThemeLight === 'true'")
    readable(cells)
    readable(split.locator("text"))
    # What it stands for: n, interval, run.
    split.locator(".mark-rect path").first.hover()
    said = page.locator("#vg-tooltip-element.visible").inner_text()
    assert re.search(r"Pulls:\s+10", said) and re.search(r"95 % from \(ms\):\s+57\.696", said), said
    assert "post-vs-completion/cpu-loopback" in said
    click_a_pull(pulls)


def click_a_pull(chart):
    """Another pull than the one that is picked: the words below the chart become its own."""
    record = chart.locator("text", has_text="of pulls.parquet")
    before = record.text_content()
    point = chart.locator("path[aria-label*='Row: 5']").first  # row 5, or one of the fifties
    row = re.search(r"Row: (\d+)", point.get_attribute("aria-label"))[1]
    point.click()
    chart.locator("text", has_text=f"row {row} of pulls.parquet").wait_for()
    assert record.text_content() != before
    words = " ".join(chart.locator("text").all_text_contents())
    assert re.search(r"logs/\w+\.initiator\.log, line 19", words) and "0..inf" in words


def test_stop_button_ends_a_measurement_and_leaves_nothing(lab, folder, page):
    measure = (
        "import kvlab\n"
        "given = {'prompt_tokens': [512], 'repetitions': 20_000, 'limits': False}\n"
        "run = kvlab.run_or_replay(kvlab.parameters('post-vs-completion', given))"
    )
    cells = [nbformat.v4.new_code_cell(x) for x in (measure, "6 * 7")]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "stop.ipynb")
    shared = set(os.listdir("/dev/shm"))
    notebook = open_notebook(page, lab("stop.ipynb"))
    first, second = notebook.locator(".jp-CodeCell").all()
    first.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    # A bar with the time that is left: 12%|█▏ | 2400/20002 [00:04<00:31, 560.05it/s]
    bar = first.locator(".jp-OutputArea", has_text=re.compile(r"rounds: +\d+%.*\[\d\d:\d\d<[\d:]+,"))
    bar.wait_for()
    assert agents(folder)
    page.locator("[data-command='notebook:interrupt-kernel'], [title^='Interrupt the kernel']").first.click()
    error = first.locator(ERROR)
    error.wait_for()
    (made,) = (folder / "runs").glob("post-vs-completion/*")
    assert error.inner_text().strip() == f"Interrupted: what was measured until then is in {made}"
    stopped = runs.load(made)
    assert stopped.manifest["outcome"] == "interrupted" and len(stopped.table("pulls"))
    assert agents(folder) == [] and set(os.listdir("/dev/shm")) <= shared
    second.locator(".cm-content").click()
    page.keyboard.press("Control+Enter")
    second.locator(".jp-OutputArea-output", has_text="42").wait_for()


def agents(folder):
    """Return the agents that kernels of this server have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        try:
            if "kvlab.pull_agent" in words and process.environ().get("KVLAB_TEST") == str(folder.parent):
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def test_launcher_shows_recent_runs_with_a_picture(lab, folder, page):
    """After the test before: what was interrupted stands beside what was completed."""
    done = folder / "runs" / "post-vs-completion" / "done"
    shutil.copytree(experiments.recordings("post-vs-completion")[0], done)
    (done / "charts").mkdir()
    cells = nbformat.read(NOTEBOOKS / "02_post_vs_completion.ipynb", as_version=4).cells
    data = [o["data"] for c in cells for o in c.get("outputs", []) if "data" in o]
    svg = next(d["image/svg+xml"] for d in data if "image/svg+xml" in d)
    (done / "charts" / "split.svg").write_text(svg)
    (done / "summary.json").write_text('{"verdict": "On this machine <all> is well."}')
    (done / "report.html").write_text("")
    notebook = open_notebook(page, lab("00_start_here.ipynb"))
    restart_and_run_all(page, notebook)
    assert "kvlab run ..." in notebook.locator("#experiments").inner_text()
    assert "usable" in notebook.locator("pre", has_text="NIXL").first.inner_text()
    row = notebook.locator("tr", has_text="runs/post-vs-completion/done")
    assert "On this machine <all> is well." in row.inner_text() and row.locator("a").all_inner_texts() == [
        "report.html"
    ]
    picture = row.locator("img")
    assert picture.evaluate("e => e.naturalWidth > 100 && e.naturalHeight > 50 && e.src.length < 60000")
    readable(row.locator("td"))
    notebook.get_by_text("02_post_vs_completion.ipynb", exact=True).click()
    page.locator(".jp-NotebookPanel", has_text="Where does the time of a KV pull go?").wait_for()


def test_report_alone_on_a_phone_in_the_dark_and_in_print(browser, tmp_path):
    run = runs.load(experiments.recordings("post-vs-completion")[0])
    shutil.copy(run.path / "manifest.json", tmp_path)
    shutil.copy(NOTEBOOKS / "02_post_vs_completion.ipynb", tmp_path / "notebook.ipynb")
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, color_scheme="dark", offline=True, service_workers="block"
    )
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.render(tmp_path).as_uri())
    charts = page.locator(".live .vega-embed svg.marks")
    charts.nth(2).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    readable(page.locator("h1, p, nav a, pre.stdout, .gt_table td"))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    click_a_pull(charts.nth(1))
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    readable(page.locator("h1, p, nav a, pre.stdout, .gt_table td"))
    assert page.locator("details.code:visible").count() == 0
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    context.close()
