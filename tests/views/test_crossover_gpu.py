"""One GPU's calibration: what it tells of other chunks, worked by hand from round constants, and its recordings."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlab import runs
from kvlab.analysis import steps
from kvlab.views import crossover_gpu as view

#: 10 ms a step, 0.01 ms a token, 1e-6 ms for each unit of e^2 - s^2; 128 KiB a token
MODEL = steps.Model(fixed_ms=10, token_ms=0.01, attention_ms=1e-6, token_bytes=131_072)


RUN = runs.load(view.FITTED)


def test_steps_told_and_longest_gaps():
    told = view.stalls_told([MODEL] * 3, RUN)
    rows = told.set_index("chunk_tokens")
    # 256 tokens: 10 + 2.56 + 256^2 1e-6 first, 10 + 2.56 + 256 (2 x 3840 + 256) 1e-6 last
    own = rows.loc[256]
    assert own[["predicted_low", "predicted"]].tolist() == pytest.approx([12.6255, 14.5916], abs=1e-3)
    # Two prompts of 4,096 in one step of 8,192: 10 + 2 (40.96 + 4096^2 1e-6)
    assert rows.loc[8192, "predicted"] == pytest.approx(125.474, abs=1e-3)
    assert rows["ratio"].tolist() == pytest.approx((rows["median"] / rows["predicted"]).tolist())
    assert list(told["chunk_tokens"]) == [8192, 2560, 1024, 512, 256]
    assert "<svg" in view.stalls_chart(told).bundle["image/svg+xml"]
    assert "among the steps told at 0 of 2" in view.stalls_said(told.iloc[3:].assign(predicted_high=1))


def test_a_faster_link_and_a_smaller_gap_limit_pay_sooner():
    found = view.crossovers([("wide", [MODEL] * 3, 50), ("narrow", [MODEL] * 3, 30)], [50, 400])
    edge = found.set_index(["arm", "gbps"])["lower"]
    assert edge["wide", 400] < edge["wide", 50] and edge["narrow", 50] < edge["wide", 50]
    assert "<svg" in view.crossovers_chart([MODEL]).bundle["image/svg+xml"]


def test_a_rate_at_which_it_never_pays_is_said():
    found = view.crossovers([("one", [MODEL] * 3, 50)], [0.1])
    assert found["lower"].isna().all() and (found["never"] == 1).all()
    assert isinstance(found, pd.DataFrame) and "Predicted" in view.crossovers_table(found).as_raw_html()


def test_the_fit_of_the_recording():
    estimate, *draws = view.models(RUN)
    assert len(draws) == view.DRAWS and estimate.token_bytes == 131_072
    # Steps of 2,559 from prefix 2,559 on, medians of two prompts: 65.0, 69.5, 74.8, 80.5 and 90.4 ms
    told = [float(steps.step_ms(estimate, 2559 * i, 2559)) for i in range(1, 6)]
    assert sum(told) == pytest.approx(380.2, rel=0.05)
    # The ordinary steps of ten prompts lie between 14 and 28 ms; costs that add up take that for a fixed cost.
    assert 14 < estimate.floor_ms < 28 and estimate.fixed_ms < 3 and view.models(RUN, floor=False)[0].fixed_ms > 10
