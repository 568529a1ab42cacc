"""post-stall's table and verdict on a run made of the hand-made tables of its analysis."""

import json

import pandas as pd
import pytest
from stalled_steps import tables

from kvlab import params, runs
from kvlab.views import post_stall as view


def made(path, slope, transport):
    given = params.validate("post-stall", {"arms": [{"label": "a", "env": {"UCX_TLS": "tcp"}}]})
    run = runs.create("post-stall", given.model_dump(), run_dir=path)
    for name, frame in zip(("pulls", "requests", "phases"), tables(slope), strict=True):
        run.write(name, frame)
    run.write("verdicts", pd.DataFrame([{"arm": "a", "transport": transport}]))
    run.update(outcome="completed")
    return run


@pytest.mark.parametrize(
    ("slope", "transport", "said"),
    [
        (1, "cma", "slope 1 holds: a gap grows by 1.00 (1.00 to 1.00) ms"),
        (0, "tcp", "slope 1 is REFUTED: a gap grows by 0.00"),
    ],
)
def test_verdict_is_computed(tmp_path, slope, transport, said):
    run = made(tmp_path / "run", slope, transport)
    found = view.Found(run)
    verdict = view.conclude(found, run)
    assert said in verdict
    assert ("copy is inside the post" in verdict) == (transport == "cma")
    assert ("not resolved" in verdict) == (slope == 0)
    assert json.loads((run.path / "summary.json").read_text())["control"]["b"] == pytest.approx(0)


def test_pictures_and_tables(tmp_path):
    run = made(tmp_path / "run", 1, "cma")
    found = view.Found(run)
    assert (found.used, found.pulls) == (24, 24)
    html = view.table(found, run).as_raw_html()
    for value in ("20.0", "30.0", "10.0"):  # medians of post, gap, and the control's window
        assert value in html
    assert "fit: 10.0 ms + 1.00 x post" in json.dumps(
        view.chart(found, run)._bundle["application/vnd.vegalite.v5+json"]
    )
    view.contrast_chart(found, run)
    assert "5.00" in view.contrast_table(found).as_raw_html()
    assert sorted(p.name for p in (run.path / "charts").glob("*.svg")) == [
        "post_against_gap.svg",
        "pull_against_control.svg",
    ]
    # The hand-made series: several in flight over cuda_ipc, with the gaps that suggested the experiment.
    assert "225" in view.related_table().as_raw_html()
