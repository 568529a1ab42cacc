"""Which gaps of a running request are the steps of a prompt that is prefilled beside it."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlab.measures.chunk_first import prefill_steps

#: a prompt of 3 x 99 tokens at chunk 100 (one slot is the running request's own): three steps
STEPS = [40.0, 45.0, 50.0]


def picked(before, steps, after, *, sent_after, done_before, tokens=297):
    """Steps read from gaps: sent 1 ms after ``sent_after`` of them, answered 1 ms before the last ``done_before``."""
    gaps = [*before, *steps, *after]
    request = pd.Series({"gaps_ms": gaps, "start_s": 100.0, "ttft_ms": 500.0})
    at = 100.5 + (sum(gaps[:sent_after]) + 1) / 1e3
    done = 100.5 + (sum(gaps[: len(gaps) - done_before]) - 1) / 1e3
    rows = prefill_steps(request, at, done, tokens, 100)
    return [(r["prefix_tokens"], r["chunk_tokens"], r["step_ms"]) for r in rows]


FOUND = [(0, 99, 40.0), (99, 99, 45.0), (198, 99, 50.0)]


@pytest.mark.parametrize("sent_after", [0, 7, 9])
@pytest.mark.parametrize("done_before", [10, 9])
def test_ordinary_steps_before_and_after_do_not_hurt(sent_after, done_before):
    ordinary = [12.0, 25.0, 13.0, 14.0, 12.0, 16.0, 12.0, 13.0, 12.0, 15.0]
    assert picked(ordinary, STEPS, ordinary, sent_after=sent_after, done_before=done_before) == FOUND


def test_one_long_gap_among_many_ordinary_ones_does_not_hurt():
    assert picked([12.0] * 10 + [60.0, 12.0], STEPS, [13.0] * 12, sent_after=0, done_before=12) == FOUND


def test_a_short_last_step_is_kept():
    found = picked([12.0] * 10, [40.0, 45.0, 20.0], [13.0] * 12, sent_after=0, done_before=12, tokens=208)
    assert found == [(0, 99, 40.0), (99, 99, 45.0), (198, 10, 20.0)]


def test_steps_no_longer_than_ordinary_ones_end_with_the_answer():
    ordinary = [12.0, 15.0] * 8
    found = picked(ordinary, [14.0, 14.5, 15.5], ordinary, sent_after=0, done_before=16)
    assert [step for *_, step in found] == [14.0, 14.5, 15.5]


@pytest.mark.parametrize(
    ("steps", "done_before", "why"),
    [
        ([40.0, 12.0, 45.0, 50.0], 16, "an ordinary step between two of the prompt's"),
        (STEPS, 0, "the longest row lies long before the answer"),
    ],
)
def test_steps_that_cannot_be_the_prompts_are_refused(steps, done_before, why):
    ordinary = [12.0, 15.0] * 8
    assert picked(ordinary, steps, ordinary, sent_after=0, done_before=done_before) == [], why


def test_few_gaps_beside_the_steps_need_not_be_shorter():
    # 20 ms after the prompt was sent; a chunk of few tokens hardly makes a step longer.
    assert picked([20.0, 20.0], [20.5, 20.0, 21.0], [20.0], sent_after=1, done_before=1) == [
        (0, 99, 20.5), (99, 99, 20.0), (198, 99, 21.0),
    ]  # fmt: skip


def test_fewer_gaps_than_steps_are_refused():
    assert picked([12.0], STEPS[:2], [], sent_after=1, done_before=0) == []
