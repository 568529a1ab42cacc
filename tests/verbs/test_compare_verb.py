"""kvlab compare on small made-up runs."""

import json

import pandas as pd
import pytest

from kvlab import runs
from kvlab.cli import main

ARM = {"label": "TCP", "env": {}}


def run(tmp_path, name, xfer_us, size=1000, experiment="post-vs-completion", outcome="completed"):
    made = runs.create(experiment, {"arms": [ARM], "layout": name}, run_dir=tmp_path / name)
    rows = [
        {
            "arm": "TCP",
            "case": "c",
            "bytes": size,
            "descriptors": 10,
            "in_flight": 1,
            "post_us": 1.0,
            "xfer_us": xfer_us + i % 3,
            "repetition": i,
            "warmup": False,
        }
        for i in range(9)
    ]
    made.write("pulls", pd.DataFrame(rows))
    made.update(outcome=outcome)
    return str(made.path)


def told(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_twice_as_long_is_told(tmp_path, capsys):
    a, b = run(tmp_path, "a", 100), run(tmp_path, "b", 201)
    assert main(["compare", a, b, "--json"]) == 0
    document = told(capsys)
    (row,) = document["ratios"]
    # Medians of 100, 101, 102 and of 201, 202, 203.
    assert row["ratio"] == pytest.approx(202 / 101) and row["different"] and row["method"] == "separate blocks"
    assert "parameter.layout" in [d["what"] for d in document["differences"]]
    assert document["warnings"] == []


def test_other_bytes_are_left_out_and_an_unfinished_run_is_named(tmp_path, capsys):
    a, b = run(tmp_path, "a", 100), run(tmp_path, "b", 100, size=2000, outcome="failed")
    assert main(["compare", a, b, "--json"]) == 0
    document = told(capsys)
    assert document["ratios"] == []
    assert any("left out" in w for w in document["warnings"]) and any("failed" in w for w in document["warnings"])


def test_the_report_is_one_page(tmp_path, capsys):
    a, b = run(tmp_path, "a", 100), run(tmp_path, "b", 201)
    out = tmp_path / "x.html"
    assert main(["compare", a, b, "--out", str(out)]) == 0
    page = out.read_text()
    assert "<svg" in page and "parameter.layout" in page and "http-equiv" not in page and "src=" not in page
    assert told(capsys)["report"] == str(out)


@pytest.mark.parametrize("words", [["one"], ["missing", "other"]])
def test_bad_input_is_one_line(tmp_path, capsys, words):
    assert main(["compare", *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_runs_of_two_experiments_are_refused(tmp_path, capsys):
    a, b = run(tmp_path, "a", 100), run(tmp_path, "b", 100, experiment="descriptor-shape")
    assert main(["compare", a, b]) == 2
    assert "runs of one experiment" in capsys.readouterr().err
