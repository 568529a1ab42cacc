"""Views of which-transport: the cards, what other readings of the same logs say, the rows that decide."""

from __future__ import annotations

import altair as alt
import great_tables as gt
import pandas as pd

from kvlab import charts
from kvlab.analysis.readings import MISTAKEN, READ, mistakes, readings
from kvlab.runs import Run, safe_name
from kvlab.views import build

_WHAT = {
    "first table in the log": "the table that stands first belongs to whatever endpoint was set up first",
    "write (put) table": "a pull reads; writes may take another transport, and vLLM's default connector does not write",
    "active-message table": "notifications and control traffic",
    "lane list": "what an endpoint may use for anything",
    "UCX_TLS": "what was allowed",
}


def cards(run: Run) -> str:
    """Return the card of every log, as ``kvlab explain`` prints it."""
    parts = []
    for arm in run.table("verdicts")["arm"]:
        text = (run.logs / f"{safe_name(arm)}.card.txt").read_text("utf-8").rstrip()
        parts.append(f"== {arm}\n{text}")
    return "\n\n".join(parts)


def answers(run: Run) -> gt.GT:
    """Show what decides, log by log."""
    frame = run.table("verdicts").copy()
    frame["transport"] = frame["transport"].where(frame["transport"].notna(), "not determined")
    frame["emulation"] = frame["emulated"].map({True: "yes", False: "no"})
    columns = "arm transport devices emulation evidence verdict"
    return build.table(frame, "answers", "What carried the pull", columns, arm="Log")


def readings_chart(run: Run) -> charts.Shown:
    """Draw what each reading of a log says, coloured by whether it is what the read table says."""
    frame = readings(run.table("transports"), run.table("verdicts"))
    arms = list(run.table("verdicts")["arm"])
    kinds = {True: "same as the read table", False: "another transport", None: "not in the log"}
    frame["kind"] = [READ if r == READ else kinds[a] for r, a in zip(frame["reading"], frame["agrees"], strict=True)]
    frame = frame.assign(text=frame["says"].fillna("–")).drop(columns=["says", "agrees"])
    columns = [READ, *MISTAKEN]
    colours = alt.Scale(domain=[READ, *kinds.values()], range=["#0072B2", "#56B4E9", "#D55E00", "#D9D9D9"])
    base = alt.Chart(frame).encode(
        x=alt.X("reading:N", sort=columns, title="", axis=alt.Axis(orient="top", labelAngle=0, labelLimit=130)),
        y=alt.Y("arm:N", sort=arms, title="", axis=alt.Axis(labelLimit=240)),
    )
    tiles = base.mark_rect(stroke="white", strokeWidth=2).encode(color=alt.Color("kind:N", scale=colours, title=""))
    dark = alt.condition(
        (alt.datum.kind == "another transport") | (alt.datum.kind == READ), alt.value("white"), alt.value("black")
    )
    text = base.mark_text(fontSize=11).encode(text="text:N", color=dark)
    caption = (
        f"{len(arms)} logs of {run.id}; tables read at a descriptor of 128 KiB, UCX_TLS by its fastest member. "
        "No times are shown, so bytes, descriptors, load and repetitions do not enter"
    )
    heading = charts.title("The same logs, read in six ways", run, caption)
    chart = alt.layer(tiles, text).properties(width=720, height=34 * len(arms), title=heading)
    return charts.show(chart, "readings", run)


def mistakes_table(run: Run) -> gt.GT:
    """Show in how many logs each mistaken reading names another transport."""
    frame = mistakes(readings(run.table("transports"), run.table("verdicts")))
    frame["what"] = frame["reading"].map(_WHAT)
    return build.table(frame, "mistakes", "How often the other readings are wrong", "reading possible wrong what")


def rows_table(run: Run) -> gt.GT:
    """Show the rows of the remote memory read tables by message size, and which of them decide."""
    frame = run.table("transports")
    frame = frame[frame["operation"].str.startswith("remote memory read").fillna(False)].copy()
    frame["sizes"] = [_sizes(a, b) for a, b in zip(frame["min_bytes"], frame["max_bytes"], strict=True)]
    frame["endpoint"] = frame["locality"].fillna("not said")
    keys = ["arm", "sizes", "description", "config", "endpoint", "decides"]
    counted = frame.groupby(keys, sort=False, as_index=False).agg(tables=("line", "size"), line=("line", "min"))
    counted["decides"] = counted["decides"].map({True: "yes", False: ""})
    columns = "arm sizes description config endpoint tables line decides"
    return build.table(counted, "rows", "The remote memory read tables, row by row", columns, arm="Log")


def _sizes(low: float, high: float) -> str:
    if pd.isna(high):
        return f"{int(low):,} and more"
    return f"{int(low):,}" if low == high else f"{int(low):,} to {int(high):,}"


def conclude(run: Run) -> str:
    """Say in words what the logs show and whether the prediction holds; write summary.json."""
    verdicts = run.table("verdicts")
    known = verdicts[verdicts["transport"].notna()]
    counted = mistakes(readings(run.table("transports"), verdicts))
    sentences = [f"{len(known)} of {len(verdicts)} logs show what carried the pull"]
    if len(known):
        by = known.groupby("transport").size().sort_values(ascending=False, kind="stable")
        sentences[0] += " (" + ", ".join(f"{t} in {n}" for t, n in by.items()) + ")"
        emulated = int((known["emulated"] == True).sum())  # noqa: E712  (a column of objects)
        if emulated:
            sentences.append(f"{emulated} of them by software emulation")
    for row in counted.itertuples():
        the = "" if row.reading == "UCX_TLS" else "the "
        sentences.append(f"{the}{row.reading} names another transport in {row.wrong} of {row.possible}")
    if len(counted):
        safe = counted.loc[counted["wrong"] == 0, "reading"].tolist()
        held = "holds" if not safe else f"is REFUTED here for: {', '.join(safe)}"
        sentences.append(f"the prediction that each of these readings misleads somewhere {held}")
    if run.manifest["outcome"] == "contradicted":
        sentences.insert(
            0, "THE EVIDENCE CONTRADICTS WHAT WAS EXPECTED: " + "; ".join(run.manifest.get("contradictions", []))
        )
    text = "; ".join(sentences) + "."
    text = text[0].upper() + text[1:]
    run.conclude(text, logs=verdicts.to_dict("records"), mistakes=counted.to_dict("records"))
    return text
