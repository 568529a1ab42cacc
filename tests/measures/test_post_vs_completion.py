"""Pairs that pull at once: who with whom, together, and one's failure; nothing is pulled here."""

import pytest

from kvlab.errors import RunFailed
from kvlab.measures.post_vs_completion import Together, between


class Pair:
    def __init__(self, number, error=None):
        self.number, self.error = number, error

    def pull(self, case, *, verify, begin):
        if self.error:
            raise self.error
        return [{"pair": self.number, "start_s": begin()}]


def test_two_nodes_pull_one_way_and_more_each_from_every_other():
    assert between(2) == [(0, 1)]
    assert sorted(between(3)) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    # As many pairs as there are nodes load every node's two directions alike.
    assert {a for a, _ in between(4)[:4]} == {b for _, b in between(4)[:4]} == {0, 1, 2, 3}


def test_nobody_begins_before_all_are_ready():
    with Together(3) as together:
        rows = together.pull([Pair(n) for n in range(3)], None, lambda: 1.0, verify=False)
    assert rows == [[{"pair": n, "start_s": 1.0}] for n in range(3)]


def test_a_pair_that_fails_lets_the_others_go_and_is_the_one_that_is_named():
    with Together(3) as together, pytest.raises(RunFailed, match="pair one"):
        together.pull([Pair(0), Pair(1, RunFailed("pair one")), Pair(2)], None, lambda: 0.0, verify=False)


def test_one_pair_alone_needs_no_other():
    with Together(1) as together:
        assert together.pull([Pair(0)], None, lambda: 2.0, verify=True) == [[{"pair": 0, "start_s": 2.0}]]
