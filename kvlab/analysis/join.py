"""Which request a pull belonged to, and what a time to first token was made of, as far as the evidence goes."""

from __future__ import annotations

import numpy as np
import pandas as pd

#: seconds by which clocks and rounding may push a pull out of its request's window
SLACK_S = 0.005


def pulls_to_phases(pulls: pd.DataFrame, phases: pd.DataFrame) -> pd.DataFrame:
    """Return ``pulls`` with phase, repetition, warm-up, concurrency and prompt length of the phase they began in.

    Phases of one arm and start follow one another, so the middle of a pull's start interval decides.  What was pulled
    between phases (readiness, an answer check) keeps an empty phase and counts as warm-up.
    """
    out = pulls.copy()
    names = ("phase", "repetition", "warmup", "concurrency", "prompt_tokens")
    ordered = phases.sort_values("start_s")
    at = np.searchsorted(ordered["start_s"].to_numpy(float), out["start_s"].to_numpy(float), side="right") - 1
    end = (ordered["start_s"] + ordered["span_s"]).to_numpy(float)
    inside = (at >= 0) & (out["start_s"].to_numpy(float) <= end[np.maximum(at, 0)] + SLACK_S)
    for name in names:
        values = ordered[name].to_numpy(object)[np.maximum(at, 0)]
        values[~inside] = None
        out[name] = pd.Series(values, index=out.index, dtype="object")
    out["warmup"] = out["warmup"].map(lambda x: True if x is None else bool(x))
    return out


def pulls_to_requests(pulls: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Return ``pulls`` with ``request`` filled in where it can be told without guessing.

    A pull fits a request when it can have begun after the prefill request was answered and ended before the first
    token came, start uncertainty allowed for.  It is joined only when it fits that request alone and no other pull
    fits it; otherwise ``request`` stays empty.
    """
    out = pulls.assign(request=pd.Series([None] * len(pulls), index=pulls.index, dtype="object"))
    for arm, own in out.groupby("arm", sort=False):
        asked = requests[(requests["arm"] == arm) & requests["error"].isna() & requests["ttft_ms"].notna()]
        begin = (asked["start_s"] + asked["prefill_ms"].fillna(0) / 1e3).to_numpy(float) - SLACK_S
        end = (asked["start_s"] + asked["ttft_ms"] / 1e3).to_numpy(float) + SLACK_S
        spread = own["start_uncertainty_s"].fillna(0).to_numpy(float)
        late = own["start_s"].to_numpy(float) + spread
        early = own["start_s"].to_numpy(float) - spread + own["xfer_us"].to_numpy(float) / 1e6
        fits = (late[:, None] >= begin[None, :]) & (early[:, None] <= end[None, :])
        for row in np.flatnonzero(fits.sum(axis=1) == 1):
            mine = int(fits[row].argmax())
            if fits[:, mine].sum() == 1:
                out.at[own.index[row], "request"] = asked["request"].iloc[mine]
    return out


def ttft_parts(pulls: pd.DataFrame, requests: pd.DataFrame) -> pd.DataFrame:
    """Return a row a request with a pull of its own: prefill, post, drain and ``unaccounted`` in ms, adding to ttft.

    ``prefill_ms`` is the whole prefill request as the client saw it (queue, prefill, answer); ``unaccounted`` holds
    the hand-over, the decode engine's queue before the pull, and its first step.
    """
    joined = pulls[pulls["request"].notna()]
    merged = joined.merge(requests[["arm", "request", "ttft_ms", "prefill_ms"]], on=["arm", "request"], how="inner")
    merged = merged[merged["prefill_ms"].notna()].copy()
    merged["post_ms"] = merged["post_us"] / 1e3
    merged["drain_ms"] = (merged["xfer_us"] - merged["post_us"]).clip(lower=0) / 1e3
    merged["unaccounted_ms"] = merged["ttft_ms"] - merged["prefill_ms"] - merged["post_ms"] - merged["drain_ms"]
    kept = ["arm", "request", "prompt_tokens", "warmup", "concurrency", "repetition"]
    parts = ["ttft_ms", "prefill_ms", "post_ms", "drain_ms", "unaccounted_ms"]
    return merged[kept + parts]
