"""Runs on a Ray cluster: what is pure, then a cluster of two network namespaces with a link between them."""

import json
import os
import subprocess
import sys
import time

import pandas as pd
import pytest
from placement.ray_cluster import two_nodes

from kvlab import runs
from kvlab.capture.ucx import agrees
from kvlab.cli import main
from kvlab.errors import RunFailed
from kvlab.placement import ray

LIMIT_S = 400
TCP = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
ARMS = json.dumps([{"label": "TCP", "env": TCP, "expect": "tcp"}])
WORDS = ["post-vs-completion", "--measure-only", "-p", f"arms={ARMS}", "-p", "tp=8", "-p", "prompt_tokens=1024"]
WORDS += ["-p", "warmup=1"]


def test_a_mismatch_shows_both_versions_and_both_nodes():
    same = {"nixl": "1.4.1", "ucx": "1.22.0", "vllm": "0.30.0"}
    assert ray.mismatch({"node 0": same, "node 1": dict(same)}) == ""
    other = {**same, "nixl": "1.3.0"}
    del other["ucx"]
    assert ray.mismatch({"node 0": same, "node 1": other}) == (
        "nixl is 1.4.1 on node 0 and 1.3.0 on node 1; ucx is 1.22.0 on node 0 and not installed on node 1"
    )


def test_packages_that_no_transport_depends_on_may_differ():
    assert ray.mismatch({"node 0": {"torch": "2.12"}, "node 1": {"torch": "2.13"}}) == ""


def test_the_environment_is_the_one_that_ray_was_started_with(monkeypatch):
    started = {"PATH": os.environ["PATH"], "UCX_NET_DEVICES": "mlx5_0:1", "RAY_x": "1"}
    started["LD_PRELOAD"] = "/mine.so:/site-packages/ray/core/libjemalloc.so"
    # A loader that cannot preload a library says so and goes on.
    code = "import time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], env=started, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as raylet:
        raylet.stdout.readline()
        for name in list(os.environ):
            monkeypatch.delenv(name)
        monkeypatch.setenv("PATH", started["PATH"])
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        own, undone = ray.own_environment(raylet.pid)
        raylet.kill()
    assert own == {"PATH": started["PATH"], "UCX_NET_DEVICES": "mlx5_0:1", "LD_PRELOAD": "/mine.so"}
    assert undone["OMP_NUM_THREADS"] == ["1", None] and undone["UCX_NET_DEVICES"] == [None, "mlx5_0:1"]
    assert "PATH" not in undone


def test_pulls_already_fetched_outlive_their_node(tmp_path):
    class Node:
        root, clocks = tmp_path, iter([(10.0, 5.0, 0.1)])

        def call(self, method, *_):
            return pd.DataFrame({"start_s": [11.0], "start_uncertainty_s": [0.0]}), []

        def clock(self):
            for reading in self.clocks:
                return reading
            raise RunFailed("node 1 was lost in mid-run")

    with ray.Follower(Node(), tmp_path / "ring", 1.0) as follower:
        assert follower.take().to_numpy().tolist() == [[15.0, 0.1]] and follower.losses() == []


def test_a_process_that_does_not_end_keeps_neither_folder_nor_lifeline(tmp_path):
    class Stuck:
        pid = 0

        def poll(self):
            return 0

        def wait(self, timeout):
            raise subprocess.TimeoutExpired("engine", timeout)

    keeper = ray.Keeper.__new__(ray.Keeper)
    keeper.folder = tmp_path / "kept"
    keeper.folder.mkdir()
    theirs, keeper._ours = os.pipe()
    keeper._processes = {0: Stuck()}
    with pytest.raises(subprocess.TimeoutExpired):
        keeper.end()
    assert not keeper.folder.exists() and os.read(theirs, 1) == b""
    os.close(theirs)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "post-vs-completion", "--address", "a:1"], "--address goes with --on ray"),
        (["run", "tcp-tuning", "--on", "ray"], "tcp-tuning runs on one machine"),
        (["sweep", "tcp-tuning", "--grid", "seed=1", "--on", "ray", "--place", "spread"], "sweep it with --place pack"),
        (["run", "post-vs-completion", "--on", "ray", "-p", "ray={nodes: 1}"], "ray.nodes"),
        (["run", "post-vs-completion", "--on", "ray", "-p", "ray={cpu: 1}"], "unknown parameter 'ray.cpu'"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(words, says, tmp_path, capsys):
    pytest.importorskip("nixl")
    assert main([*words, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip()
    assert says in error and "\n" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def made():
    pytest.importorskip("ray")
    pytest.importorskip("nixl")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    with two_nodes() as made:
        yield made


@pytest.fixture
def cluster(made):
    """Both nodes, whatever the last test did; nothing of kvlab may be left on either."""
    made.join()
    yield made
    made.stop()  # what a failed test left
    deadline = time.monotonic() + 20  # Ray ends an actor's process a moment later
    while made.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert made.processes() == {}


def document(process):
    text, error = process.communicate(timeout=LIMIT_S)
    lines = text.splitlines()
    return process.returncode, json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}, error


def wait_for(folder, pattern, process):
    deadline = time.monotonic() + LIMIT_S
    while not list(folder.rglob(pattern)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)


def run_of(folder):
    """Return the one run below a folder."""
    (manifest,) = folder.rglob("manifest.json")
    return runs.load(manifest.parent)


@pytest.mark.live
def test_two_pairs_pull_across_the_link(cluster, tmp_path):
    words = ["-p", "pairs=2", "-p", "repetitions=2", "--on", "ray", "--address", cluster.address]
    code, told, error = document(cluster.kvlab("run", *WORDS, *words, "--out", str(tmp_path)))
    assert code == 0, error
    run = tmp_path / "post-vs-completion" / os.path.basename(told["run"])
    pulls = pd.read_parquet(run / "pulls.parquet")
    assert pulls.groupby("pair").size().tolist() == [3, 3] and pulls[pulls["repetition"] == -1]["verified"].all()
    verdicts = pd.read_parquet(run / "verdicts.parquet")
    assert len(verdicts) == 2 and verdicts["devices"].eq("kv0").all()
    assert all(agrees(t, "tcp") for t in verdicts["transport"])
    # The interface of the initiators' node counted the payload and TCP's headers, about 5 in 100 at most.
    counted = pd.read_parquet(run / "counters.parquet")
    counted = counted[counted["device"].str.endswith("kv0") & (counted["counter"] == "rx_bytes")]["delta_bytes"]
    assert 1.0 <= counted.max() / pulls["bytes"].sum() <= 1.1
    manifest = json.loads((run / "manifest.json").read_text())
    nodes = manifest["ray"]["nodes"]
    assert manifest["ray"]["strategy"] == "STRICT_SPREAD" and len(nodes) == 2
    assert all(n["undone"]["nice"] == [15, 0] and n["gathered"]["files"] == 2 and not n["not_undone"] for n in nodes)
    assert "10.77.0" not in json.dumps(nodes)


@pytest.mark.slow
@pytest.mark.live
def test_differing_versions_are_refused_before_the_start(cluster, tmp_path):
    fake = cluster.packages / "ai_dynamo-9.9.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: ai-dynamo\nVersion: 9.9\n")
    try:
        words = ["run", *WORDS, "--on", "ray", "--address", cluster.address, "--out", str(tmp_path)]
        code, _, error = document(cluster.kvlab(*words))
    finally:
        (fake / "METADATA").unlink()
        fake.rmdir()
    last = error.strip().splitlines()[-1]
    assert code == 2 and "the nodes do not run the same software: ai-dynamo is" in last
    assert "9.9 on node" in last and "not installed on" in last


@pytest.mark.slow
@pytest.mark.live
def test_a_sweep_runs_a_cell_on_each_node(cluster, tmp_path):
    words = ["sweep", *WORDS, "-p", "repetitions=1", "--grid", "in_flight=1,2", "--on", "ray", "--place", "pack"]
    code, told, error = document(cluster.kvlab(*words, "--address", cluster.address, "--out", str(tmp_path)))
    assert code == 0, error
    assert (told["cells"], told["failed"]) == (2, 0)
    (state,) = [json.loads(p.read_text()) for p in tmp_path.rglob("sweep.json")]
    for cell, in_flight in zip(state["cells"], (1, 2), strict=True):
        pulls = pd.read_parquet(os.path.join(cell["run"], "pulls.parquet"))
        assert pulls["in_flight"].eq(in_flight).all() and cell["run"].startswith(str(tmp_path))


@pytest.mark.slow
@pytest.mark.live
def test_without_room_the_cluster_says_what_it_has(cluster, tmp_path):
    words = ["--on", "ray", "--address", cluster.address, "-p", "ray={wait_s: 1, resources: {none_has_it: 1}}"]
    code, _, error = document(cluster.kvlab("run", *WORDS, *words, "--out", str(tmp_path)))
    assert code == 2 and "has no room for {'CPU': 1" in error.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.live
def test_a_lost_node_ends_a_run_of_pulls(cluster, tmp_path):
    words = ["-p", "repetitions=100000", "-p", "limits=false", "--on", "ray", "--address", cluster.address]
    process = cluster.kvlab("run", *WORDS, *words, "--out", str(tmp_path))
    wait_for(tmp_path, "pulls.parquet", process)
    ours = [pid for pid, words in cluster.processes().items() if "pull_agent" in words]
    # Ray's niceness and variables are undone, the arm's are there.
    assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in ours] == [0, 0]
    for pid in ours:
        with open(f"/proc/{pid}/environ") as file:
            env = dict(e.split("=", 1) for e in file.read().split("\0") if "=" in e)
        assert TCP.items() <= env.items() and not {"OMP_NUM_THREADS", "RAY_JOB_ID"} & set(env)
    cluster.lose(1)
    code, told, _ = document(process)
    assert code == 1 and told["outcome"] == "failed"
    assert "was lost in mid-run" in told["error"] and "\n" not in told["error"]
    assert len(run_of(tmp_path).table("pulls")) > 0


@pytest.mark.slow
@pytest.mark.live
def test_a_lost_head_ends_a_run_of_pulls(tmp_path):
    """Ray ends the process of a driver whose head is gone; by then the run has ended itself."""
    with two_nodes() as own:
        words = ["-p", "repetitions=100000", "-p", "limits=false", "--on", "ray", "--address", own.address]
        process = own.kvlab("run", *WORDS, *words, "--out", str(tmp_path))
        wait_for(tmp_path, "pulls.parquet", process)
        own.lose(0)
        deadline = time.monotonic() + 90
        while (run := run_of(tmp_path)).manifest["outcome"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert run.manifest["outcome"] == "failed" and "the head of Ray was lost" in run.manifest["error"]
        assert len(run.table("pulls")) > 0
        process.communicate(timeout=120)
        assert process.returncode
        while own.processes():
            assert time.monotonic() < deadline + 60
            time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.live
def test_a_sweep_across_nodes_outlives_the_loss_of_one(cluster, tmp_path):
    """The first cell is whole, the second loses a node, and for the third there is no room any more."""
    words = ["sweep", *WORDS, "-p", "limits=false", "--grid", "repetitions=2,100000,3", "-p", "ray={wait_s: 3}"]
    words += ["--on", "ray", "--place", "spread", "--address", cluster.address, "--out", str(tmp_path)]
    process = cluster.kvlab(*words)
    wait_for(tmp_path, "*100000/pulls.parquet", process)
    cluster.lose(1)
    code, told, _ = document(process)
    assert (code, told["cells"], told["failed"]) == (1, 3, 2)
    table = pd.read_csv(next(tmp_path.rglob("cells.csv")))
    assert table["outcome"].tolist() == ["completed", "failed", "failed"]
    assert "was lost in mid-run" in table["note"][1] and "has no room" in table["note"][2]
    assert len(runs.load(next(tmp_path.rglob("*100000"))).table("pulls")) > 0


@pytest.mark.slow
@pytest.mark.live
def test_a_sweep_goes_on_when_the_node_of_a_cell_is_lost(cluster, tmp_path):
    words = ["sweep", *WORDS, "-p", "limits=false", "-p", "repetitions=150", "--grid", "in_flight=1,2,3"]
    words += ["--on", "ray", "--place", "pack", "--address", cluster.address, "--out", str(tmp_path)]
    process = cluster.kvlab(*words)
    deadline = time.monotonic() + LIMIT_S
    while sum("pull_agent" in words for words in cluster.processes().values()) < 4:  # a pair on each node
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    cluster.lose(1)
    code, told, _ = document(process)
    assert (code, told["cells"], told["failed"]) == (1, 3, 1)
    table = pd.read_csv(next(tmp_path.rglob("cells.csv")))
    assert sorted(table["outcome"]) == ["completed", "completed", "failed"]
    assert table["note"].str.contains("was lost in mid-run").sum() == 1


ENGINES = ["run", "relative-to-nvlink", "--measure-only", "-p", "stand_in={layers: 2}", "-p", "max_model_len=1024"]
ENGINES += ["-p", f"arms={ARMS}", "-p", "prompt_tokens=256", "-p", "output_tokens=4", "-p", "answer_prompts=1"]
ENGINES += ["-p", "serial_requests=2", "-p", "concurrent_requests=2", "-p", "concurrency=2", "-p", "starts=1"]


def check_engines(run, hand_over):
    """Every request was pulled once, and each pull is joined to its phase, and to its request where that is alone."""
    requests, pulls = run.table("requests"), run.table("pulls")
    assert requests["error"].isna().all() and requests["prefill_ms"].isna().all() == (hand_over == "router")
    phases = run.table("phases")
    assert (phases["pulls"] == phases["requests"]).all() and (phases["vllm_transfers"] == phases["requests"]).all()
    alone = pulls[pulls["concurrency"] == 1]
    asked = requests[requests["concurrency"] == 1]
    assert sorted(alone["request"].dropna()) == sorted(set(asked["request"]))
    assert agrees(run.table("verdicts")["transport"].item(), "tcp")
    roles = {n["role"]: n["node"] for n in run.manifest["ray"]["nodes"]}
    assert roles == {"prefill": 0, "decode": 1, "load": 0} | ({"router": 0} if hand_over == "router" else {})
    logs = {path.name for path in run.logs.rglob("*.log")}
    assert logs == {"prefill-0.log", "decode-0.log", "bench.log"} | ({"router.log"} if hand_over == "router" else set())


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize(("place", "hand_over"), [("pack", "client"), ("pack", "router"), ("spread", "client")])
def test_engines_on_one_node_and_on_two(cluster, tmp_path, place, hand_over):
    pytest.importorskip("vllm")
    words = ["--on", "ray", "--place", place, "--address", cluster.address, "--out", str(tmp_path)]
    code, _, error = document(cluster.kvlab(*ENGINES, "-p", "repetitions=1", "-p", f"hand_over={hand_over}", *words))
    assert code == 0, error
    check_engines(run_of(tmp_path), hand_over)


@pytest.mark.live
def test_engines_behind_the_router_until_a_node_is_lost(cluster, tmp_path):
    pytest.importorskip("vllm")
    words = ["--on", "ray", "--address", cluster.address, "--out", str(tmp_path)]
    process = cluster.kvlab(*ENGINES, "-p", "repetitions=100000", "-p", "hand_over=router", *words)
    wait_for(tmp_path, "requests.parquet", process)
    cluster.lose(1)
    code, told, _ = document(process)
    assert code == 1 and told["outcome"] == "failed" and "\n" not in told["error"]
    assert "was lost in mid-run" in told["error"]
    run = run_of(tmp_path)
    # What a node saw is brought after each phase; of the lost node's log what had been said stays there.
    pulls = run.table("pulls")
    assert pulls.loc[pulls["concurrency"] == 1, "request"].notna().any()
    assert len(run.table("requests")) >= len(pulls[pulls["phase"].notna()]) > 0
    # Which of the two was on the lost node Ray chose.
    lost = {n["role"] for n in run.manifest["ray"]["nodes"] if n["lost"]}
    assert lost in ({"decode"}, {"prefill", "load", "router"})
