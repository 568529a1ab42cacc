"""What notebook cells show: tables and charts of a run, put together from analysis, charts and tables."""

from __future__ import annotations

import great_tables as gt
import pandas as pd

from kvlab import tables
from kvlab.runs import Run


def about(run: Run) -> str:
    """Return a few lines on the run: what, where, how it ended."""
    m, p = run.manifest, run.manifest.get("provenance", {})
    machine = [str(x) for x in (p.get("cpu"), f"{p.get('cores')} cores", p.get("gpus"), p.get("kernel")) if x]
    versions = p.get("versions", {})
    software = [f"{k} {v}" for k, v in versions.items() if v]
    return "\n".join(
        [
            f"run      {run.id}, {m.get('start', '')}, {m['outcome']}",
            f"machine  {', '.join(machine)}",
            f"software {', '.join(software)}",
        ]
    )


def arms(run: Run) -> list[str]:
    """Return the arms' labels in the order of the parameters; the first is the baseline."""
    return [a["label"] for a in run.manifest["parameters"]["arms"]]


def baseline(run: Run) -> str:
    """Return the arm that ratios are taken against: the one named first."""
    return arms(run)[0]


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


def caption(run: Run, pulls: pd.DataFrame) -> str:
    """Answer a sceptic under a figure: bytes, descriptors, in flight, warmth, repetitions, who else was there."""
    kept = pulls[~pulls["warmup"].fillna(False).astype(bool)]
    n = kept.groupby([c for c in ("arm", "case", "prompt_tokens") if kept[c].notna().any()]).size()
    in_flight = sorted(kept["in_flight"].dropna().astype(int).unique())
    counts = "same bytes and descriptors in every arm" if _same(kept) else "bytes or descriptors differ between arms"
    repeats = f"{n.min()}" if n.min() == n.max() else f"{n.min()} to {n.max()}"
    return (
        f"{counts}; {'/'.join(map(str, in_flight))} in flight; {repeats} warm pulls a bar, arms interleaved; "
        f"{run.id}; machine possibly shared"
    )


def _same(pulls: pd.DataFrame) -> bool:
    per_case = pulls.groupby(["case", "arm"])[["bytes", "descriptors"]].median().groupby("case").nunique()
    return bool((per_case <= 1).all(axis=None))
