"""kvlab sweep: the grid, resuming, failures kept; cells are stood in for, no pull is done here."""

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest

from kvlab import runs
from kvlab.cli import main
from kvlab.errors import BadInput, RunFailed
from kvlab.placement import ray
from kvlab.verbs import sweep


def test_grid_is_the_product_with_the_last_key_fastest():
    cells = sweep.grid(["in_flight=1,2", "shape=scattered,contiguous"])
    assert [tuple(c.values()) for c in cells] == [
        ("1", "scattered"),
        ("1", "contiguous"),
        ("2", "scattered"),
        ("2", "contiguous"),
    ]


@pytest.mark.parametrize("words", [[], ["a"], ["a="], ["a=1", "a=2"]])
def test_bad_grids(words):
    with pytest.raises(BadInput, match="--grid"):
        sweep.grid(words)


def test_a_dry_run_prints_the_cells_and_makes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # no NIXL is needed for it
    words = ["sweep", "post-vs-completion", "-p", "arms=[{label: a b}]", "--grid", "in_flight=1,2", "--dry-run"]
    assert main([*words, "--out", str(tmp_path)]) == 0
    cells = [f"cell {i}: 'arms=[{{label: a b}}]' in_flight={i + 1}" for i in range(2)]
    assert capsys.readouterr().out.splitlines() == cells and not any(tmp_path.iterdir())
    assert main([*words[:4], "--grid", "in_flight=no", "--dry-run"]) == 2


@pytest.fixture
def cells(monkeypatch):
    """Run cells without pulling: each makes a small run; in_flight=2 fails the first time."""
    pytest.importorskip("nixl")
    seen = []

    def execute(words):
        given = dict(w.split("=", 1) for w in words if "=" in w)
        seen.append(given["in_flight"])
        if given["in_flight"] == "2" and seen.count("2") == 1:
            return 1, json.dumps({"outcome": "failed", "run": None, "error": "killed"})
        out = words[words.index("--out") + 1]
        run = runs.create("post-vs-completion", {"arms": []}, out=out, label=f"x{given['in_flight']}")
        row = {"arm": "TCP", "bytes": 1, "post_us": 1.0, "xfer_us": float(given["in_flight"]), "warmup": False}
        run.write("pulls", pd.DataFrame([row]))
        run.update(outcome="completed")
        return 0, json.dumps({"outcome": "completed", "run": str(run.path), "verdict": "fine"})

    monkeypatch.setattr(sweep, "execute", execute)
    return seen


def last(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_a_failed_cell_is_kept_and_resuming_repeats_no_finished_one(tmp_path, capsys, cells):
    words = ["sweep", "post-vs-completion", "--grid", "in_flight=1,2,3"]
    assert main([*words, "--out", str(tmp_path)]) == 1
    told = last(capsys)
    assert (told["cells"], told["failed"]) == (3, 1)
    folder = Path(told["sweep"])
    table = pd.read_csv(folder / "cells.csv")
    assert list(table["outcome"]) == ["completed", "failed", "completed"]
    assert table["xfer_us TCP"].tolist()[::2] == [1.0, 3.0] and table["note"][1] == "killed"
    assert main([*words, "--resume", str(folder)]) == 0
    assert cells == ["1", "2", "3", "2"]
    assert last(capsys)["failed"] == 0
    assert "Sweep of post-vs-completion" in (folder / "report.html").read_text()


def test_a_crash_keeps_what_is_done(tmp_path, monkeypatch, cells, capsys):
    real = sweep.execute

    def crash(words):
        if "in_flight=3" in words:
            raise KeyboardInterrupt
        return real(words)

    monkeypatch.setattr(sweep, "execute", crash)
    words = ["sweep", "post-vs-completion", "--grid", "in_flight=1,3", "--out", str(tmp_path)]
    assert main(words) == 130
    (state,) = (json.loads(p.read_text()) for p in tmp_path.rglob("sweep.json"))
    assert [c["outcome"] for c in state["cells"]] == ["completed", "waiting"]


def test_every_cell_is_checked_before_the_first_runs(tmp_path, capsys, cells):
    words = ["sweep", "post-vs-completion", "--grid", "in_flight=1,no", "--out", str(tmp_path)]
    assert main(words) == 2 and cells == []
    error = capsys.readouterr().err
    assert "in_flight" in error and len(error.strip().splitlines()) == 1
    assert main(["sweep", "post-vs-completion", "--grid", "x=1", "--resume", str(tmp_path)]) == 2


def test_a_lost_node_takes_one_cell_and_a_bug_does_not_hang_the_sweep(tmp_path, capsys, monkeypatch):
    pytest.importorskip("nixl")
    seen = []

    class Node:
        lost = ""

        def execute(self, words, log, files):
            assert files["parameters.yaml"] and words[words.index("--on") + 1] == "here"
            seen.append(words)
            if self is first:
                self.lost = "node 0 was lost in mid-run"
                raise RunFailed(self.lost)
            while not first.lost:
                time.sleep(0.01)
            if len(seen) == 3:
                raise KeyError("no such thing")
            return 0, json.dumps({"outcome": "completed", "run": None})

    first, other = Node(), Node()
    monkeypatch.setattr(ray, "every_node", lambda address, root: nullcontext([first, other]))
    assert main(["sweep", "tcp-tuning", "--grid", "seed=1,2,3,4", "--on", "ray", "--out", str(tmp_path)]) == 1
    assert last(capsys)["failed"] == 2 and len(seen) == 4
    table = pd.read_csv(next(tmp_path.rglob("cells.csv")))
    notes = table.loc[table["outcome"] == "failed", "note"].tolist()
    assert sorted(notes) == ["'no such thing'", "node 0 was lost in mid-run"]
