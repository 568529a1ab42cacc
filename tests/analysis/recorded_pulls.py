"""The recorded pulls of tests/data/pulls as tidy tables."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

DATA = Path(__file__).parent.parent / "data" / "pulls"


def h200() -> pd.DataFrame:
    d = pd.read_csv(DATA / "h200_pulls.csv")
    arm = d["memory"] + " " + d["payload_transport"] + " " + d["get_zcopy"]
    return d.assign(bytes=d["descriptors"] * d["descriptor_bytes"], arm=arm)[d["ucx_tls"] != "cuda_copy,tcp"]


def vllm() -> pd.DataFrame:
    """One pull at a time."""
    d = pd.read_csv(DATA / "h200_vllm_pulls.csv")
    d = d.assign(post_us=d["post_ms"] * 1e3, xfer_us=d["xfer_ms"] * 1e3, descriptors=d["descriptors_per_pull"])
    return d.assign(bytes=d["mib_per_pull"] * 2**20, arm=d["payload_transport"])[d["in_flight"] == 1]


def polled() -> pd.DataFrame:
    return pd.read_csv(DATA / "loopback_polled.csv")
