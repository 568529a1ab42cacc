"""report.html: one self-contained file from an executed notebook; code is folded away, nothing is fetched."""

from __future__ import annotations

import html
import json
import os
import re
import warnings
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvlab.runs import write_atomic

_STYLE = """
:root{color-scheme:light;--ink:#1b1b1b;--ground:#fff;--soft:#f6f8fa;--line:#ddd;--faint:#666}
@media screen and (prefers-color-scheme:dark){
:root{color-scheme:dark;--ink:#e6e6e6;--ground:#14171a;--soft:#20252a;--line:#444;--faint:#9aa0a6}}
body{max-width:60rem;margin:0 auto;padding:1rem;font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",
sans-serif;color:var(--ink);background:var(--ground)}
h1,h2,h3{line-height:1.25}h2{margin-top:2.2rem;border-bottom:1px solid var(--line);padding-bottom:.2rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:.85rem;background:var(--soft);padding:.7rem;border-radius:6px}
.output{overflow-x:auto;margin:.8rem 0}.output svg{max-width:100%;min-width:40rem;height:auto;border-radius:6px}
.wide{overflow-x:auto}.wide td{overflow-wrap:anywhere;min-width:12rem}code{overflow-wrap:anywhere}
#vg-tooltip-element{max-width:90vw}
details.code>summary{color:var(--faint);font-size:.75rem;cursor:pointer}
nav{background:var(--soft);border-radius:6px;padding:.6rem 1rem;font-size:.9rem}
nav ul{margin:.2rem 0;padding-left:1.2rem}
table{border-collapse:collapse}td,th{padding:.2rem .6rem}
.stdout{border-left:4px solid #0072B2}.error{border-left:4px solid #D55E00}
.banner{border:2px solid #D55E00;padding:.6rem 1rem;border-radius:6px}
@media print{details.code{display:none}body{max-width:none}h2{break-after:avoid}.output{break-inside:avoid}}
"""

#: what of the manifest a reader wants first
_HEAD = ("experiment", "outcome", "label", "start", "end", "kvlab")


_DRAW = """for (const old of document.querySelectorAll(".live")) {
  const drawn = document.createElement("div")
  const made = vegaEmbed(drawn, JSON.parse(old.dataset.spec), {actions: false, renderer: "svg"})
  made.then(() => old.replaceChildren(drawn))
}"""


def _vega() -> str:
    """Return Vega's scripts; putting them together takes seconds, so they are kept in the user's cache."""
    import vl_convert

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlab"
    path = cache / f"vega-{version('vl-convert-python')}.js"
    with suppress(OSError):
        return path.read_text("utf-8")
    text = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed"))
    with suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode())
    return text


def _markdown(text: str) -> str:
    from nbconvert.filters import markdown2html

    return str(markdown2html(text))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "section"


def _output(output: dict[str, Any]) -> str:
    kind = output["output_type"]
    if kind == "stream":
        # Progress bars and log lines belong to the notebook, not to the report.
        text = "".join(output["text"])
        return f'<pre class="stdout">{html.escape(text)}</pre>' if output["name"] == "stdout" and text.strip() else ""
    if kind == "error":
        return f'<pre class="error">{html.escape(output["ename"])}: {html.escape(output["evalue"])}</pre>'
    data = output.get("data", {})
    spec = {k: v for k, v in data.get("application/vnd.vegalite.v5+json", {}).items() if k != "$schema"}
    if spec:
        # Drawn by a Vega that travels in the page (tooltips, clicks); the picture stays where scripts do not run.
        svg = "".join(data.get("image/svg+xml", ""))
        return f'<div class="output live" data-spec="{html.escape(json.dumps(spec))}">{svg}</div>'
    for mime in ("image/svg+xml", "text/html", "image/png", "text/markdown", "text/plain"):
        if mime in data:
            body = data[mime] if isinstance(data[mime], str) else "".join(data[mime])
            if mime == "image/png":
                body = f'<img alt="" src="data:image/png;base64,{body}">'
            elif mime == "text/markdown":
                body = _markdown(body)
            elif mime == "text/plain" and not body.strip():
                return ""  # where a progress bar was
            elif mime == "text/plain":
                body = f"<pre>{html.escape(body)}</pre>"
            return f'<div class="output">{body}</div>'
    return ""


def _table(rows: dict[str, Any]) -> str:
    cells = []
    for key, value in rows.items():
        if value not in (None, "", [], {}):
            text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
            cells.append(f"<tr><th align=left>{html.escape(str(key))}</th><td>{html.escape(text)}</td></tr>")
    return f'<div class="wide"><table>{"".join(cells)}</table></div>'


def render(folder: Path) -> Path:
    """Write report.html into a run folder from its notebook.ipynb and manifest.json, and return its path."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import nbformat

        notebook: Any = nbformat.read(  # type: ignore[no-untyped-call]
            folder / "notebook.ipynb", as_version=4
        )
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
        parts, contents, heading = [], [], "kvlab"
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                for level, text in re.findall(r"^(#{1,2}) +(.+)$", cell.source, re.M):
                    if len(level) == 1:
                        heading = text
                    contents.append((len(level), text))
                # An id on every heading, for the contents.
                body = re.sub(
                    r"<h([12])[^>]*>(.*?)</h\1>",
                    lambda m: (
                        f'<h{m[1]} id="{_slug(re.sub("<[^>]+>", "", m[2]).replace("¶", ""))}">'
                        f"{re.sub(r'<a class=.anchor-link.*?</a>', '', m[2])}</h{m[1]}>"
                    ),
                    _markdown(cell.source),
                    flags=re.S,
                )
                parts.append(body)
            elif cell.cell_type == "code":
                if cell.source.strip():
                    parts.append(
                        f'<details class="code"><summary>code</summary><pre>{html.escape(cell.source)}</pre></details>'
                    )
                parts += [_output(o) for o in cell.outputs]
    links = "".join(f'<li><a href="#{_slug(t)}">{html.escape(t)}</a></li>' for level, t in contents if level == 2)
    banner = ""
    if manifest.get("outcome") not in ("completed", "running"):
        why = "; ".join(manifest.get("contradictions", [])) or str(manifest.get("error", ""))
        banner = f'<p class="banner"><b>This run is {html.escape(str(manifest["outcome"]))}.</b> {html.escape(why)}</p>'
    # What was measured, where: of the recording when this is a replay of one.
    measured = manifest
    if manifest.get("replay_of"):
        measured = json.loads((Path(manifest["replay_of"]) / "manifest.json").read_text("utf-8"))
    provenance = "".join(
        f"<h3>{title}</h3>{_table(rows)}"
        for title, rows in (
            ("Run", {k: manifest.get(k) for k in (*_HEAD, "replay_of", "parameter_file")}),
            ("Parameters", measured.get("parameters", {})),
            ("Machine and versions", measured.get("provenance", {})),
        )
    )
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(heading)}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>'
        f"{banner}<nav><b>Contents</b><ul>{links}"
        '<li><a href="#provenance">Parameters and provenance</a></li></ul></nav>'
        f'{"".join(parts)}<h2 id="provenance">Parameters and provenance</h2>{provenance}</body></html>'
    )
    if any('class="output live"' in p for p in parts):
        page = page.replace("</body></html>", f"<script>{_vega()}</script><script>{_DRAW}</script></body></html>")
    path = folder / "report.html"
    write_atomic(path, page.encode())
    return path
