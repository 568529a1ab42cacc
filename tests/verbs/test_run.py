"""`kvlab run` as a person meets it: good runs, replays, and every mistake, through the real command line."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from kvlab import experiments

PVC = "post-vs-completion"
SMALL = ["-p", "prompt_tokens=256", "-p", "repetitions=3", "-p", "warmup=1", "-p", "tp=16"]


def kvlab(*words, cwd, env=None, timeout=200):
    return subprocess.run(
        [sys.executable, "-m", "kvlab.cli", *map(str, words)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(experiments.shared_dir("notebooks").parent), **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def last(done):
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.fixture
def here(tmp_path):
    folder = tmp_path / "a folder é"
    folder.mkdir()
    return folder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "no-such"], "unknown experiment 'no-such'"),
        (["run", PVC, "-p", "repetitons=3"], "did you mean 'repetitions'"),
        (["run", PVC, "-p", "repetitions=many"], "'repetitions'"),
        (["run", PVC, "-p", "repetitions"], "-p takes KEY=VALUE"),
        (["run", PVC, "-f", "nowhere.yaml"], "no parameter file 'nowhere.yaml'"),
        (["run", PVC, "--replay", "nowhere"], "no run at 'nowhere'"),
        (["run", PVC, "--out", "/proc/nowhere"], "choose another with --out"),
        (["run", PVC, "-f", "comments.yaml"], "comments.yaml is empty: write KEY: VALUE"),
        (["run", "relative-to-nvlink", "--replay", "post_vs_completion/cpu-loopback"], "a run of post-vs-completion"),
        (["run", "which-transport", "-p", "log_path=empty"], "log_path: empty is empty; give the log"),
        (["run", "which-transport", "-p", "log_path=comments.yaml"], "holds no line of UCX or NIXL"),
        (["run", "which-transport", "-p", "log_path=absent"], "absent cannot be read: No such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(here, words, says):
    (here / "empty").touch()
    (here / "comments.yaml").write_text("# nothing yet\n")
    done = kvlab(*words, cwd=here)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert not (here / "runs").exists()


def test_no_verb_and_unknown_verb_are_usage(here):
    assert kvlab(cwd=here).returncode == 2
    assert kvlab("rum", cwd=here).returncode == 2
    assert kvlab("--help", cwd=here).returncode == 0


def test_missing_extra_is_named(here, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(experiments.BadInput, match=r"pip install 'kvlab\[cpu\]'"):
        experiments.require(experiments.get(PVC))


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """One replay for two tests, with a label and a secret in an arm: what ran, where, and the recording before it."""
    here = tmp_path_factory.mktemp("replayed") / "a folder é"
    here.mkdir()
    recording = experiments.recordings(PVC)[-1]
    before = {p: p.stat().st_mtime_ns for p in (recording, *recording.rglob("*"))}
    arms = "[{label: shared memory, env: {HF_TOKEN: planted-Zx9, UCX_TLS: sm}}, {label: TCP, env: {UCX_TLS: tcp}}]"
    words = ["--replay", f"post_vs_completion/{recording.name}", "--label", "x", "-p", f"arms={arms}"]
    done = kvlab("run", PVC, *words, cwd=here)
    return done, here, before


def test_replay_renders_everything_and_leaves_the_recording_alone(replayed):
    done, here, before = replayed
    assert done.returncode == 0, done.stderr
    doc = last(done)
    folder = here / "runs" / PVC
    assert doc["experiment"] == PVC and doc["outcome"] == "completed" and doc["verdict"].startswith("On this machine")
    assert os.path.isabs(doc["run"]) and os.path.samefile(os.path.dirname(doc["run"]), folder)
    made = {p.name for p in (folder / os.path.basename(doc["run"])).rglob("*")}
    assert {"notebook.ipynb", "report.html", "summary.json", "manifest.json", "split.svg", "split.png"} <= made
    assert before and before == {p: p.stat().st_mtime_ns for p in before}
    assert "http" not in Path(doc["report"]).read_text().split("<body>")[0]


def test_a_secret_in_an_arm_stays_out_of_the_run_folder(replayed):
    assert replayed[0].returncode == 0, replayed[0].stderr
    folder = Path(last(replayed[0])["run"])
    assert [p.name for p in folder.rglob("*") if p.is_file() and b"planted-Zx9" in p.read_bytes()] == []
    assert "HF_TOKEN" in (folder / "notebook.ipynb").read_text()
    command = json.loads((folder / "manifest.json").read_text())["command"]
    assert "HF_TOKEN: REDACTED" in command and "UCX_TLS: tcp" in command


WHOLE = {
    "good": SMALL,
    "contradicted": [*SMALL, "-p", "arms=[{label: RoCE, env: {UCX_TLS: tcp}, expect: rc_mlx5}]"],
    "sm,self": [*SMALL, "-p", "arms=[{label: a, env: {UCX_TLS: 'sm,self'}}]"],
    "large": ["-p", "prompt_tokens=10000000000", "--measure-only"],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Whole runs started at once: most of their time is one core's, and nothing here counts the loopback's bytes."""
    folders = [tmp_path_factory.mktemp("a folder é ") for _ in WHOLE]
    with ThreadPoolExecutor(len(WHOLE)) as pool:
        done = pool.map(lambda words, folder: kvlab("run", PVC, *words, cwd=folder), WHOLE.values(), folders)
        return dict(zip(WHOLE, done, strict=True))


@pytest.mark.live
def test_live_run_over_shared_memory_and_tcp(whole):
    done = whole["good"]
    assert done.returncode == 0, done.stderr
    from kvlab import runs

    run = runs.load(last(done)["run"])
    pulls, verdicts = run.table("pulls"), run.table("verdicts").set_index("arm")
    assert (pulls.groupby("arm").size() == 4).all()
    assert pulls.loc[pulls["repetition"] == -1, "verified"].all()
    assert (pulls["xfer_us"] >= pulls["post_us"]).all() and (pulls["descriptors"] == pulls["descriptors"].iloc[0]).all()
    assert verdicts.loc["shared memory", "transport"] == "cma" and not verdicts.loc["shared memory", "emulated"]
    assert verdicts.loc["TCP", "transport"] == "tcp" and verdicts.loc["TCP", "emulated"]
    assert run.manifest["outcome"] == "completed"


@pytest.mark.live
def test_a_label_that_the_evidence_contradicts_ends_with_4(whole):
    done = whole["contradicted"]
    assert done.returncode == 4, done.stderr
    assert last(done)["outcome"] == "contradicted"
    assert "claims rc_mlx5" in done.stderr
    assert "CONTRADICTED" in Path(last(done)["report"]).read_text()


def bad_input(done):
    assert done.returncode == 2, done.stderr
    assert "UCX says" in done.stderr and "Traceback" not in done.stderr
    assert last(done)["outcome"] == "failed"


@pytest.mark.live
def test_a_ucx_tls_without_transport_is_bad_input(whole):
    bad_input(whole["sm,self"])


@pytest.mark.slow
@pytest.mark.live
def test_a_ucx_tls_that_does_not_exist_is_bad_input(here):
    bad_input(kvlab("run", PVC, *SMALL, "-p", "arms=[{label: a, env: {UCX_TLS: nonsense}}]", cwd=here))


@pytest.mark.live
def test_a_pool_larger_than_memory_is_bad_input(whole):
    done = whole["large"]
    assert done.returncode == 2
    assert "GB of memory are free" in done.stderr and "Traceback" not in done.stderr


def _ours(folder):
    mine = []
    for p in psutil.process_iter(["cmdline", "environ"]):
        try:
            if str(folder) in " ".join(p.info["cmdline"] or []) or (p.info["environ"] or {}).get("KVLAB_TEST") == str(
                folder
            ):
                mine.append(p)
        except psutil.Error:
            pass
    return mine


def _wait(condition, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError("did not happen in time")


#: light on the machine while it waits for what a test does to it, and long enough for all of them
LONG = ["-p", "prompt_tokens=1024", "-p", "repetitions=100_000", "-p", "limits=false", "-p", "poll_interval_ms=20"]


#: one pair starts sooner than two; both where what is left of either is looked for
ALONE = ["-p", "arms=[{label: TCP, env: {UCX_TLS: tcp}, expect: tcp}]"]
PAIRS = {"test_interrupted_in_mid_run": ALONE, "test_dead_kernel_is_a_failed_run": ALONE}


def _start(here, words):
    return subprocess.Popen(
        [sys.executable, "-m", "kvlab.cli", "run", PVC, *LONG, *words],
        cwd=here,
        env={**os.environ, "KVLAB_TEST": str(here), "PYTHONPATH": str(experiments.shared_dir("notebooks").parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def pulling(request, tmp_path_factory):
    """Gives a run that pulls, and its folder: one for every test that asks, all started at the first one's."""
    users = [item for item in request.session.items if item.path == request.path and "pulling" in item.fixturenames]
    folders = [tmp_path_factory.mktemp("a folder é ") for _ in users]
    words = [PAIRS.get(user.originalname, []) for user in users]
    waiting = [(_start(folder, own), folder) for folder, own in zip(folders, words, strict=True)]
    started = [process for process, _ in waiting]

    def next_one():
        process, folder = waiting.pop(0)
        _wait(lambda: _pulling(folder) or process.poll() is not None, 120)
        assert process.poll() is None, process.communicate()
        return process, folder

    yield next_one
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def _agents(here):
    return [p for p in _ours(here) if any("kvlab.pull_agent" in x for x in p.cmdline())]


def _pulling(here):
    return list(here.glob("runs/*/*/pulls.parquet")) and _agents(here)


def _outcome(here):
    return json.loads(next(here.glob("runs/*/*/manifest.json")).read_text())["outcome"]


@pytest.mark.live
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_in_mid_run(pulling, signum):
    process, here = pulling()
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert json.loads(out.strip().splitlines()[-1])["outcome"] == "interrupted"
    assert _outcome(here) == "interrupted"
    assert "Traceback" not in err
    _wait(lambda: not _ours(here))


@pytest.mark.live
def test_killed_kvlab_leaves_no_process(pulling):
    process, here = pulling()
    process.kill()
    process.communicate(timeout=60)
    _wait(lambda: not _ours(here))


@pytest.mark.live
def test_killed_target_is_a_failed_run(pulling):
    process, here = pulling()
    _agents(here)[0].kill()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert "was killed by signal 9" in err and "Traceback" not in err
    assert json.loads(out.strip().splitlines()[-1])["outcome"] == _outcome(here) == "failed"
    _wait(lambda: not _ours(here))


@pytest.mark.live
def test_dead_kernel_is_a_failed_run(pulling):
    process, here = pulling()
    kernel = next(p for p in psutil.Process(process.pid).children() if "ipykernel" in " ".join(p.cmdline()))
    kernel.kill()
    out, err = process.communicate(timeout=90)
    assert process.returncode == 1, err
    assert "kernel died" in err and "Traceback" not in err
    assert json.loads(out.strip().splitlines()[-1])["outcome"] == _outcome(here) == "failed"
    _wait(lambda: not _ours(here))
