"""which-transport on people's logs and on the recording that ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlab import cli, experiments, params, runs
from kvlab.analysis.readings import MISTAKEN, READ, mistakes, readings
from kvlab.measures.which_transport import labels
from kvlab.paths import shared_dir
from kvlab.views import which_transport as view

CASES = Path(__file__).parent.parent / "cases"
RECORDED = shared_dir("data") / "which_transport" / "recorded"


def measured(tmp_path: Path, *logs: str, **more: object) -> runs.Run:
    values = {"log_path": [str(CASES / x) for x in logs], "out": str(tmp_path), **more}
    return experiments.run_or_replay(params.validate("which-transport", values))


def test_each_log_is_read_on_its_own(tmp_path: Path) -> None:
    run = measured(tmp_path, "01.log", "10.log", "04.log")
    verdicts = run.table("verdicts").set_index("arm")
    assert verdicts["transport"].where(verdicts["transport"].notna(), "").to_dict() == {
        "01": "rc_mlx5",
        "10": "tcp",
        "04": "",
    }
    assert verdicts.loc["04", "likely"].startswith("tcp (")
    assert run.manifest["outcome"] == "completed"
    assert "rc_mlx5" in (run.logs / "01.card.txt").read_text()
    assert json.loads((run.logs / "10.json").read_text())["pull"]["emulated"] is True
    rows = run.table("transports")
    assert set(rows.loc[rows["operation"] == "lane list", "arm"]) == {"01", "04"}
    assert rows.loc[rows["decides"], "line"].tolist() == [4, 9, 7]


def test_expect_contradicts_and_wins_over_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "which-transport", "-p", f"log_path={CASES / '12.log'}", "--measure-only", "--out", str(tmp_path)]
    assert cli.main([*words, "-p", "expect=tcp"]) == 0
    assert cli.main([*words, "-p", "expect=nvlink"]) == 4
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last["outcome"] == "contradicted"
    assert cli.main([*words, "-p", "expect=nvlnk"]) == 2
    assert cli.main([*words[:3], f"log_path={tmp_path / 'absent'}", *words[4:]]) == 2


def test_the_recording_says_what_this_code_says(tmp_path: Path) -> None:
    run = runs.load(RECORDED)
    logs = [RECORDED / "logs" / x for x in run.manifest["parameters"]["log_path"]]
    again = measured(tmp_path, *map(str, logs))
    assert again.table("verdicts").equals(run.table("verdicts"))
    assert again.table("transports").drop(columns="file").equals(run.table("transports").drop(columns="file"))
    for arm in run.table("verdicts")["arm"]:
        assert (again.logs / f"{arm}.card.txt").read_text() == (run.logs / f"{arm}.card.txt").read_text()


def test_readings_and_mistakes() -> None:
    run = runs.load(RECORDED)
    frame = readings(run.table("transports"), run.table("verdicts"))
    said = frame.set_index(["arm", "reading"])["says"]
    assert said["h200_cuda_ipc_reads_off", READ] == "tcp"
    assert said["h200_cuda_ipc_reads_on", READ] == "cuda_ipc"
    assert said["h200_cuda_ipc_reads_on", "active-message table"] == "tcp"
    assert said["cpu_nixl_lane_list", "lane list"] == "tcp" and said["cpu_nixl_lane_list", READ] == "cma"
    assert said["cpu_perftest_by_size", "UCX_TLS"] is None
    counted = mistakes(frame)
    assert counted["reading"].tolist() == list(MISTAKEN)
    assert (counted["wrong"] <= counted["possible"]).all()


@pytest.mark.parametrize("log", ["04.log", "38.log", "21.log"])
def test_a_log_without_tables_is_shown_as_not_determined(log: str, tmp_path: Path) -> None:
    run = measured(tmp_path, log)
    for show in (view.answers, view.readings_chart, view.mistakes_table, view.rows_table, view.cards):
        assert show(run)
    assert view.conclude(run) == "0 of 1 logs show what carried the pull."


def test_labels_are_unique() -> None:
    assert labels(["a/d.log", "b/d.log.gz", "e.txt", ".log"]) == ["d", "d (2)", "e.txt", ".log"]
