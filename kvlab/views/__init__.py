"""What notebook cells show: tables and charts of a run, put together from analysis, charts and tables."""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import great_tables as gt
import pandas as pd

from kvlab import experiments, quick, tables
from kvlab.analysis.explained import explained
from kvlab.runs import Run

quick.without_iris()  # before a module of this package imports altair

_SET = "start or end is off by that, times and joins within the run are not"


def about(run: Run) -> str:
    """Return a few lines on the run: what, where, how it ended."""
    m, p = run.manifest, run.manifest.get("provenance", {})
    gpus = [f"{n} x {name}" if n > 1 else name for name, n in Counter(p.get("gpus") or []).items()]
    cores = f"{p['cores']} cores" if p.get("cores") else "not known"
    machine = [str(x) for x in (p.get("cpu"), cores, *gpus, p.get("kernel")) if x]
    versions = p.get("versions", {})
    software = [f"{k} {v}" for k, v in versions.items() if v]
    theirs: dict[str, str] = next((c["versions"] for c in m.get("commands") or [] if c.get("versions")), {})
    if theirs:
        software += [f"in the workers' environment {', '.join(f'{k} {v}' for k, v in theirs.items())}"]
    return "\n".join(
        [
            f"run      {run.id}, {m.get('start', '')}, {m['outcome']}",
            f"machine  {', '.join(machine)}",
            f"software {', '.join(software)}",
            *([f"clock    set by {m['clock_step_s']:+g} s in mid-run: {_SET}"] if m.get("clock_step_s") else []),
        ]
    )


def arms(run: Run) -> list[str]:
    """Return the arms' labels in the order of the parameters; the first is the baseline."""
    return [a["label"] for a in run.manifest["parameters"]["arms"]]


def baseline(run: Run) -> str:
    """Return the arm that ratios are taken against: the one named first."""
    return arms(run)[0]


def ordered(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Sort rows by prompt length (where there is one), then by the arms' order in the parameters."""
    rank = {label: i for i, label in enumerate(arms(run))}
    keys = [c for c in ("prompt_tokens",) if c in frame]
    return frame.assign(_arm=frame["arm"].map(rank)).sort_values([*keys, "_arm"], kind="stable").drop(columns="_arm")


def evidence(run: Run) -> gt.GT:
    """Show, for each arm, which transport carried the payload, by what evidence, against what the label claims."""
    frame = run.table("verdicts").copy()
    frame["agreement"] = frame["agrees"].map({True: "agrees", False: "CONTRADICTS"}).fillna("no claim, or no evidence")
    frame["emulation"] = frame["emulated"].map({True: "yes", False: "no"})
    frame["transport"] = frame["transport"].fillna("not determined")
    return tables.show(
        frame,
        "evidence",
        title="The transport of the payload, from UCX's remote memory read table",
        labels={
            "arm": "Arm",
            "expected": "Label claims",
            "transport": "Payload went over",
            "emulation": "Software emulation",
            "agreement": "Evidence and label",
            "evidence": "Where it says so",
        },
    )


def explained_shares(run: Run) -> pd.DataFrame:
    """Return bytes pulled against bytes counted, a row an arm and device (see :mod:`kvlab.analysis.explained`)."""
    pulled = run.table("pulls").groupby("arm")["bytes"].sum()
    return explained(run.table("counters"), {str(arm): float(n) for arm, n in pulled.items()})


def counters_table(run: Run) -> gt.GT:
    """Show bytes pulled against bytes that each device counted, with the share explained; idle interfaces left out."""
    frame = explained_shares(run)
    frame = ordered(frame[(frame["counted_bytes"] != 0) | (frame["kind"] != "interface")], run)
    frame["pulled_gb"], frame["counted_gb"] = frame["pulled_bytes"] / 1e9, frame["counted_bytes"] / 1e9
    spread = (frame["high"] - frame["share"]).map(lambda v: f" ± {v:.1%}" if v >= 0.0005 else "")
    share = frame["share"].map(lambda v: f"{v:.1%}" if abs(v) >= 0.0005 else f"{v:.1e}") + spread
    frame["says"] = share.where(frame["share"].notna(), frame["note"])
    return tables.show(
        frame,
        "counters",
        title="Bytes pulled against bytes counted",
        labels={
            "arm": "Arm",
            "device": "Device",
            "kind": "Kind",
            "counter": "Counter",
            "pulled_gb": "Pulled (GB)",
            "counted_gb": "Counted (GB)",
            "says": "Share explained",
        },
        decimals={"pulled_gb": 3, "counted_gb": 3},
        note="Receiving counters, summed over the arm's pulls, warm-up included, background taken off. A little over "
        "100% is the transport's own overhead; what no device counted went through memory or a device without counter.",
    )


def caption(run: Run, pulls: pd.DataFrame) -> str:
    """Answer a sceptic under a figure: bytes, descriptors, in flight, warmth, repetitions, who else was there."""
    kept = pulls[~pulls["warmup"].fillna(False).astype(bool)]
    n = kept.groupby([c for c in ("arm", "case", "prompt_tokens") if kept[c].notna().any()]).size()
    in_flight = sorted(kept["in_flight"].dropna().astype(int).unique())
    if kept["in_flight"].isna().all():
        return f"{kept['case'].iloc[0] if len(kept) else 'no pulls'}; {run.id}, imported: the rest is not known"
    counts = "same bytes and descriptors in every arm" if _same(kept) else "bytes or descriptors differ between arms"
    repeats = f"{n.min()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"
    return (
        f"{counts}; {'/'.join(map(str, in_flight))} in flight; {repeats} warm pulls a bar, arms interleaved; "
        f"{run.id}; machine possibly shared"
    )


def _same(pulls: pd.DataFrame) -> bool:
    per_case = pulls.groupby(["case", "arm"])[["bytes", "descriptors"]].median().groupby("case").nunique()
    return bool((per_case <= 1).all(axis=None))


def experiments_table() -> gt.GT:
    """Show every experiment: what it asks, its notebook, how many recordings ship with kvlab."""
    rows = [
        {
            "name": e.name,
            "question": e.question,
            "notebook": e.notebook,
            "measures": "yes" if e.default else "replays only",
            "recordings": ", ".join(p.name for p in experiments.recordings(e.name)),
        }
        for e in sorted(experiments.EXPERIMENTS.values(), key=lambda e: e.notebook)
    ]
    shown: gt.GT = tables.show(
        pd.DataFrame(rows),
        "experiments",
        title="Experiments, in reading order",
        labels={
            "notebook": "Notebook",
            "name": "kvlab run ...",
            "question": "Question",
            "measures": "Measures",
            "recordings": "Recordings",
        },
    )
    return shown.fmt(lambda name: f'<a href="{name}">{name}</a>', columns="notebook")


class Machine:
    """What `kvlab check` says of this machine without pulling; shown as text, its repr is the same everywhere."""

    def __init__(self) -> None:
        from kvlab import check
        from kvlab.capture.machine import facts
        from kvlab.verbs.check import text

        found = facts()
        self.text = text(check.document(found, [], check.judge(found)))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return "this machine, as kvlab check sees it"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.text)}</pre>"


def machine() -> Machine:
    """Return what `kvlab check` says of this machine: versions, transports that work, what the others lack."""
    return Machine()


class RecentRuns:
    """The newest runs under some folders, each with its outcome, verdict and first chart."""

    def __init__(self, places: Sequence[str], most: int) -> None:
        found = {p.resolve(): p for place in places for p in Path(place).glob("*/*/manifest.json")}
        newest = sorted(found.values(), key=lambda p: p.stat().st_mtime, reverse=True)
        self.rows = [self._row(p.parent) for p in newest[:most]]
        self.none = f"no runs under {' or '.join(places)} yet"

    @staticmethod
    def _row(folder: Path) -> tuple[Path, str, str, str]:
        """Return the folder, its outcome and verdict, and a small picture of its first chart (base64 of a PNG)."""
        verdict, outcome, picture = "", "unreadable", ""
        try:
            outcome = str(json.loads((folder / "manifest.json").read_text("utf-8"))["outcome"])
            verdict = str(json.loads((folder / "summary.json").read_text("utf-8"))["verdict"])
        except (OSError, ValueError, KeyError):
            pass  # a run that was interrupted has no summary
        charts = sorted((folder / "charts").glob("*.svg"), key=lambda p: p.stat().st_mtime)
        if charts:
            import vl_convert

            small = vl_convert.svg_to_png(charts[0].read_text("utf-8"), scale=0.5)
            picture = base64.b64encode(small).decode()
        return folder, outcome, verdict, picture

    def __repr__(self) -> str:
        return "\n".join(f"{p}  {o}  {v}" for p, o, v, _ in self.rows) or self.none

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{html.escape(self.none)}</p>"
        cells = ""
        for folder, outcome, verdict, picture in self.rows:
            small = "style='width:260px;max-width:none' alt='first chart'"
            image = f"<img {small} src='data:image/png;base64,{picture}'>" if picture else ""
            links = [name for name in ("report.html", "notebook.ipynb") if (folder / name).is_file()]
            # JupyterLab opens what lies in or below its own folder.
            inside = not str(folder).startswith("..")
            opens = " ".join(f'<a href="{quote(str(folder / name))}">{name}</a>' for name in links if inside)
            cells += (
                f"<tr><td>{image}</td><td style='text-align:left'><b>{html.escape(str(folder))}</b><br>"
                f"{html.escape(outcome)} {opens}<br>{html.escape(verdict)}</td></tr>"
            )
        return f"<table>{cells}</table>"


def recent_runs(*places: str, most: int = 6) -> RecentRuns:
    """Return the newest runs under ``places`` for display; by default those of this folder and the one above."""
    return RecentRuns(places or ("runs", "../runs"), most)
