"""``kvlab explain``: exit codes, the card, the document, standard input."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from kvlab import cli
from kvlab.verbs import explain

CASES = Path(__file__).parent.parent / "cases"
DOCUMENT = {"protocols", "lanes", "kv_metrics", "problems", "pull"}
PROTOCOL = {"host", "pid", "thread", "context", "locality", "config", "operation", "attributes", "local", "remote"}
ROW = {"min_bytes", "max_bytes", "description", "config", "lanes", "estimate", "selections", "truncated", "line"}
PULL = {"transport", "likely", "devices", "paths", "emulated", "staged", "estimate", "verdict", "lines"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["01.log"], 0),
        (["01.log", "--expect", "rc_mlx5"], 0),
        (["01.log", "--expect", "roce"], 0),
        (["01.log", "--expect", "nvlink"], 4),
        (["01.log", "--expect", "nvlink", "--json"], 4),
        (["01.log", "--descriptor-bytes", "32", "--expect", "rc"], 0),
        (["12.log", "--expect", "tcp"], 0),
        (["12.log", "--expect", "rdma,sm"], 4),
        (["16.log"], 3),
        (["16.log", "--expect", "tcp"], 3),
        (["38.log"], 3),
        (["absent.log"], 2),
        (["."], 2),
        (["01.log", "absent.log"], 2),
        (["01.log", "--expect", "rc_ml5x"], 2),
        (["01.log", "--expect", ""], 2),
        (["01.log", "--descriptor-bytes", "many"], 2),
        (["01.log", "--descriptor-bytes", "-1"], 2),
        (["01.log", "--descriptor-bytes", "0"], 2),
        (["--no-such-flag"], 2),
    ],
)
def test_exit_codes(words: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    named = [str(CASES / w) if w.endswith((".log", ".")) else w for w in words]
    assert cli.main(["explain", *named]) == code
    said = capsys.readouterr()
    if code == 2:
        assert not said.out
        assert said.err.strip().splitlines()[-1].startswith("kvlab")
        assert "Traceback" not in said.err
    elif "--json" in words:
        assert json.loads(said.out)["pull"]["transport"] == "rc_mlx5"


@pytest.mark.parametrize("case", yaml.safe_load((CASES / "explain.yaml").read_text("utf-8")), ids=lambda c: c["case"])
def test_every_case_has_a_card_and_a_document(case: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    name, want = str(CASES / f"{case['case']}.log"), case["want"]
    code = cli.main(["explain", name])
    card = capsys.readouterr().out
    assert code == (0 if "transport" in want else 3)
    first = " ".join(card.split("\n\n")[0].split())
    assert (f"went over {want['transport']}" if "transport" in want else "not determined") in first
    for problem in want.get("problems", []):
        assert problem in card
    assert all(len(line) < 140 for line in card.splitlines())
    cli.main(["explain", "--json", name])
    document = json.loads(capsys.readouterr().out)
    assert document.keys() >= DOCUMENT
    assert set(document["pull"]) == PULL
    for protocol in document["protocols"]:
        assert protocol.keys() >= PROTOCOL | {"line", "rows"}
        for row in protocol["rows"]:
            assert set(row) == ROW
            assert all(set(lane) == {"transport", "device", "path", "share"} for lane in row["lanes"])
    assert all(p.keys() >= {"code", "line", "text", "advice"} for p in document["problems"])


def test_standard_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["explain"], ["explain", "-"]):
        data = gzip.compress((CASES / "10.log").read_bytes())
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert cli.main(words) == 0
        assert "tcp on lo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gzip.compress(b"x" * 1000)[:12], "cannot be read: Compressed file ended"),
        (b"", "is empty"),
        (gzip.compress(b""), "is empty"),
        (bytes(range(256)) * 9, "is not text"),
    ],
    ids=["cut", "empty", "packed", "binary"],
)
def test_nothing_to_read_is_bad_input(
    data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "given").write_bytes(data)
    assert cli.main(["explain", str(tmp_path / "given")]) == 2
    said = capsys.readouterr()
    assert f"given {says}" in said.err and said.err.count("\n") == 1 and not said.out
    # Beside a log that tells, the answer stands and the card names the other.
    assert cli.main(["explain", str(tmp_path / "given"), str(CASES / "10.log")]) == 0
    assert "nothing-to-read" in capsys.readouterr().out


def test_a_text_that_tells_nothing_is_not_determined(tmp_path: Path) -> None:
    (tmp_path / "holes.log").write_bytes(b"\0" * 9000 + b"\x1b[32mINFO\x1b[0m hello\r\n")
    assert cli.main(["explain", str(tmp_path / "holes.log")]) == 3


def test_several_files_name_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(CASES / "10.log"), str(CASES / "12.log")]) == 0
    assert "10.log:7" in capsys.readouterr().out
    assert cli.main(["explain", str(CASES / "31.log"), str(CASES / "01.log")]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "rc_mlx5 (inter-node, intra-node, lines 01.log:4, 01.log:9)" in said and "line 31.log:4" in said


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("131072", 131072),
        ("128KiB", 131072),
        ("128K", 131072),
        ("128 kib", 131072),
        ("125kB", 125000),
        ("0.5MiB", 524288),
    ],
)
def test_sizes(text: str, bytes_: int) -> None:
    assert explain.size(text) == bytes_
