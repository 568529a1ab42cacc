"""The gap a post fell into: tables made by hand, where every step is 10 ms and a step with a post is longer."""

import numpy as np
import pandas as pd
import pytest
from stalled_steps import tables

from kvlab.analysis import poststall
from kvlab.errors import BadInput


def test_a_stalled_step_is_step_plus_post():
    found = poststall.met(*tables(1))
    assert len(found) == 24
    assert found["gap_ms"].tolist() == pytest.approx([10 + p for p in (5, 20, 40)] * 8)
    assert found["control_ms"].tolist() == pytest.approx([10] * 24)
    assert found["descriptors"].eq(7).all()


@pytest.mark.parametrize(("slope", "said"), [(1, "holds"), (0, "refuted"), (2, "refuted")])
def test_fit_and_verdict(slope, said):
    line = poststall.fit(poststall.met(*tables(slope)))
    assert line["b"] == pytest.approx(slope, abs=1e-9)
    assert line["a_ms"] == pytest.approx(10)
    assert (line["n"], line["blocks"]) == (24, 8)
    assert poststall.judge(line) == said


def test_few_phases_leave_it_unresolved():
    line = poststall.fit(poststall.met(*tables(1, repetitions=5)))
    assert line["b"] == pytest.approx(1)
    assert np.isnan(line["b_low"])
    assert poststall.judge(line) == "unresolved"


def phases(lengths, repetitions):
    """Two pulls a phase; a phase of its own is ``3 * repetition`` ms slower throughout, as where others run."""
    rows = [
        {"arm": "a", "start": 0, "pulled_tokens": n, "repetition": r, "post_ms": n / 100 + k}
        for n in lengths
        for r in range(repetitions)
        for k in (0, 1)
    ]
    return pd.DataFrame(rows).assign(gap_ms=lambda f: 10 + f["post_ms"] + 3 * f["repetition"] * (-1) ** f["repetition"])


def test_a_phase_is_what_is_resampled():
    # Two lengths of three repetitions are six phases; one phase less, as in a run that broke off, gives no interval.
    whole = phases((512, 2048), 3)
    line = poststall.fit(whole)
    assert (line["n"], line["blocks"]) == (12, 6)
    assert line["b_low"] < 1 < line["b_high"]
    short = poststall.fit(whole[:-2])
    assert (short["n"], short["blocks"]) == (10, 5)
    assert np.isnan([short["b_low"], short["b_high"]]).all()


def test_more_pulls_of_the_same_phase_add_no_certainty():
    once = phases((512, 2048), 3)
    more = poststall.fit(pd.concat([once] * 4, ignore_index=True))
    assert more.pop("n") == 4 * len(once)
    line = poststall.fit(once)
    line.pop("n")
    assert more == pytest.approx(line)
    # The same rows as phases of their own are another matter.
    alone = poststall.fit(pd.concat([once.assign(start=k) for k in range(4)], ignore_index=True))
    assert alone["blocks"] == 24
    assert alone["b_high"] - alone["b_low"] < line["b_high"] - line["b_low"]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.95, 1.05, "holds"),
        (0.6, 0.92, "holds"),
        (0.2, 0.89, "refuted"),
        (1.11, 1.4, "refuted"),
        (0.1, 1.2, "unresolved"),
        (0.9, 1.6, "unresolved"),
        (np.nan, np.nan, "unresolved"),
    ],
)
def test_judge(low, high, said):
    assert poststall.judge({"b_low": low, "b_high": high}) == said


def test_posts_in_one_gap_are_added():
    pulls, requests, phases = tables(1, repetitions=1, posts_ms=(20.0,))
    found = poststall.met(pd.concat([pulls, pulls], ignore_index=True), requests, phases)
    assert found[["post_ms", "pulls", "gap_ms"]].to_numpy().tolist() == [[pytest.approx(40), 2, pytest.approx(30)]]


def test_pulls_that_met_nobody_or_are_uncertain_are_left_out():
    pulls, requests, phases = tables(1)
    assert len(poststall.met(pulls.assign(start_uncertainty_s=[0.2] + [0.001] * 23), requests, phases)) == 23
    assert len(poststall.met(pulls.assign(phase=[None] + ["pull 512"] * 23), requests, phases)) == 23
    assert len(poststall.met(pulls.assign(warmup=[True] * 3 + [False] * 21), requests, phases)) == 21
    with pytest.raises(BadInput, match="steady load ended before the pulls"):
        poststall.met(pulls.assign(start_s=1e6), requests, phases)


def test_contrast_pairs_phases():
    phases, ratios = poststall.contrast(tables(1)[1])
    assert len(phases) == 16
    row = ratios.iloc[0]
    assert (row["arm"], row["n"], row["method"]) == ("a", 8, "paired blocks")
    assert row["ratio"] == pytest.approx(50 / 10)
    # All eight differences have one sign: 2 / 2^8.
    assert row["p_value"] == pytest.approx(2 / 256)
    assert row["different"]


def test_contrast_without_effect():
    assert not poststall.contrast(tables(0)[1])[1]["different"].any()
