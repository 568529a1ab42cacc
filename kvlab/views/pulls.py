"""Every pull of a run as a point: click it for its record and the log line that names its transport."""

from __future__ import annotations

import gzip

import altair as alt
import pandas as pd

from kvlab import charts
from kvlab.runs import Run
from kvlab.views import arms

#: more points than this are thinned evenly: the page stays quick
MOST = 1000


def log_lines(run: Run) -> pd.DataFrame:
    """Return a row an arm and reading process: ``lines``, where its log names the payload's transport and how."""
    rows = run.table("transports")
    rows = rows[rows["decides"].fillna(False).astype(bool)].drop_duplicates(["arm", "process"])
    said = []
    for r in rows.itertuples():
        found = next(iter(sorted(run.logs.rglob(f"{r.file}*"))), None)
        named = run.manifest.get("logs", {}).get(r.arm, {}).get(r.process)
        for path in (run.path / str(named), run.path / f"{named}.gz", found):
            if path is not None and path.is_file():
                break
        else:
            said.append(f"{r.file}:{r.line} (the log is not there): {r.transport}, {r.description}, {r.config}")
            continue
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        line = text.decode("utf-8", "replace").split("\n")[int(str(r.line)) - 1]
        said.append(f"{path.relative_to(run.path)}, line {r.line}:\n{' '.join(line.split())[:140]}")
    return rows[["arm", "process", "transport"]].assign(lines=said)


def records(run: Run) -> pd.DataFrame:
    """Return the pulls with ``row`` (their place in pulls.parquet) and ``lines``, the words that stand for each."""
    pulls = run.table("pulls").reset_index(names="row")
    pulls = pulls.iloc[:: -(-len(pulls) // MOST) or 1]
    logs = log_lines(run).set_index(["arm", "process"])
    first = logs.groupby("arm").first()
    said = []
    for r in pulls.to_dict("records"):
        r = {k: v for k, v in r.items() if not pd.isna(v)}
        process = f"initiator {r['pair']}" if r.get("pair") else "initiator"
        if "engine" in r:
            process = f"{r['engine']}-{r.get('start', 0)}"
        where = f"ring of {r['engine']}, rank {r.get('rank', 'not known')}, " if "engine" in r else ""
        whose = f"request {r['request']}, " if "request" in r else ""
        count = f"{int(r['descriptors']):,} descriptors ({r['descriptors_source']}), " if "descriptors" in r else ""
        post, drain = r["post_us"] / 1e3, max(0.0, r["xfer_us"] - r["post_us"]) / 1e3
        proof = logs.loc[(r["arm"], process)] if (r["arm"], process) in logs.index else None
        proof = first.loc[r["arm"]] if proof is None and r["arm"] in first.index else proof
        repetition = f"repetition {int(r['repetition'])}" if "repetition" in r else ""
        said.append(
            f"{r['arm']}, {r.get('case', '')}, {repetition}{' (warm-up)' if r.get('warmup') else ''}\n"
            f"{run.id}, {whose}{where}row {r['row']} of pulls.parquet\n"
            f"post {post:,.3f} ms, drain {drain:,.3f} ms; {count}{r['bytes'] / 1e6:,.1f} MB\n"
            + ("no log names its transport" if proof is None else f"{proof['transport']}, by {proof['lines']}")
        )
    return pulls.assign(lines=said)


def chart(run: Run) -> charts.Shown | str:
    """Draw every pull over the time of the run, warm-up hollow; a click shows what stands behind a point."""
    if run.table("pulls").empty:
        return "no pulls"
    every = records(run)
    known = every["start_s"].notna().all() if "start_s" in every else False
    columns = ["row", "arm", "case", "repetition", "post_us", "xfer_us", "lines"]
    frame = every.reindex(columns=columns).assign(
        at=every["start_s"] if known else every["row"],
        pull_ms=every["xfer_us"] / 1e3,
        state=every["warmup"].fillna(False).map({True: "warm-up", False: "counted"}),
    )
    counted = frame[frame["state"] == "counted"]
    slowest = (counted if len(counted) else frame).sort_values("pull_ms").iloc[-1]
    fill = alt.Scale(domain=["counted", "warm-up"], range=["circle", "cross"])
    log = bool(frame["pull_ms"].max() > 10 * frame["pull_ms"].min() > 0)
    scale = alt.Scale(type="log") if log else alt.Scale()
    told = {"arm": "Arm", "case": "Case", "repetition": "Repetition", "pull_ms": "Pull (ms)", "state": "", "row": "Row"}
    points = (
        alt.Chart(frame)
        .mark_point(filled=True, size=60, opacity=0.8, strokeWidth=2)
        .encode(
            x=alt.X("at:Q", title="Start since the run began (s)" if known else "Pull, in the order of the table"),
            y=alt.Y("pull_ms:Q", title=f"Pull {'(ms, log scale)' if log else '(ms)'}", scale=scale),
            color=charts.arm_colour(arms(run)),
            shape=alt.Shape("state:N", title="", scale=fill),
            tooltip=[alt.Tooltip(c, title=t) for c, t in told.items()],
        )
        .properties(width=charts.WIDTH, height=240)
    )
    some = "" if len(every) == len(run.table("pulls")) else f"{len(every):,} of {len(run.table('pulls')):,} pulls; "
    caption = f"click a point for its record and its log's line; {some}{run.id}"
    heading = charts.title("Every pull, and where it is written", run, caption)
    drawn = charts.with_record(points, "row", int(slowest["row"]), "lines", height=90)
    return charts.show(drawn.properties(title=heading), "pulls", run)
