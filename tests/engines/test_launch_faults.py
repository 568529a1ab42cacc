# ruff: noqa: SIM117
"""Faults of engines and of kvlab itself: one clear line, and nothing left running."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvlab import runs
from kvlab.engines import attach, launch
from kvlab.engines.attach import Endpoint
from kvlab.engines.vllm import Command
from kvlab.errors import BadInput, RunFailed

FAKE = str(Path(__file__).with_name("fake_engine.py"))


def fake(folder: Path, name="decode-0", role="decode", port=0, words=()) -> Command:
    port = port or next(launch.free_ports())
    argv = (sys.executable, FAKE, "--port", str(port), "--workers", str(folder / f"{name}.json"), *words)
    return Command(name, role, argv, {}, f"http://127.0.0.1:{port}", folder / f"{name}.log", "fake")


def left(folder: Path) -> list[str]:
    """What the fake engines of ``folder`` started and is still there, after a moment's patience."""
    marks = [json.loads(p.read_text()) for p in folder.glob("*.json") if p.name != "manifest.json"]

    def there() -> list[str]:
        pids = [p for m in marks for p in m["pids"] if psutil.pid_exists(p)]
        alive = [str(p) for p in pids if psutil.Process(p).status() != psutil.STATUS_ZOMBIE]
        return alive + [m["shm"] for m in marks if Path("/dev/shm", m["shm"]).exists()]

    deadline = time.monotonic() + 15
    while there() and time.monotonic() < deadline:
        time.sleep(0.05)
    return there()


def up(folder: Path, *commands: Command, **more):
    return launch.up([], folder=folder, planned=commands, **more)


def test_nothing_is_left_behind(tmp_path):
    before = threading.active_count()
    commands = [fake(tmp_path), fake(tmp_path, "prefill-0", "prefill"), fake(tmp_path, "router", "router")]
    with up(tmp_path, *commands) as cluster:
        assert cluster.url == commands[2].url
        assert [e.name for e in cluster.prefill] == ["prefill-0"] and [e.name for e in cluster.decode] == ["decode-0"]
        assert cluster.complete({"prompt": "x"})["choices"][0]["text"] == "x"
        marks = json.loads((tmp_path / "decode-0.json").read_text())
        assert set(marks["pids"]) <= set(cluster.decode[0].pids())  # the worker that got away is known too
        assert Path("/dev/shm", marks["shm"]).exists()
    assert left(tmp_path) == []
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nope"], r"decode-0 ended with code 2: unrecognized arguments: --nope \(log: "),
        (["--model", "/no/such"], r"decode-0 ended with code 1: OSError: no model at /no/such"),
        (["--dies-at", "1"], r"decode-0 ended with code 3: MemoryError: out of blocks"),
    ],
)
def test_death_at_start_quotes_the_engine_and_ends_the_others(tmp_path, words, said):
    other = fake(tmp_path, "prefill-0", "prefill")
    with pytest.raises(RunFailed, match=said), up(tmp_path, other, fake(tmp_path, words=words)):
        pytest.fail("it is not up")
    assert left(tmp_path) == []


def test_port_taken(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = fake(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(RunFailed, match="Address already in use"), up(tmp_path, command):
            pytest.fail("it is not up")
    assert left(tmp_path) == []


def test_no_such_program(tmp_path):
    command = Command("decode-0", "decode", ("/no/such/python",), {}, "http://127.0.0.1:9", tmp_path / "log")
    with pytest.raises(RunFailed, match="cannot start /no/such/python"), up(tmp_path, command):
        pytest.fail("it is not up")


def test_never_healthy(tmp_path):
    with pytest.raises(RunFailed, match="not ready after 2 s: decode-0"):
        with up(tmp_path, fake(tmp_path, words=["--sick"]), limit_s=2):
            pytest.fail("it is not up")
    assert left(tmp_path) == []


def test_logs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    command = Command("decode-0", "decode", (sys.executable,), {}, "http://127.0.0.1:9", tmp_path / "file" / "log")
    with pytest.raises(RunFailed, match="cannot start decode-0: File exists"), up(tmp_path, command):
        pytest.fail("it is not up")


def test_disk_full(tmp_path):
    port = next(launch.free_ports())
    argv = (sys.executable, FAKE, "--port", str(port))
    command = Command("decode-0", "decode", argv, {}, f"http://127.0.0.1:{port}", Path("/dev/full"))
    with pytest.raises(RunFailed, match=r"decode-0 ended with code \d+ \(log: /dev/full\)"), up(tmp_path, command):
        pytest.fail("it is not up")


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0", "router"])
def test_killed_in_mid_load_breaks_the_block_off(tmp_path, victim):
    commands = [fake(tmp_path, name, name.split("-")[0]) for name in ("prefill-0", "decode-0", "router")]
    with pytest.raises(RunFailed, match=f"^{victim} was killed by SIGKILL"), up(tmp_path, *commands):
        os.kill(json.loads((tmp_path / f"{victim}.json").read_text())["pids"][0], signal.SIGKILL)
        time.sleep(60)
        pytest.fail("the block went on")
    assert left(tmp_path) == []


def test_death_breaks_off_where_sigint_is_ignored(tmp_path):
    # As in a job that a script put into the background.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(RunFailed, match=r"^decode-0 was killed by SIGKILL"), up(tmp_path, fake(tmp_path)):
            os.kill(json.loads((tmp_path / "decode-0.json").read_text())["pids"][0], signal.SIGKILL)
            time.sleep(60)
            pytest.fail("the block went on")
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(launch.BREAK) == signal.SIG_DFL
    assert left(tmp_path) == []


def test_death_behind_a_failed_request_is_named(tmp_path):
    # the probe is the first request
    with pytest.raises(RunFailed, match="decode-0 ended with code 3: MemoryError: out of blocks"):
        with up(tmp_path, fake(tmp_path, words=["--dies-at", "2"])) as cluster:
            cluster.complete({"prompt": "x"})
    assert left(tmp_path) == []


def test_death_is_seen_outside_the_main_thread(tmp_path):
    said = []

    def work() -> None:
        try:
            with up(tmp_path, fake(tmp_path)) as cluster:
                os.kill(json.loads((tmp_path / "decode-0.json").read_text())["pids"][0], signal.SIGKILL)
                while not cluster.died:
                    time.sleep(0.02)
        except RunFailed as error:
            said.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert "decode-0 was killed by SIGKILL" in said[0]


def test_the_blocks_own_error_stays(tmp_path):
    with pytest.raises(ZeroDivisionError), up(tmp_path, fake(tmp_path)):
        print(1 / 0)
    assert left(tmp_path) == []


SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from kvlab import runs
from test_launch_faults import fake, up
folder = Path({folder!r})
run = runs.create("x", {{}}, run_dir=folder / "run")
with run.recording():
    with up(folder, fake(folder), fake(folder, "prefill-0", "prefill")):
        print("up", flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_kvlab_itself_is_ended(tmp_path, number):
    text = SCRIPT.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.send_signal(number)
        process.wait(30)
    assert left(tmp_path) == []
    outcome = runs.load(tmp_path / "run").manifest["outcome"]
    assert outcome == ("running" if number == signal.SIGKILL else "interrupted")


def test_attached_engines_are_left_alone(tmp_path):
    command = fake(tmp_path)
    with up(tmp_path, command) as cluster:
        with attach.to([Endpoint(role="decode", url=command.url, log=str(command.log))]) as other:
            assert (other.url, other.model, other.engines[0].log) == (command.url, "fake", command.log)
            assert other.complete({"prompt": "x"})["choices"][0]["text"] == "x"
            assert other.all[0].fate() is None and other.all[0].pids() == []
        cluster.check()
    with pytest.raises(BadInput, match="no vLLM engine answers"), attach.to([Endpoint(role="decode", url=command.url)]):
        pytest.fail("nothing is there")
    with pytest.raises(BadInput, match="is not there"):
        with attach.to([Endpoint(role="decode", url=command.url, log=str(tmp_path / "none"))]):
            pytest.fail("no log")
