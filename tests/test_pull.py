"""The pull: descriptor lists by hand, real pulls over shared memory and TCP, wrong data found."""

import numpy as np
import pytest

from kvlab.errors import BadInput, RunFailed
from kvlab.params import Arm
from kvlab.pull import Case, Options, Pair, check_memory
from kvlab.pull_agent import Agent, pattern


def test_offsets_lay_blocks_one_after_another():
    case = Case("c", ((2, 16), (1, 64)))
    offsets, lengths = case.offsets(2)
    assert offsets.tolist() == [0, 16, 32, 96, 112, 128]
    assert lengths.tolist() == [16, 16, 64, 16, 16, 64]
    assert (case.descriptors, case.bytes, case.descriptor_bytes) == (3, 96, 16)


def test_scattered_blocks_stay_in_their_slot_and_size():
    case = Case("c", ((50, 16), (3, 64)))
    mine, its = case.indices(1, np.random.default_rng(0))
    assert sorted(mine) == sorted(its) == list(range(53, 106))
    assert sorted(mine[:50]) == list(range(53, 103))
    neighbours = ((np.diff(mine[:50]) == 1) & (np.diff(its[:50]) == 1)).sum()
    assert neighbours <= 2


def test_contiguous_blocks_come_in_order():
    mine, its = Case("c", ((4, 16),), shape="contiguous").indices(0, np.random.default_rng(0))
    assert mine.tolist() == its.tolist() == [0, 1, 2, 3]


def target(size: int, seed: int = 1) -> Agent:
    agent = Agent.__new__(Agent)
    agent.memory, agent.seed, agent.gpu = "DRAM", seed, 0
    agent.pool = pattern(0, size, seed).view(np.uint8).copy()
    return agent


def test_every_word_of_the_pattern_differs():
    assert len(np.unique(pattern(0, 1 << 20, 7))) == (1 << 20) // 8


@pytest.mark.parametrize("byte", [0, 4096 + 17, 8191])
def test_one_wrong_byte_is_found(byte):
    agent, lengths = target(8192), np.full(2, 4096)
    offsets, order = np.array([0, 4096]), np.array([0, 1])
    agent._verify(order, order, offsets, lengths)
    agent.pool[byte] ^= 1
    with pytest.raises(ValueError, match="wrong data"):
        agent._verify(order, order, offsets, lengths)


def test_a_block_in_the_wrong_place_is_found():
    agent, offsets, lengths = target(8192), np.array([0, 4096]), np.full(2, 4096)
    with pytest.raises(ValueError, match="corrupts KV"):
        agent._verify(np.array([0, 1]), np.array([1, 0]), offsets, lengths)


def test_pools_that_do_not_fit_are_refused():
    with pytest.raises(BadInput, match="lower prompt_tokens"):
        check_memory(1 << 44, 2, "DRAM")


ARMS = [
    Arm(label="shared memory", env={"UCX_TLS": "sm,self,cma,tcp"}),
    Arm(label="TCP", env={"UCX_TLS": "tcp"}),
]


@pytest.mark.live
@pytest.mark.parametrize("arm", ARMS, ids=lambda a: a.label)
def test_real_pulls(arm, tmp_path):
    pytest.importorskip("nixl")
    scattered = Case("scattered", ((300, 65536), (20, 8192)))
    row = Case("contiguous", ((300, 65536),), shape="contiguous")
    several = Case("three", ((100, 65536),), in_flight=3, poll_interval_ms=2)
    with Pair(arm, Options(), [scattered, row, several], tmp_path) as pair:
        for case in (scattered, row, several):
            rows = pair.pull(case, verify=True) + pair.pull(case)
            for one in rows:
                assert one["bytes"] == case.bytes
                assert 0 < one["post_us"] <= one["xfer_us"]
                # Our clock stands around NIXL's.
                assert one["xfer_clock_us"] >= one["post_clock_us"] > 0
            assert len(rows) == 2 * (case.in_flight or 1)
            # NIXL merges what lies in one row on both sides; of scattered blocks hardly two.
            counted = {one["descriptors"] for one in rows}
            assert counted == {1} if case is row else min(counted) > 0.9 * case.descriptors
    log = pair.logs["initiator"].read_text()
    assert "remote memory read" in log


@pytest.mark.live
def test_wrong_data_fails_loudly(tmp_path, monkeypatch):
    pytest.importorskip("nixl")
    case = Case("c", ((10, 65536),))
    sent = Pair._send

    def other_seed(self, side, **message):
        if message.get("op") == "open" and side == "target":
            message["seed"] += 1
        sent(self, side, **message)

    monkeypatch.setattr(Pair, "_send", other_seed)
    with pytest.raises(RunFailed, match="corrupts KV"), Pair(ARMS[0], Options(), [case], tmp_path) as pair:
        pair.pull(case, verify=True)
