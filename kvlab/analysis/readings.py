"""What people take for evidence, held against what decides: the remote memory read table."""

from __future__ import annotations

import pandas as pd

#: descriptor size at which the other tables are read, in bytes
AT_BYTES = 128 * 1024
READ = "read table (decides)"
#: mistaken reading -> how its rows are told in ``transports``
MISTAKEN = {
    "first table in the log": "",
    "write (put) table": "remote memory write",
    "active-message table": "active message",
    "lane list": "lane list",
    "UCX_TLS": "UCX_TLS",
}


def readings(transports: pd.DataFrame, verdicts: pd.DataFrame) -> pd.DataFrame:
    """Return, for each log, what each reading says: ``arm``, ``reading``, ``says``, ``agrees``.

    ``says`` is None where the log holds nothing of that kind; ``agrees`` is None where either side says
    nothing.  Tables of the process's own endpoint (self) are read only as "first table", as people do.
    """
    rows: list[tuple[str, str, str | None, bool | None]] = []
    for arm, found in zip(verdicts["arm"], verdicts["transport"], strict=True):
        truth = found if isinstance(found, str) else None
        rows.append((arm, READ, truth, None))
        mine = transports[transports["arm"] == arm].sort_values("line", kind="stable")
        for reading, operation in MISTAKEN.items():
            says = _says(mine, operation)
            rows.append((arm, reading, says, None if says is None or truth is None else says == truth))
    frame = pd.DataFrame(rows, columns=["arm", "reading", "says", "agrees"])
    return frame.astype({"says": object, "agrees": object}).where(frame.notna(), None)


def _says(rows: pd.DataFrame, operation: str) -> str | None:
    rows = rows[rows["transport"].notna()]
    if not operation:
        tables = rows[rows["min_bytes"].notna()]
        return str(tables["transport"].iloc[0]) if len(tables) else None
    rows = rows[rows["operation"].str.startswith(operation)]
    if rows["min_bytes"].notna().any():
        rows = rows[(rows["min_bytes"] <= AT_BYTES) & (rows["max_bytes"].isna() | (rows["max_bytes"] >= AT_BYTES))]
        peers = rows[rows["locality"] != "self"]
        rows = peers if len(peers) else rows
    # Of several the most frequent, as a person who scrolls would remember it.
    return str(rows["transport"].mode().iloc[0]) if len(rows) else None


def mistakes(frame: pd.DataFrame) -> pd.DataFrame:
    """Count, for each mistaken reading, in how many logs it can be made and in how many it is wrong."""
    kept = frame[(frame["reading"] != READ) & frame["agrees"].notna()]
    counted = kept.groupby("reading", sort=False)["agrees"].agg(possible="size", right="sum").reset_index()
    counted["wrong"] = counted["possible"].astype(int) - counted["right"].astype(int)
    return counted[["reading", "possible", "wrong"]]
