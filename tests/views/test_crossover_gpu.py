"""One GPU's calibration: what it tells of other chunks, worked by hand from round constants, and its recordings."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlab.analysis import steps
from kvlab.views import crossover_gpu as view

#: 10 ms a step, 0.01 ms a token, 1e-6 ms for each unit of e^2 - s^2; 128 KiB a token
MODEL = steps.Model(fixed_ms=10, token_ms=0.01, attention_ms=1e-6, token_bytes=131_072)


def test_steps_told_and_longest_gaps():
    told = view.stalls_told([MODEL] * 3)
    rows = told.set_index(["run", "chunk_tokens"])
    # 256 tokens: 10 + 2.56 + 256^2 1e-6 first, 10 + 2.56 + 256 (2 x 3840 + 256) 1e-6 last
    own = rows.loc[("h200-one-gpu", 256)]
    assert own[["predicted_low", "predicted"]].tolist() == pytest.approx([12.6255, 14.5916], abs=1e-3)
    # Two prompts of 4,096 in one step of 8,192: 10 + 2 (40.96 + 4096^2 1e-6)
    both = rows.loc[("not kept", 8192)]
    assert both["predicted"] == pytest.approx(125.474, abs=1e-3)
    assert both["ratio"] == pytest.approx(198 / 125.474, abs=1e-3)
    assert rows.loc[("h200-steps", 512), "median"] == pytest.approx(34.66, abs=0.01)
    assert set(told["chunk_tokens"]) == {8192, 2560, 1024, 512, 256}
    assert "<svg" in view.stalls_chart(told)._repr_mimebundle_()["image/svg+xml"]
    assert "among the steps told at 0 of 2" in view.stalls_said(
        told[told["run"] == "h200-steps"].assign(predicted_high=1)
    )


def test_a_larger_fixed_cost_and_a_faster_link_pay_sooner():
    found = view.crossovers([MODEL] * 3, 20, [50, 400]).set_index(["arm", "gbps"])["lower"]
    fitted, more = found["as fitted"], found["fixed cost 20.0 ms"]
    assert fitted[400] < fitted[50] and more[50] < fitted[50] and more[400] <= fitted[400]


def test_a_rate_at_which_it_never_pays_is_said():
    found = view.crossovers([MODEL] * 3, 20, [0.1])
    assert found["lower"].isna().all() and (found["never"] == 1).all()
    assert "never in 100% of draws" in view.crossovers_chart(found)._repr_mimebundle_()["image/svg+xml"]
    assert isinstance(found, pd.DataFrame) and "Predicted" in view.crossovers_table(found).as_raw_html()


def test_the_fit_of_the_recording():
    estimate, *draws = view.models()
    assert len(draws) == 500 and estimate.token_bytes == 131_072
    # 28 steps of a 16k prompt, 41 to 87 ms: the whole prompt takes their sum, 465 ms, within a tenth
    assert steps.ttft_replica_ms(estimate, 16_384, 2559) == pytest.approx(465, rel=0.1)
