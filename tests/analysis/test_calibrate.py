"""Constants come back from made runs, their intervals cover, and the check tells hit from miss."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvlab.analysis import calibrate, steps
from kvlab.errors import BadInput

TRUE = steps.Model(
    12.0, 0.02, 2e-6, t0_ms=30.0, prefill_chunk=4096, transfer_ms=15.0, link_share=1.25, token_bytes=40_000
)


def made_steps(noise=0.0, rounds=6, seed=0):
    rng = np.random.default_rng(seed)
    rows = []
    for r in range(rounds):
        for prefix in (0, 512, 1024, 2048, 4096):
            for chunk in (64, 256, 512, 1024):
                true = 12 + 0.02 * chunk + 2e-6 * chunk * (2 * prefix + chunk)
                rows.append(("a", prefix, chunk, true * rng.lognormal(0, noise), r))
    return pd.DataFrame(rows, columns=["arm", "prefix_tokens", "chunk_tokens", "step_ms", "repetition"])


def made_cells(factor=1.0):
    """TTFTs by hand: 1024 tokens in chunks of 256 are 4 steps, in 4096 one; 40.96 MB at 1 Gbps are 327.68 ms."""
    rows = []
    for phase, lengths in (("calibrate", (1024, 2048)), ("check", (8192, 24576))):
        for n in lengths:
            own = 30 + 0.02 * n + 2e-6 * n * n
            alone = own + 12 * (n // 256)
            rows += [("replica", calibrate.case(phase, n, chunk=256), alone * f) for f in (0.99, 1, 1.01)]
            for rate in (1, 10):
                moved = 15 + 1.25 * n * 40_000 * 8 / (rate * 1e6)
                both = own + 12 * -(-n // 4096) + moved
                scale = factor if phase == "check" else 1.0
                rows += [("1P1D", calibrate.case(phase, n, gbps=rate), both * f * scale) for f in (0.99, 1, 1.01)]
    frame = pd.DataFrame(rows, columns=["arm", "case", "value"])
    return frame.assign(quantity="ttft_ms")


def test_exact_steps_give_the_constants_back():
    costs, table = calibrate.fit_steps(made_steps())
    assert costs[0] == pytest.approx([12, 0.02, 2e-6, 0])
    assert len(table) == 20 and table["residual"].abs().max() < 1e-9


def test_costs_are_never_negative():
    flat = made_steps().assign(step_ms=lambda f: 20 - f["chunk_tokens"] / 1000)
    assert (calibrate.fit_steps(flat, draws=20)[0] >= 0).all()


def test_a_floor_under_short_steps_is_not_taken_for_a_fixed_cost():
    """Eager mode: no step below the CPU's 14 or 25 ms, first steps 20 ms short; the costs are 1, 0.02 and 2e-6."""
    rows = []
    for chunk, ordinary in ((64, 25.0), (256, 14.0), (1024, 14.0), (4096, 25.0)):
        for prefix in range(0, 16384, chunk):
            true = max(ordinary, 1 + 0.02 * chunk + 2e-6 * chunk * (2 * prefix + chunk))
            rows += [(prefix, chunk, true - 20 * (prefix == 0 and chunk > 256), r, 16384, ordinary) for r in range(2)]
    columns = ["prefix_tokens", "chunk_tokens", "step_ms", "repetition", "prompt_tokens", "ordinary_ms"]
    frame = pd.DataFrame(rows, columns=columns)
    costs, table = calibrate.fit_steps(frame, draws=5)
    assert costs[0] == pytest.approx([1, 0.02, 2e-6, 19.5], rel=1e-3)
    assert set(costs[:, 3]) <= {14, 19.5, 25} and table["residual"].abs().max() < 1e-3
    assert calibrate.fit_steps(frame.drop(columns="ordinary_ms"))[0][0, 0] > 5
    # A prompt whose running request was never alone does not name it: those steps go, the floor stays.
    some = frame.assign(ordinary_ms=frame["ordinary_ms"].mask(frame["repetition"] == 1))
    assert calibrate.fit_steps(some)[0][0] == pytest.approx(costs[0])
    # Noise as large as the steps: draws below 0.
    rng = np.random.default_rng(1)
    wild = frame.assign(step_ms=frame["step_ms"] * rng.lognormal(0, 2, len(frame)))
    assert (calibrate.fit_steps(wild, draws=50)[0] >= 0).all()


@pytest.mark.parametrize(
    "keep", ["chunk_tokens == 64", "prefix_tokens == 0 and chunk_tokens < 300", "chunk_tokens < 0"]
)
def test_steps_of_too_few_kinds_are_refused(keep):
    with pytest.raises(BadInput, match="cannot tell the three costs apart"):
        calibrate.fit_steps(made_steps().query(keep))


def test_intervals_cover():
    inside = np.zeros(3)
    for seed in range(40):
        draws = calibrate.fit_steps(made_steps(0.05, seed=seed), draws=100)[0]
        low, high = np.quantile(draws[1:, :3], [0.025, 0.975], axis=0)
        inside += (low <= [12, 0.02, 2e-6]) & (high >= [12, 0.02, 2e-6])
    assert (inside >= 35).all(), inside


def test_all_constants_from_steps_and_short_runs():
    points = calibrate.points(made_cells())
    assert set(points["phase"]) == {"calibrate", "check"} and points["gbps"].dropna().isin([1, 10]).all()
    first, *draws = calibrate.calibrate(made_steps(0.02), points, base=TRUE, draws=60)
    assert first.t0_ms == pytest.approx(30, abs=3)
    assert first.transfer_ms == pytest.approx(15, abs=4)
    assert first.link_share == pytest.approx(1.25, rel=0.03)
    table = calibrate.constants([first, *draws]).set_index("name")
    assert (table["low"] <= table["value"]).all() and (table["value"] <= table["high"]).all()
    assert table.loc["link_share", "low"] <= 1.25 <= table.loc["link_share", "high"]


def test_crossover_carries_the_draws():
    exact = calibrate.crossover([steps.PUBLISHED], 14.3)
    assert (exact["lower"], exact["never"], exact["draws"]) == (13824, None, 0)
    # Half of the draws have a link that never pays: the share says so, and the upper end is open.
    slow = steps.replace(steps.PUBLISHED, link_share=30.0)
    mixed = calibrate.crossover([steps.PUBLISHED, *[steps.PUBLISHED, slow] * 50], 14.3)
    assert (mixed["lower"], mixed["low"], mixed["high"], mixed["never"]) == (13824, 13824, None, 0.5)


@pytest.mark.parametrize(("factor", "outcomes"), [(1.0, {"hit"}), (30.0, {"hit", "miss"})])
def test_check_on_both_sides(factor, outcomes):
    points = calibrate.points(made_cells(factor))
    models = calibrate.calibrate(made_steps(0.01), points, base=TRUE, draws=60)
    found = calibrate.check(models, points)
    assert len(found) == 4 and set(found["outcome"]) == outcomes
    if factor == 1:
        # 24,576 tokens: replicas 30 + 491.52 + 1207.96 + 12 * 96; 1P1D at 10 Gbps 6 steps and 15 + 983.04
        row = found[(found["prompt_tokens"] == 24576) & (found["gbps"] == 10)].iloc[0]
        assert row["ratio"] == pytest.approx((1729.48 + 72 + 998.04) / (1729.48 + 1152), abs=0.005)
        assert row["low"] < row["ratio"] < row["high"] < 1


def test_two_overlapping_sides_are_unresolved():
    points = calibrate.points(made_cells())
    both = points[points["phase"] == "check"].copy()
    both.loc[both["arm"] == "1P1D", "ttft_ms"] = both.loc[both["arm"] == "replica", "ttft_ms"].median()
    models = calibrate.calibrate(made_steps(0.01), points, base=TRUE, draws=20)
    near = both[(both["prompt_tokens"] == 8192)].assign(ttft_ms=[90, 100, 110] * 3)
    assert set(calibrate.check(models, near)["outcome"]) == {"unresolved"}
