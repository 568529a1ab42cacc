"""``kvlab compare RUN RUN ...``: one report across runs and machines, with what differs and what cannot be compared."""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import charts, runs, tables
from kvlab.analysis import compare
from kvlab.analysis.split import warm
from kvlab.errors import BadInput
from kvlab.runs import Run

#: table -> (value, what makes two rows the same case, label)
COMPARED = {"pulls": ("xfer_us", "case", "pull time"), "requests": ("ttft_ms", "phase", "time to first token")}
#: parameters that say where and how often, not what was measured
_INCIDENTAL = {"replay", "out", "label", "run_dir", "repetitions", "warmup", "seed", "starts", "start_limit_s"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders or recordings; the first is the baseline")
    parser.add_argument("--out", default="compare.html", help="the report (default: compare.html)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and write no report")


def main(args: argparse.Namespace) -> int:
    """Compare, write the report, print ratios and differences."""
    if len(args.runs) < 2:
        raise BadInput("two runs or more are compared; `kvlab list` shows recordings and runs")
    found = [runs.load(name) for name in args.runs]
    base, names = found[0], _names(found)
    for other in found:
        one, two = (r.manifest["experiment"] for r in (other, base))
        if one != two:
            said = f"{other.path.name} is of {one}, {base.path.name} of {two}"
            raise BadInput(f"{said}: runs of one experiment are compared")
    differ = differences(found, names)
    ratios, warnings = compared(found, names)
    if args.json:
        document = {"runs": names, "differences": differ.to_dict("records"), "warnings": warnings}
        print(json.dumps({**document, "ratios": json.loads(ratios.to_json(orient="records"))}))
        return 0
    for line in warnings:
        print(f"warning: {line}")
    if len(ratios):
        shown = ratios.assign(
            interval=ratios["low"].map("{:.3g}".format) + " to " + ratios["high"].map("{:.3g}".format),
            verdict=ratios["different"].map({True: "differs", False: "not told apart"}),
        )
        print(shown[["run", "arm", "case", "quantity", "ratio", "interval", "verdict"]].to_string(index=False))
    print("differs: " + (", ".join(differ["what"]) or "nothing in parameters, machine and versions"))
    path = Path(args.out)
    try:
        runs.write_atomic(path, page(base, names, ratios, differ, warnings).encode())
    except OSError as error:
        raise BadInput(f"cannot write {path}: {error.strerror}") from None
    print(json.dumps({"report": str(path.resolve()), "runs": names, "warnings": warnings}))
    return 0


def _names(found: list[Run]) -> list[str]:
    """Short names, told apart by number where two runs have the same."""
    short = [r.path.name for r in found]
    return [f"{n} ({i + 1})" if short.count(n) > 1 else n for i, n in enumerate(short)]


def flat(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested parameters into dotted names and text."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{prefix}{key}.").items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {k: v for i, one in enumerate(value) for k, v in flat(one, f"{prefix}{one.get('label', i)}.").items()}
    return {prefix.rstrip("."): json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value}


def differences(found: list[Run], names: list[str]) -> pd.DataFrame:
    """Return what differs in parameters, machine and versions: ``what`` and a column a run."""
    columns = []
    for run in found:
        p = run.manifest.get("provenance", {})
        machine = {k: p.get(k) for k in ("cpu", "cores", "gpus", "driver", "kernel", "container")}
        own = {k: v for k, v in run.manifest["parameters"].items() if k not in _INCIDENTAL}
        columns.append(flat({"parameter": own, "machine": machine, "version": p.get("versions", {})}))
    keys = list(dict.fromkeys(k for c in columns for k in c))
    rows = [{"what": k, **{n: c.get(k, "") for n, c in zip(names, columns, strict=True)}} for k in keys]
    return pd.DataFrame([r for r in rows if len({r[n] for n in names}) > 1], columns=["what", *names])


def compared(found: list[Run], names: list[str]) -> tuple[pd.DataFrame, list[str]]:
    """Return ratios of every run to the first, arm by arm and case by case, and what could not be compared.

    Rounds of two runs have nothing to do with each other, so each run's rounds are resampled apart.  A case whose
    bytes differ between two runs is not compared; one whose descriptors differ is, with a warning.
    """
    base, rows, warnings = found[0], [], []
    for run, name in zip(found, names, strict=True):
        if run.manifest["outcome"] != "completed":
            warnings.append(f"{name} ended as {run.manifest['outcome']}")
    for table, (value, key, quantity) in COMPARED.items():
        ours = warm(base.table(table)) if base.has(table) else pd.DataFrame()
        if ours.empty:
            continue
        for run, name in zip(found[1:], names[1:], strict=True):
            theirs = warm(run.table(table)) if run.has(table) else pd.DataFrame()
            shared = [a for a in dict.fromkeys(ours["arm"]) if not theirs.empty and a in set(theirs["arm"])]
            if not shared:
                warnings.append(f"{name} has no arm of {names[0]} in its {table}; nothing to compare")
                continue
            for arm in shared:
                a, b = (f[(f["arm"] == arm) & f[value].notna() & f[key].notna()] for f in (ours, theirs))
                both = _comparable(a, b, key, f"{name}, {arm}", warnings)
                if not both:
                    warnings.append(f"{name}, {arm}: no case of {names[0]} with the same bytes")
                    continue
                step = 1 + int(a["repetition"].max())
                pair = pd.concat([a.assign(arm="base"), b.assign(arm="other", repetition=b["repetition"] + step)])
                pair = pair[pair[key].isin(both)]
                ratio = compare.ratios(pair, baseline="base", value=value, by=[key])
                rows.append(ratio.rename(columns={key: "case"}).assign(run=name, arm=arm, quantity=quantity))
    return (pd.concat(rows, ignore_index=True) if rows else pd.DataFrame()), warnings


def _comparable(a: pd.DataFrame, b: pd.DataFrame, key: str, where: str, warnings: list[str]) -> list[str]:
    """Return the cases of both; leave out those with other bytes, warn of other descriptors and numbers in flight."""
    kept, shape = [], [c for c in ("bytes", "descriptors", "in_flight") if c in a and c in b]
    for case in (c for c in dict.fromkeys(a[key]) if c in set(b[key])):
        one, two = (f.loc[f[key] == case, shape].median() for f in (a, b))
        if "bytes" in shape and one["bytes"] != two["bytes"]:
            warnings.append(f"{where}, {case}: {one['bytes']:,.0f} against {two['bytes']:,.0f} bytes, left out")
            continue
        unlike = [c for c in shape if one[c] != two[c]]
        warnings += [f"{where}, {case}: {c} differ ({one[c]:g}, {two[c]:g})" for c in unlike]
        kept.append(case)
    return kept


def page(base: Run, names: list[str], ratios: pd.DataFrame, differ: pd.DataFrame, warnings: list[str]) -> str:
    """Return the report: one self-contained page."""
    import vl_convert

    parts = [f"<h1>{html.escape(base.manifest['experiment'])}: {html.escape(' / '.join(names))}</h1>"]
    parts.append(f"<p>Ratios are to {html.escape(names[0])}, arm by arm, with 95 percent intervals.</p>")
    parts += [f"<p><b>Warning:</b> {html.escape(line)}</p>" for line in warnings]
    if len(ratios):
        frame = charts.ratio_points(ratios).assign(case=ratios["arm"] + ", " + ratios["case"], arm=ratios["run"])
        for quantity, own in frame.groupby("quantity", sort=False):
            heading = charts.title(f"Ratio of {quantity} to {names[0]}", None, "rounds of each run resampled apart")
            chart = charts.points_with_interval(
                own, heading, x="ratio", low="low", high="high", text="text", log=True, reference=1,
                x_title="Ratio (log scale)",
            )  # fmt: skip
            parts.append(vl_convert.vegalite_to_svg(chart.to_dict()))
    if len(differ):
        labels = {"what": "What"} | {n: n for n in names}
        parts.append(tables.show(differ, "differences", title="What differs", labels=labels).as_raw_html())
    style = "body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}svg{max-width:100%;height:auto}"
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    return f"{head}<title>kvlab compare</title><style>{style}</style>\n" + "\n".join(parts) + "</html>\n"
