"""Views of tcp-tuning: link, rates against a plain flow, connections, failures, published claims, verdict."""

from __future__ import annotations

from typing import Any

import altair as alt
import great_tables as gt
import pandas as pd

from kvlab import charts, published
from kvlab.analysis import tcp
from kvlab.runs import Run
from kvlab.views import arms, build

_KERNEL = {
    "ipv4/tcp_congestion_control": "congestion control",
    "ipv4/tcp_rmem": "receive buffer (least, first, most)",
    "ipv4/tcp_wmem": "send buffer (least, first, most)",
    "core/rmem_max": "most that a program may ask for, receiving",
    "core/wmem_max": "most that a program may ask for, sending",
}


def links(run: Run) -> list[str]:
    """Return the links in the order of the parameters."""
    return list(run.manifest["link"]["links"])


def link_name(text: str) -> str:
    """Write a link's parameter for people: ``4.97`` becomes ``4.97 Gbps for all connections``."""
    if text.endswith(" per flow"):
        return f"{text.removesuffix(' per flow')} Gbps for each connection"
    return {"none": "no cap", "loopback": "loopback, no cap"}.get(text) or f"{text} Gbps for all connections"


def ordered(frame: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Sort rows by link, then arm, as the parameters name them, then descriptors."""
    more = [c for c in ("descriptors", "case") if c in frame][:1]
    return build.in_order(frame, ["link", "arm", *more], link=links(run), arm=arms(run))


def _once(link: pd.Series) -> pd.Series:
    """Return the links' names, each at its first row only."""
    return link.map(link_name).where(link.ne(link.shift()), "")


def about_link(run: Run) -> str:
    """Say what the two processes had between them, and the kernel's TCP settings."""
    link = run.manifest["link"]
    text = "two network namespaces with a veth pair; in turn: " + "; ".join(map(link_name, link["links"]))
    if link["kind"] != "veth":
        text = f"LOOPBACK, nothing shaped: {link['reason']}"
    rows = [f"link     {text}", *(f"kernel   {_KERNEL.get(k, k)}: {v}" for k, v in link["settings"].items())]
    return "\n".join(rows)


def rates(run: Run) -> pd.DataFrame:
    """Return :func:`kvlab.analysis.tcp.rates` of the run, in order."""
    return ordered(tcp.rates(run.table("pulls"), run.table("limits")), run)


def rates_table(rows: pd.DataFrame, run: Run) -> gt.GT:
    """Show each arm's rate, its share of a plain flow, and how many times as fast as the first arm it is."""
    first = run.table("pulls")["descriptors"].min()
    alike = run.table("pulls").query("descriptors == @first")
    gains = tcp.speedups(alike, arms(run)[0])
    frame = rows.merge(gains.drop(columns="n").assign(descriptors=first), "left", ["arm", "link", "descriptors"])
    frame["where"] = _once(frame["link"])
    frame["interval"] = [f"{a:.2f} to {b:.2f}" for a, b in zip(frame["gbps_low"], frame["gbps_high"], strict=True)]
    frame["gain"] = [
        None if pd.isna(s) else f"{s:.2f} ({a:.2f} to {b:.2f}){'' if d else ', not resolved'}"
        for s, a, b, d in zip(frame["speedup"], frame["low"], frame["high"], frame["different"], strict=True)
    ]
    return build.table(
        frame,
        "rates",
        "Rate of a pull over each link",
        "where arm descriptors n gbps interval share gain",
        "Medians. A plain flow is one TCP connection over the same link in the same run. Pulls of "
        f"{first:,} descriptors are compared, round by round.",
        {"gbps": 2},
        where="Link",
        gbps="Rate (Gbps)",
    )


def rate_chart(rows: pd.DataFrame, run: Run) -> charts.Shown:
    """Draw a panel a link: each arm's rate with its interval, and the plain flows of that link as lines."""
    size = run.manifest["parameters"]["descriptor_bytes"]
    caption = (
        f"{rows['n'].min()} warm pulls a point, descriptors of {size // 1024} KiB, links and arms in random order in "
        f"every round; {run.id}; machine possibly shared"
    )
    several = rows.groupby("arm")["case"].transform("nunique") > 1
    setting = rows["arm"].where(~several, rows["arm"] + ", " + rows["case"])
    rows = rows.assign(setting=setting, arm="median pull, 95 % interval", text=rows["gbps"].map("{:.3g}".format))
    for name in ("gbps_low", "gbps_high"):
        rows[name] = rows[name].fillna(rows["gbps"])
    panels: list[Any] = []
    for link in dict.fromkeys(rows["link"]):
        mine = rows[rows["link"] == link]
        one, four = mine[["one_gbps", "four_gbps"]].iloc[0]
        plain = f"plain TCP: {one:.3g} Gbps over one connection, {four:.3g} over four (dashed)"
        chart = charts.points_with_interval(
            mine,
            charts.title(link_name(link), run, plain if one == one else ""),
            x="gbps",
            low="gbps_low",
            high="gbps_high",
            x_title="Rate of one pull (Gbps)",
            y="setting",
            limits=pd.DataFrame({"name": "", "value": [one, four]}).dropna(),
            text="text",
        )
        panels.append(chart.properties(height=20 * len(mine)))
    heading = charts.title("What each setting gives on each link", run, caption)
    return charts.show(alt.vconcat(*panels).properties(title=heading), "rates", run)


def connections_table(run: Run) -> gt.GT:
    """Show what the sender's connections did in a pull, from ``ss -ti``."""
    frame = ordered(tcp.quantities(run.table("cells")), run).reset_index(drop=True)
    frame["where"], frame["case"] = _once(frame["link"]), frame["case"].str.removesuffix(" descriptors")
    return build.table(
        frame,
        "connections",
        "The sender's connections during a pull",
        "where arm case connections retransmits cwnd window_scale",
        "Medians over the pulls, read right after each; congestion window and scale of the busiest connection.",
        where="Link",
        case="Descriptors",
    )


def failures(run: Run) -> gt.GT:
    """Show the pulls that hung or failed, a row each; none is said in the title."""
    cells = run.table("cells").assign(said=lambda d: d.get("note"))
    bad = ordered(cells[cells["outcome"] != "completed"], run).assign(where=lambda d: d["link"].map(link_name))
    title = f"{len(bad) or 'None'} of {(cells['quantity'] == 'rate').sum()} pulls hung or failed"
    columns = "where arm case outcome repetition said"
    return build.table(bad, "failures", title, columns, where="Link", case="Pull")


def claims(run: Run) -> pd.DataFrame:
    """Return the published claims with this run's answers."""
    figures = published.load("tcp_transfer").set_index("quantity")["value"].to_dict()
    base = run.manifest["parameters"]["base_segment"]
    rows = tcp.claims(run.table("pulls"), run.table("cells"), run.table("limits"), figures, base)
    named = build.in_order(rows, ["claim", "link"], claim=list(rows["claim"].unique()), link=["", "all", *links(run)])
    return named.reset_index(drop=True)


def claims_table(rows: pd.DataFrame) -> gt.GT:
    """Show the claims point by point."""
    frame = rows.assign(where=[link_name(x) if x not in ("", "all") else x for x in rows["link"]])
    frame["claim"] = frame["claim"].mask(frame["claim"].duplicated(), "")
    title, columns = "The published claims, held against this run", "claim published where here answer"
    return build.table(frame, "claims", title, columns, digits={"published": None}, where="Link")


def conclude(run: Run, rows: pd.DataFrame, found: pd.DataFrame) -> str:
    """Say in words what holds where; write summary.json."""
    parts = []
    for claim, g in found.groupby("claim", sort=False):
        where = g["link"].where(~g["link"].isin(["", "all"])).map(link_name, na_action="ignore")
        said = where.groupby(g["answer"], sort=False).agg(lambda names: ", ".join(dict.fromkeys(names.dropna())))
        parts.append(f"{claim}: " + "; ".join(f"{a} ({names})" if names else str(a) for a, names in said.items()))
    for r in rows.loc[rows.groupby("link", sort=False)["gbps"].idxmax()].to_dict("records"):
        best = f"{r['arm']} with {r['gbps']:.2f} Gbps, {r['share']:.0%} of a plain flow"
        parts.append(f"best median with {link_name(r['link'])}: {best}")
    steps = tcp.first_piece(run.table("pulls")).query("different")
    if len(steps):
        each = [f"{s:.2f} ({a}, {link_name(k)})" for s, a, k in zip(steps.speedup, steps.arm, steps.link, strict=True)]
        first = steps.iloc[0]
        parts.append(f"{first['case']}, which go to a thread, are {', '.join(each)} times as fast as {first['below']}")
    bad = int((run.table("cells")["outcome"] != "completed").sum())
    parts.append(f"{bad} pulls hung or failed" if bad else "no pull hung or failed")
    over = "" if run.manifest["link"]["kind"] == "veth" else ", over loopback with no link to shape"
    verdict = f"On this machine{over}: " + ". ".join(p[0].upper() + p[1:] for p in parts) + "."
    run.conclude(verdict, rates=rows.to_dict("records"), claims=found.to_dict("records"))
    return verdict
