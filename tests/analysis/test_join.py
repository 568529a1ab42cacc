"""Pulls joined to phases and requests only where nothing has to be guessed."""

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis.join import pulls_to_phases, pulls_to_requests, ttft_parts


def requests(*rows):
    return pd.DataFrame(
        [
            {"arm": "a", "request": f"r{i}", "start_s": s, "prefill_ms": p, "ttft_ms": t, "error": None}
            for i, (s, p, t) in enumerate(rows)
        ]
    )


def pulls(*rows):
    return pd.DataFrame(
        [
            {"arm": "a", "start_s": s, "xfer_us": x, "post_us": x / 2, "start_uncertainty_s": u, "bytes": 1}
            for s, x, u in rows
        ]
    )


def test_one_pull_in_one_window_is_joined():
    # Request at 10 s: prefill until 10.2, first token at 10.5; the pull runs 10.25 to 10.35.
    out = pulls_to_requests(pulls((10.25, 100_000, 0.01)), requests((10.0, 200, 500)))
    assert list(out["request"]) == ["r0"]


@pytest.mark.parametrize(
    "start_s", [10.0, 10.6]
)  # before the prefill was answered; after the first token, uncertainty allowed for
def test_a_pull_outside_the_window_is_not_joined(start_s):
    out = pulls_to_requests(pulls((start_s, 100_000, 0.01)), requests((10.0, 200, 500)))
    assert out["request"].isna().all()


def test_two_pulls_in_one_window_or_one_pull_in_two_are_not_guessed():
    out = pulls_to_requests(pulls((10.25, 1e4, 0.01), (10.3, 1e4, 0.01)), requests((10.0, 200, 500)))
    assert out["request"].isna().all()
    out = pulls_to_requests(pulls((10.25, 1e4, 0.01)), requests((10.0, 200, 500), (10.1, 100, 500)))
    assert out["request"].isna().all()


def test_a_failed_request_gets_no_pull():
    asked = requests((10.0, 200, 500)).assign(error="boom")
    assert pulls_to_requests(pulls((10.25, 1e4, 0.01)), asked)["request"].isna().all()


def test_phases_by_the_time_they_began_in():
    phases = pd.DataFrame(
        {
            "phase": ["x", "y"],
            "repetition": [-1, 0],
            "warmup": [True, False],
            "concurrency": [1, 4],
            "prompt_tokens": [512, 1024],
            "start_s": [5.0, 10.0],
            "span_s": [3.0, 3.0],
        }
    )
    out = pulls_to_phases(pulls((6.0, 1, 0), (12.9, 1, 0), (9.0, 1, 0), (1.0, 1, 0)), phases)
    assert list(out["phase"]) == ["x", "y", None, None]
    assert list(out["warmup"]) == [True, False, True, True]
    assert list(out["prompt_tokens"][:2]) == [512, 1024]


def test_the_parts_of_a_first_token_add_up():
    joined = pulls((10.25, 100_000, 0.01)).assign(
        request="r0", prompt_tokens=512, warmup=False, concurrency=1, repetition=0
    )
    parts = ttft_parts(joined, requests((10.0, 200, 500))).iloc[0]
    # 200 ms prefill + 50 post + 50 drain + 200 unaccounted = 500
    assert parts["post_ms"] == 50 and parts["drain_ms"] == 50
    assert np.isclose(parts["unaccounted_ms"], 200)
