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
    verdict = view.conclude([found])
    assert said in verdict
    assert ("copy is inside the post" in verdict) == (transport == "cma")
    assert ("not resolved" in verdict) == (slope == 0)
    # The median post is 20 ms, of 7 descriptors, in a step of 10 ms.
    assert f"in 7 descriptors (a) falls into a gap of {10 + 20 * slope} ms" in verdict
    assert json.loads((run.path / "summary.json").read_text())["control"]["b"] == pytest.approx(0)


def test_pictures_and_tables(tmp_path):
    run = made(tmp_path / "run", 1, "cma")
    pair = view.both(run)
    assert [f.where for f in pair] == ["CPU", "H200"]
    assert (pair[0].used, pair[0].pulls) == (24, 24)
    html = view.table(pair).as_raw_html()
    for value in ("20.0", "30.0", "10.0", "65,536"):  # medians of post, gap, the control's window; the other's count
        assert value in html
    left, right = view.chart(pair).bundle["application/vnd.vegalite.v5+json"]["hconcat"]
    assert (left["title"], right["title"]) == ("CPU", "H200")
    assert "fit: 10 ms + 1.00 (1.00 to 1.00) x post" in json.dumps(left)
    assert "control: same window, no pull" in json.dumps(left)
    view.contrast_chart(pair)
    assert "5.00" in view.contrast_table(pair).as_raw_html()
    assert sorted(p.name for p in (run.path / "charts").glob("*.svg")) == [
        "post_against_gap.svg",
        "pull_against_control.svg",
    ]
    # The hand-made series: several in flight over cuda_ipc, with the gaps that suggested the experiment.
    assert "225" in view.related_table().as_raw_html()


def test_the_recording_of_a_gpu_stands_beside_the_one_of_a_cpu():
    # Slopes worked apart from kvlab, by scipy's theilslopes on the same rows: 1.05 and 1.48.
    gpu, cpu = view.both(runs.load(view.GPU))
    assert (gpu.where, gpu.line["blocks"], cpu.where, cpu.line["blocks"]) == ("H200", 12, "CPU", 12)
    assert "slope 1 holds: a gap grows by 1.05" in view.verdict(gpu)[0]
    assert "slope 1 is not resolved: a gap grows by 1.48" in view.verdict(cpu)[0]
