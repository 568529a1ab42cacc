"""Every pull leads to its record and to the line of the log that names its transport."""

import gzip
import shutil

import pytest

from kvlab import runs
from kvlab.views import pulls


@pytest.mark.parametrize("name", ["post_vs_completion/cpu-loopback", "relative_to_nvlink/cpu"])
def test_the_line_that_is_shown_stands_in_the_log_and_names_the_transport(name):
    run = runs.load(name)
    shown = pulls.records(run)
    table = run.table("pulls")
    assert shown["row"].tolist() == list(range(len(table)))
    for row in (0, len(table) // 2, len(table) - 1):
        *_, times, where, line = shown["lines"].iloc[row].splitlines()
        assert times.startswith(f"post {table['post_us'].iloc[row] / 1e3:,.3f} ms")
        transport, file, number = where.rstrip(":").replace(", by logs/", ", line ").split(", line ")
        data = (run.logs / file).read_bytes()
        text = (gzip.decompress(data) if file.endswith(".gz") else data).decode().split("\n")[int(number) - 1]
        assert line == " ".join(text.split()) and transport in line
        assert transport == {"shared memory": "cma", "TCP": "tcp"}[table["arm"].iloc[row]]
        if "engine" in table:  # each start of the engines has a log of its own
            assert file.startswith(f"{table['arm'].iloc[row].replace(' ', '-')}-{table['start'].iloc[row]}/")


def test_without_logs_or_evidence_it_says_so(tmp_path):
    shutil.copytree(runs.find("post_vs_completion/cpu-loopback"), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "logs")
    run = runs.load(tmp_path / "run")
    assert "TCP.initiator.log:19 (the log is not there): tcp" in pulls.records(run)["lines"].iloc[1]
    (tmp_path / "run" / "transports.parquet").unlink()
    assert pulls.records(run)["lines"].str.endswith("no log names its transport").all()
    assert "image/svg+xml" in pulls.chart(run).bundle


def test_many_pulls_are_thinned_and_the_caption_says_so(monkeypatch):
    monkeypatch.setattr(pulls, "MOST", 10)
    svg = pulls.chart(runs.load("post_vs_completion/cpu-loopback")).bundle["image/svg+xml"]
    assert "9 of 72 pulls" in svg
