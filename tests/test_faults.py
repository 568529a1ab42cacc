"""What a machine, a person or another process can do to a run: one line, what was measured is kept, nothing leaks."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from kvlab import experiments, params, runs
from kvlab.capture import redact
from kvlab.cli import main
from kvlab.engines import launch
from kvlab.engines.router import Router
from kvlab.engines.vllm import Engine
from kvlab.errors import BadInput, RunFailed
from kvlab.params import Arm
from kvlab.placement import local
from kvlab.pull import Case, Options, Pair
from kvlab.verbs import run as run_verb

DATA = Path(__file__).parent / "data"
AIPERF = DATA / "foreign/aiperf_profile_export.jsonl"
LOG = DATA / "ucx/nixl_1.4.1_used.log"
SOURCES = sorted(Path(runs.__file__).parent.rglob("*.py"))
METACHARACTERS = "$(touch pwned);`touch pwned`&&touch pwned|'é\"\n../x"


def files(folder):
    return [p for p in Path(folder).rglob("*") if p.is_file()]


def said(capsys):
    """The one line on stderr, and the document on the last line of stdout if there is one."""
    out, err = capsys.readouterr()
    lines = [x for x in err.splitlines() if x and "Executing" not in x]  # papermill's progress
    assert len(lines) == 1 and "Traceback" not in out, err
    return lines[0], json.loads(out.splitlines()[-1]) if out else None


@contextmanager
def disk(folder, options):
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system of its own takes root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# -- the disk --------------------------------------------------------------------------------------


def test_full_disk_keeps_the_manifest_and_nothing_half(tmp_path, capsys):
    with disk(tmp_path / "full", "size=12k") as full:  # room for the manifest and no table
        assert main(["import", str(AIPERF), "--out", str(full)]) == 1
        line, _ = said(capsys)
        assert "cannot write requests.parquet" in line and "No space left on device" in line
        (manifest,) = files(full)
        told = json.loads(manifest.read_text("utf-8"))
        assert told["outcome"] == "failed" and "No space left" in told["error"]


def test_full_disk_keeps_the_table_that_was_there(tmp_path):
    with disk(tmp_path / "full", "size=64k") as full:
        run, rng = runs.create("e", {}, out=full), np.random.default_rng(1)
        rows = pd.DataFrame({"arm": "a", "bytes": range(200), "post_us": 1.0, "xfer_us": 2.0})
        with pytest.raises(RunFailed, match="No space left"), run.recording():
            for n in count(1):
                run.write("pulls", pd.concat([rows] * n).assign(xfer_us=rng.random(200 * n)))
                kept = 200 * n
        # Everything of the last good write, and the outcome.
        assert len(runs.load(run.path).table("pulls")) == kept and run.manifest["outcome"] == "failed"
        assert {p.name for p in files(full)} == {"manifest.json", "pulls.parquet"}


def test_full_disk_under_a_notebook(tmp_path, capsys):
    with disk(tmp_path / "full", "size=60k") as full:
        assert main(["run", "which-transport", "-p", f"log_path={LOG}", "--out", str(full)]) == 1
        line, told = said(capsys)
        assert "No space left on device" in line and told["outcome"] == "failed"
        folder = Path(told["run"])
        assert json.loads((folder / "manifest.json").read_text("utf-8"))["outcome"] == "failed"
        assert not [p for p in files(full) if re.fullmatch(r"\..*\.\d+\.\d+", p.name)]


def test_a_notebook_cut_short_is_a_failed_run(tmp_path, capsys):
    run = runs.create("which-transport", {}, run_dir=tmp_path / "run")
    run.update(outcome="completed")
    (run.path / "notebook.ipynb").write_text('{"cells": [')
    assert run_verb._finish(experiments.get("which-transport"), run.path, "") == 1
    line, told = said(capsys)
    assert "report.html could not be made" in line and told["outcome"] == runs.load(run.path).manifest["outcome"]


@pytest.mark.parametrize(
    "words", [["run", "which-transport", "-p", f"log_path={LOG}"], ["import", str(AIPERF)]], ids=lambda w: w[0]
)
def test_read_only_folder(tmp_path, capsys, words):
    with disk(tmp_path / "fixed", "ro") as fixed:
        assert main([*words, "--out", str(fixed)]) == 2
        line, _ = said(capsys)
        assert "Read-only file system; choose another with --out" in line


def test_read_only_recording_is_replayed(tmp_path):
    with disk(tmp_path / "fixed", "size=4m") as fixed:
        recording = shutil.copytree(experiments.recordings("post-vs-completion")[-1], fixed / "run")
        subprocess.run(["mount", "-o", "remount,ro", str(fixed)], check=True)
        chosen = params.validate("post-vs-completion", {"replay": str(recording), "run_dir": str(tmp_path / "own")})
        assert len(experiments.run_or_replay(chosen).table("pulls"))


# -- names and parameters --------------------------------------------------------------------------


def test_two_runs_at_once_in_a_place_of_odd_letters_with_secrets_all_over(tmp_path, capsys):
    """An imported log replayed twice at once: one label, odd path and label, an ASCII terminal, secrets planted."""
    here = tmp_path / "a b;$(touch pwned) é'\""
    here.mkdir()
    planted = {
        "HF_TOKEN": "hf_Planted0123456789abcdef",
        "AWS_SECRET_ACCESS_KEY": "wJalrPlanted/K7MDENG+bPxRfiCYEXAMPLEKEY",
        "VLLM_API_KEY": "planted-0123-Zx9",
        "NIXL_ETCD_PASSWORD": "planted-4567-Zx9",
    }
    log = here / "de code.log"
    log.write_text(
        "non-default args: {'api_key': ['planted-0123-Zx9']}\nUCX_SECRET=planted-4567-Zx9 UCX_TLS=tcp\n"
        "Authorization: Bearer planted-8901-Zx9\n" + LOG.read_text("utf-8") + "\nhf_Planted0123456789abcdef\n"
    )
    assert main(["import", str(log), "--arm", "<b>mine</b>", "--out", str(here / "imported")]) == 0
    imported = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    words = ["run", "which-transport", "--replay", imported, "--label", METACHARACTERS, "--out", "r é"]
    words += ["-p", "expect=$(touch pwned)"]
    env = {
        **os.environ,
        **planted,
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONPATH": str(SOURCES[0].parents[1]),
    }
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "kvlab.cli", *words], cwd=here, env=env, stdout=-1, stderr=-1, text=True
        )
        for _ in range(2)
    ]
    told = []
    for out, err in [process.communicate(timeout=200) for process in both]:
        assert out, err
        told.append(json.loads(out.splitlines()[-1]))
        assert told[-1]["outcome"] == "completed", err
    folders = {Path(t["run"]) for t in told}
    assert len(folders) == 2 and {f.parent for f in folders} == {here / "r é" / "which-transport"}
    assert all((f / "report.html").is_file() and runs.load(f).manifest["outcome"] == "completed" for f in folders)
    report = (folders.pop() / "report.html").read_text("utf-8")
    # What a file from elsewhere says is text, never a page's code.
    assert "&lt;b&gt;mine&lt;/b&gt;" in report and "<b>mine" not in report
    written = {p: p.read_bytes() for p in files(here) if p != log}
    assert [p for p in written if p.name.startswith("pwned")] == []
    secret = [s.encode() for s in (*planted.values(), "planted-")]
    assert [(p.name, s) for p, data in written.items() for s in secret if s in data] == []


def test_secrets_in_engine_words_logs_and_errors(tmp_path):
    given = {
        "engine_words": ["--api-key", "planted-0123-Zx9", "--port", "8000"],
        "engine_env": {"MY_TOKEN": "pl.nted44"},
    }
    run = runs.create("e", given, run_dir=tmp_path / "run")
    (run.logs / "decode-0").mkdir()
    log = run.logs / "decode-0" / "x.log"
    with pytest.raises(RunFailed), run.recording():
        log.write_bytes(b"\xff args: {'api_key': ['planted-0123-Zx9']} port 8000\nenv pl.nted44\n")
        raise RunFailed("decode-0 refused planted-0123-Zx9")
    assert log.read_bytes() == b"\xff args: {'api_key': ['REDACTED']} port 8000\nenv REDACTED\n"
    manifest = (run.path / "manifest.json").read_text("utf-8")
    assert "Zx9" not in manifest and "pl.nted44" not in manifest and "refused REDACTED" in manifest
    # What may stand anywhere is no secret that is looked for: short words, one plain word, numbers, another flag.
    words = ["--api-key", "short", "--auth", "kerberos", "--token", "12345678", "--key", "--enforce-eager"]
    assert redact.secrets([words, {"AUTH_HOST": "127.0.0.1", "PATH": "/usr/bin/env"}]) == set()


@pytest.mark.parametrize("name", sorted(experiments.EXPERIMENTS))
def test_yaml_tags_make_nothing(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for key in experiments.get(name).model().model_fields:
        for text in ("!!python/object/apply:os.mkdir [pwned]", "[!!python/object/apply:os.mkdir [pwned]]"):
            code = main(["run", name, "--dry-run", "-p", f"{key}={text}"])
            out, err = capsys.readouterr()
            assert code in (0, 2) and "Traceback" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_labels_of_arms_name_files_inside_the_run(tmp_path, capsys):
    for label in ("../../../x", "/etc/x", "..", METACHARACTERS, "→"):
        assert main(["import", str(LOG), "--arm", label, "--out", str(tmp_path / "out")]) == 0
        case = Case("c", ((1, 8),))
        pair = Pair(Arm(label=label), Options("DRAM", 0, 0, 0, False), [case], tmp_path / "logs")
        assert {p.parent for p in pair.logs.values()} == {tmp_path / "logs"}
    capsys.readouterr()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    with pytest.raises(BadInput, match="must differ in letters or digits"):
        params.validate("post-vs-completion", {"arms": [{"label": "UCX tcp"}, {"label": "UCX/tcp"}]})


def test_commands_are_words_and_stay_on_loopback():
    """Nothing reaches a shell unquoted, no server listens on more than this machine unless told to."""
    odd = METACHARACTERS.replace("\n", " ")
    roles = [("prefill", "decode"), ("replica", "replica")]
    for some in roles:
        specs = [Engine(role=r, model="org/net", env={"UCX_X": odd}, extra=["--x", odd]) for r in some]
        ports = iter(range(9000, 9100))
        todo = launch.commands(specs, folder=Path("/logs"), version="0.30.0", ports=ports, cores=[0], router=Router())
        assert len(todo) == 3
        for command in todo:
            assert command.argv[command.argv.index("--host") + 1] == "127.0.0.1"
            assert command.url.startswith("http://127.0.0.1:")
            assert "0.0.0.0" not in (*command.argv, *command.env.values())
            assert command.env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1") == "127.0.0.1"
        assert odd in shlex.split(launch.shell(todo))
    assert local.LOCAL.address == "127.0.0.1"


def test_lab_stays_on_loopback(monkeypatch, tmp_path):
    words = []
    monkeypatch.setattr(os, "execv", lambda program, argv: words.extend(argv))
    with pytest.raises(TypeError):  # it does not come back from there
        main(["lab"])
    assert "jupyterlab" in words and not [w for w in words if w.startswith(("--ip", "--ServerApp.ip", "--allow"))]


_BANNED = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load", "pickle.loads"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parent)))
def test_no_shell_no_tags_no_wall_clock_no_charset_of_the_machine(path):
    source = path.read_text("utf-8")
    calls = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call)]
    for call in calls:
        name, keywords = ast.unparse(call.func), {k.arg for k in call.keywords}
        assert name not in _BANNED | {"eval", "exec"} and "shell" not in keywords, ast.unparse(call)
        least = {"read_text": 1, "write_text": 2}.get(name.rpartition(".")[2], 0)
        if name == "open" and not any(re.search("'[rwax+]*b", ast.unparse(a)) for a in call.args[1:]):
            least = 4
        assert len(call.args) >= least or "encoding" in keywords, ast.unparse(call)
    # The wall clock may be set in mid-run: it is asked for dates, and for how far it was set, only.
    assert source.count("time.time()") == 2 * (path.name == "runs.py")
