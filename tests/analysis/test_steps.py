"""The step-time model against the published curve, and against arithmetic done by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis import steps

#: tcp_crossover_curve: the published figure's points (input tokens, chunk, chunks, TTFT of replicas and of 1P1D in s)
CURVE = [
    (2048, 1920, 2, 0.109, 0.262),
    (4096, 1584, 3, 0.173, 0.333),
    (8192, 976, 9, 0.398, 0.509),
    (13824, 672, 21, 0.840, 0.839),
    (16384, 592, 28, 1.093, 1.009),
    (24576, 416, 60, 2.175, 1.688),
    (32768, 336, 98, 3.530, 2.544),
    (36736, 304, 121, 4.325, 3.031),
    (40960, 272, 151, 5.305, 3.579),
    (49152, 224, 220, 7.513, 4.791),
]
#: fixed 10 ms, 0.01 ms a token, 1e-6 ms a token and token of prefix; round, so that sums can be done by hand
PLAIN = steps.Model(10.0, 0.01, 1e-6)


def test_published_curve_within_one_percent():
    found = steps.curve(steps.PUBLISHED, [c[0] for c in CURVE], steps.PUBLISHED_GBPS, 50)
    assert list(zip(found["chunk_tokens"], found["chunks"], strict=True)) == [c[1:3] for c in CURVE]
    assert found["replica_ms"].to_numpy() == pytest.approx([c[3] * 1e3 for c in CURVE], rel=0.01)
    assert found["1p1d_ms"].to_numpy() == pytest.approx([c[4] * 1e3 for c in CURVE], rel=0.01)


@pytest.mark.parametrize(
    ("gbps", "first"),
    [(4.45, 34560), (14.3, 13824), (14.97, 13824), (25, 10496), (50, 6912), (95, 5632), (200, 4608), (400, 4608)],
)
def test_published_lower_edges(gbps, first):
    assert steps.window(steps.PUBLISHED, gbps).lower == first


def test_published_upper_edge_needs_three_seconds():
    free = steps.window(steps.PUBLISHED, 14.3)
    assert (free.lower, free.upper, free.ends_by) == (13824, 36736, "gap of the decode engine")
    strict = steps.window(steps.PUBLISHED, 14.3, ttft_ms=1000)
    assert (strict.lower, strict.upper, strict.ends_by) == (13824, 16128, "TTFT limit")
    assert steps.window(steps.PUBLISHED, 14.3, ttft_ms=2900).upper < 36000
    assert steps.window(steps.PUBLISHED, 14.3, ttft_ms=3100).upper == 36736


def test_a_step_and_the_sum_of_steps():
    # 1000 tokens after 2000: 10 + 10 + 1e-6 * 1000 * 5000
    assert float(steps.step_ms(PLAIN, 2000, 1000)) == pytest.approx(25)
    whole = sum(float(steps.step_ms(PLAIN, s, n)) for s, n in ((0, 1000), (1000, 1000), (2000, 500)))
    assert float(steps.ttft_replica_ms(replace(PLAIN, t0_ms=3), 2500, 1000)) == pytest.approx(3 + whole)


@pytest.mark.parametrize("tokens", [1, 16, 100, 777, 1024, 2500, 4000])
@pytest.mark.parametrize("gap", [10.4, 13, 20, 35])
def test_largest_chunk_against_trying_every_one(tokens, gap):
    def longest(chunk):
        edges = [*range(0, tokens, chunk), tokens]
        return max(10 + 0.01 * (e - s) + 1e-6 * (e * e - s * s) for s, e in itertools.pairwise(edges))

    fits = [c for c in range(16, tokens + 16, 16) if longest(c) <= gap]
    assert steps.largest_chunk(PLAIN, [tokens, 5000], gap)[0] == max(fits, default=0)


def test_no_chunk_keeps_a_limit_below_the_fixed_cost():
    assert steps.largest_chunk(PLAIN, [500], 9).tolist() == [0]
    assert np.isinf(steps.ttft_replica_ms(PLAIN, 500, 0))
    # Neither does the decode engine, so there is nothing to pay off.
    assert steps.window(PLAIN, 10, gap_ms=9) == steps.Window()


def test_bytes_and_transfer():
    # 512 tokens: half of the windows' 209,715,200 B and 512 * 20,480 B
    assert float(steps.kv_bytes(steps.PUBLISHED, 512)) == 104_857_600 + 10_485_760
    # 2048: full windows and 41,943,040 B = 251,658,240 B; at 8 Gbps a byte takes 1 ns; link used half: twice that
    m = replace(steps.PUBLISHED, link_share=2.0)
    extra = steps.ttft_1p1d_ms(m, 2048, 8) - steps.ttft_replica_ms(m, 2048, 8192)
    assert float(extra) == pytest.approx(28 + 2 * 251.65824)


def test_a_slow_link_and_a_loose_gap_never_pay():
    assert steps.window(steps.PUBLISHED, 1).lower is None
    # At 1 s a replica prefills in as few steps as 1P1D does, and moves nothing.
    assert steps.window(steps.PUBLISHED, 400, gap_ms=1000, most=16384).lower is None


def test_windows_over_all_axes():
    found = steps.windows(steps.PUBLISHED, [14.3, 95], ttft_ms=[1000, np.inf], token_bytes=[20480, 200_000])
    assert len(found) == 8
    row = found[(found["gbps"] == 95) & np.isinf(found["ttft_ms"]) & (found["token_bytes"] == 20480)]
    assert row["lower"].item() == 5632
    # More KV a token moves the edge out.
    heavy = found[(found["gbps"] == 95) & np.isinf(found["ttft_ms"]) & (found["token_bytes"] == 200_000)]
    assert pd.isna(heavy["lower"].item()) or heavy["lower"].item() > 5632


@pytest.mark.parametrize("chunk", [64, 100, 512, 3000, 70_000])
def test_with_a_floor_a_prefill_is_still_the_sum_of_its_steps(chunk):
    m = steps.Model(2.0, 0.02, 4e-7, t0_ms=5, floor_ms=27)
    assert float(steps.ttft_replica_ms(m, 0, chunk)) == 5
    for length in (1, 63, 64, 65, 5_000, 40_000):
        ends = [*range(chunk, length, chunk), length]
        parts = [float(steps.step_ms(m, a, b - a)) for a, b in zip([0, *ends], ends, strict=False)]
        assert min(parts) >= 27
        assert float(steps.ttft_replica_ms(m, length, chunk)) == pytest.approx(5 + sum(parts))


def test_a_floor_above_the_gap_limit_leaves_no_chunk_and_no_window():
    m = steps.Model(2.0, 0.02, 4e-7, floor_ms=60)
    assert steps.largest_chunk(m, [4096], 50) == 0 and steps.window(m, 100, gap_ms=50).lower is None
