"""tcp-tuning's answers, from pulls whose rates are known."""

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis import tcp

FIGURES = {
    "rate_default_segments": 5.0,
    "rate_256k_segments": 15.0,
    "per_flow_cap": 5.0,
    "per_flow_cap_placement_group": 10.0,
    "nixl_pieces_per_transfer_max": 4,
    "aggregate_31b_all_four_busy_low": 19,
    "aggregate_31b_all_four_busy_high": 21,
    "pinned_socket_buffers_effect_low": -5,
    "pinned_socket_buffers_effect_high": -10,
}
BYTES = 1_250_000  # 10^7 bits: at 1 Gbps 10 ms


def pulls(speeds, rounds=8):
    """A row a pull: {(arm, link, descriptors): Gbps}, each round 0.1 percent slower than the one before."""
    rows = []
    for (arm, link, n), gbps in speeds.items():
        for r in range(rounds):
            us = 1e4 / gbps * (1 + r / 1000)
            rows.append(
                {"arm": arm, "link": link, "case": f"{n:,} descriptors", "descriptors": n, "bytes": BYTES}
                | {"post_us": us / 100, "xfer_us": us, "repetition": r, "warmup": False}
            )
    return pd.DataFrame(rows)


def limits(one, four):
    rows = [{"name": "plain TCP, 1 connection", "link": k, "gb_per_s": v / 8} for k, v in one.items()]
    return pd.DataFrame(
        rows + [{"name": "plain TCP, 4 connections", "link": k, "gb_per_s": v / 8} for k, v in four.items()]
    )


def cells(counts):
    """A row a pull: {(arm, link, descriptors): [connections of each]}."""
    return pd.DataFrame(
        [
            {"arm": a, "link": k, "case": f"{n:,} descriptors", "outcome": "completed", "quantity": "connections"}
            | {"value": float(v), "repetition": r}
            for (a, k, n), values in counts.items()
            for r, v in enumerate(values)
        ],
        columns=["arm", "link", "case", "outcome", "quantity", "value", "repetition"],
    )


def answers(p, c=None, one=None, four=None):
    c = cells({}) if c is None else c
    found = tcp.claims(p, c, limits(one or {"none": 40.0}, four or {"none": 40.0}), FIGURES, "256k")
    return {(r.claim.split()[0] + " " + r.claim.split()[-1], r.link): (r.answer, r.here) for r in found.itertuples()}


SEGMENTS, UNUSED, FOUR, SPLIT, BUFFERS = "segment up", "UCX's unused", "a most", "the flow", "pinned slower"


def test_rate_and_share_of_a_plain_flow():
    (row,) = tcp.rates(pulls({("UCX default", "none", 10): 2.0}), limits({"none": 4.0}, {"none": 8.0})).to_dict(
        "records"
    )
    # Slowed by 0 to 0.7 percent, the median by 0.35.
    assert row["gbps"] == pytest.approx(2 / 1.0035, rel=1e-4)
    assert row["share"] == pytest.approx(0.5 / 1.0035, rel=1e-4)
    assert (row["one_gbps"], row["four_gbps"], row["n"]) == (4, 8, 8)
    assert row["gbps_low"] <= row["gbps"] <= row["gbps_high"]


@pytest.mark.parametrize(
    # Published 3 times: half of that gain is 2 times.
    ("gbps", "answer"),
    [(6.0, tcp.HOLDS), (4.1, tcp.HOLDS), (3.0, tcp.DIRECTION), (2.0, tcp.NOT), (1.0, tcp.NOT)],
)
def test_a_gain_holds_from_half_of_the_published_one_up(gbps, answer):
    p = pulls({("UCX default", "none", 10): 2.0, ("256k", "none", 10): gbps})
    assert answers(p)[SEGMENTS, "none"] == (answer, f"256k: {gbps / 2:.2f}x ({gbps / 2:.2f} to {gbps / 2:.2f})")


def test_each_link_has_its_own_answer():
    speeds = {("UCX default", "none", 10): 2.0, ("256k", "none", 10): 6.0}
    found = answers(pulls(speeds | {("UCX default", "5", 10): 1.0, ("256k", "5", 10): 1.0}))
    assert (found[SEGMENTS, "none"][0], found[SEGMENTS, "5"][0]) == (tcp.HOLDS, tcp.NOT)


def test_a_share_is_unused_below_95_percent_of_the_plain_flow():
    p = pulls({("UCX default", "5", 10): 4.5, ("UCX default", "6", 10): 6.0})
    found = answers(p, one={"5": 5.0, "6": 6.0})
    assert (found[UNUSED, "5"][0], found[UNUSED, "6"][0]) == (tcp.HOLDS, tcp.NOT)


def test_connections_are_counted_by_descriptors():
    p = pulls({("256k, 4 threads", "none", n): 2.0 for n in (1023, 4096)})
    c = cells({("256k, 4 threads", "none", 1023): [1, 1, 1], ("256k, 4 threads", "none", 4096): [2, 4, 3]})
    answer, here = answers(p, c)[FOUR, "all"]
    assert answer == tcp.HOLDS
    assert here == "1,023 descriptors: 1 (1 to 1); 4,096 descriptors: 3 (2 to 4)"
    # One connection is no split; five are more than four.
    for seen in ([1, 1], [5, 4]):
        assert answers(p, cells({("256k, 4 threads", "none", 4096): seen}))[FOUR, "all"][0] == tcp.NOT


def test_the_split_pays_where_it_beats_one_capped_flow():
    p = pulls({("a, 4 threads", "1 per flow", n): g for n, g in ((1024, 0.9), (4096, 2.0))})
    found = answers(p, one={"1 per flow": 1.0}, four={"1 per flow": 4.0})
    assert found[SPLIT, "1 per flow"][0] == tcp.HOLDS and "(50% of four)" in found[SPLIT, "1 per flow"][1]
    slow = pulls({("a, 4 threads", "1 per flow", 4096): 0.9})
    assert answers(slow, one={"1 per flow": 1.0}, four={"1 per flow": 4.0})[SPLIT, "1 per flow"][0] == tcp.NOT
    # A pull of one piece says nothing about the split, nor does a cap for all connections together.
    for link, n in (("1 per flow", 1024), ("1", 4096)):
        assert answers(pulls({("a, 4 threads", link, n): 2.0}))[SPLIT, ""][0] == tcp.UNTESTED


@pytest.mark.parametrize(("gbps", "answer"), [(1.8, tcp.HOLDS), (2.0, tcp.NOT), (2.4, tcp.NOT)])
def test_buffers_are_held_against_the_same_segment_size(gbps, answer):
    p = pulls({("256k", "none", 10): 2.0, ("256k, buffers 8m", "none", 10): gbps, ("UCX default", "none", 10): 1.0})
    got, here = answers(p)[BUFFERS, "none"]
    assert got == answer and f"{gbps / 2 - 1:+.0%}" in here


def test_an_interval_that_spans_what_the_claim_needs_is_not_resolved():
    # Every second round at a third of the speed, the others at three times.
    for first, second, claim in (("UCX default", "256k", SEGMENTS), ("256k", "256k, buffers 8m", BUFFERS)):
        p = pulls({(first, "none", 10): 2.0, (second, "none", 10): 2.0})
        p.loc[p["arm"] == second, "xfer_us"] *= np.array([3, 1 / 3] * 4)
        assert answers(p)[claim, "none"][0] == tcp.UNRESOLVED


def test_one_descriptor_more_is_held_against_the_pull_below_the_piece():
    speeds = {("a, 4 threads", "none", n): g for n, g in ((1023, 4.0), (1024, 1.0), (4096, 9.0))}
    (row,) = tcp.first_piece(pulls({**speeds, ("b", "none", 1023): 7.0})).to_dict("records")
    assert (row["arm"], row["link"], row["case"], row["below"]) == (
        "a, 4 threads", "none", "1,024 descriptors", "1,023 descriptors",
    )  # fmt: skip
    assert row["different"] and row["speedup"] == pytest.approx(0.25)
    assert tcp.first_piece(pulls({("b", "none", 1023): 7.0})).empty


def test_what_was_not_run_is_not_tested():
    found = answers(pulls({("16k", "none", 10): 2.0}))
    assert {a for a, _ in found.values()} == {tcp.UNTESTED}


def test_quantities_are_medians_and_leave_failures_out():
    c = cells({("a", "none", 10): [1, 2, 9]})
    c = pd.concat([c, c[:1].assign(outcome="timeout", value=np.nan), c[:1].assign(quantity="rate", value=3.0)])
    (row,) = tcp.quantities(c).to_dict("records")
    assert row == {"arm": "a", "link": "none", "case": "10 descriptors", "connections": 2.0}
    assert tcp.quantities(c[c["outcome"] == "timeout"]).empty
