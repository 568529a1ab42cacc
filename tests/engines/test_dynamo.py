"""Dynamo's command lines, by expected words and by its own parsers; frontend and workers with its mocker, live."""

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import psutil
import pytest
from test_commands import flag, pair, plan
from test_launch_faults import fake, left, up

from kvlab.engines import dynamo, launch
from kvlab.engines.dynamo import Dynamo
from kvlab.engines.model import StandIn
from kvlab.engines.vllm import Command, Engine
from kvlab.errors import BadInput, RunFailed
from kvlab.measures.engines import dry_run
from kvlab.params import RelativeToNvlink

PLANES = {"--discovery-backend": "file", "--request-plane": "tcp", "--event-plane": "zmq"}
FULL = {
    "served_name": "chat",
    "dtype": "bfloat16",
    "tp": 4,
    "block_size": 128,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "max_num_seqs": 8,
    "limit_mm_per_prompt": {"image": 0},
    "kv_cache_bytes": 1 << 30,
    "gpu_memory_utilization": 0.4,
    "kv_connector_extra_config": {"num_threads": 8},
    "extra": ["--load-format", "dummy"],
}


@pytest.fixture
def second() -> str:
    """The Python of the second environment."""
    python = dynamo.interpreter()
    try:
        dynamo.versions([Command("", "", (python, "-m", "dynamo.frontend"), {}, "", Path())])
    except BadInput as error:
        pytest.skip(str(error))
    return python


def test_workers_and_frontend():
    engines = [Engine(role=r, model="google/gemma", tp=4, gpu_set=g, env={"UCX_TLS": "rc_x"}) for r, g in GPUS.items()]
    prefill, decode, frontend = plan(*engines, router=Dynamo(python="py", extra=["--migration-limit", "1"]))
    for worker in (prefill, decode):
        assert worker.argv[:3] == ("py", "-m", "dynamo.vllm") and flag(worker, "--disaggregation-mode") == worker.role
        assert {k: flag(worker, k) for k in PLANES} == PLANES
        assert (flag(worker, "--model"), flag(worker, "--served-model-name")) == ("google/gemma", "gemma")
        transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
        assert json.loads(flag(worker, "--kv-transfer-config")) == transfer
        # what vLLM's own HTTP server would take
        assert not {"--host", "--port", "--disable-uvicorn-access-log"} & set(worker.argv)
        assert worker.env["CUDA_VISIBLE_DEVICES"] == GPUS[worker.role] and worker.env["UCX_TLS"] == "rc_x"
        assert worker.env["NIXL_TELEMETRY_DIR"] == f"/logs/telemetry/{worker.name}"
        assert worker.url == f"http://127.0.0.1:{worker.env['DYN_SYSTEM_PORT']}"
        assert worker.env["DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS"] == '["generate"]' and worker.probe == "health"
    assert frontend.argv[:3] == ("py", "-m", "dynamo.frontend") and frontend.role == "router"
    assert {k: flag(frontend, k) for k in PLANES} == PLANES
    assert frontend.url == f"http://{flag(frontend, '--http-host')}:{flag(frontend, '--http-port')}"
    assert (flag(frontend, "--router-mode"), flag(frontend, "--migration-limit")) == ("round-robin", "1")
    assert (frontend.model, frontend.probe) == ("gemma", "listed")
    assert {c.env["DYN_FILE_KV"] for c in (prefill, decode, frontend)} == {"/logs/dynamo"}
    ports = [c.env[k] for c in (prefill, decode) for k in ("DYN_SYSTEM_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")]
    assert sorted([*ports, flag(frontend, "--http-port")]) == [str(n) for n in range(9000, 9005)]


GPUS = {"prefill": "0,1,2,3", "decode": "4,5,6,7"}


def test_the_extra_is_the_version_that_was_tried():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["dynamo"] == [f"ai-dynamo[vllm]=={dynamo.VERSION}"]


def test_replicas_are_aggregated_workers_and_roles_must_fit():
    workers = plan(*[Engine(role="replica", model="m", gpu_set=g) for g in "01"], router=Dynamo(policy="random"))
    assert [flag(c, "--disaggregation-mode") for c in workers[:2]] == ["agg", "agg"]
    assert "--kv-transfer-config" not in workers[0].argv and flag(workers[2], "--router-mode") == "random"
    with pytest.raises(BadInput, match="Dynamo's frontend needs prefill and decode engines"):
        plan(Engine(role="prefill", model="m"), router=Dynamo())
    with pytest.raises(BadInput, match=r"prefill-0: port 40000: Dynamo .* below 32768"):
        plan(Engine(role="prefill", model="m", port=40000), pair()[1], router=Dynamo())


def test_relative_to_nvlink_by_dynamo(monkeypatch):
    monkeypatch.setenv("KVLAB_DYNAMO_PYTHON", "/opt/dynamo/bin/python")
    todo = dry_run(RelativeToNvlink(model="org/net", hand_over="dynamo"))
    assert [c.name for c in todo] == ["prefill-0", "decode-0", "frontend"] * 2
    assert all(int(c.url.rpartition(":")[2]) < 2**15 for c in todo)
    assert {c.argv[0] for c in todo} == {"/opt/dynamo/bin/python"}
    assert [c.env["UCX_TLS"] for c in todo if c.role == "decode"] == ["sm,self,cma,tcp", "tcp"]
    shell = launch.shell(todo[:3])
    assert "python -m dynamo.frontend --http-host" in shell and "DYN_FILE_KV=" in shell


@pytest.mark.parametrize("python", ["/no/such/python", sys.executable])
def test_no_dynamo_is_said_at_once(tmp_path, python):
    said = f"^no Dynamo at {python}: set KVLAB_DYNAMO_PYTHON .*install dynamo$"
    with pytest.raises(BadInput, match=said), launch.up(pair(), folder=tmp_path, router=Dynamo(python=python)):
        pytest.fail("it is up")
    assert not list(tmp_path.iterdir())


def test_what_is_asked_before_ready(tmp_path):
    # It would die of a completion; a frontend that lists no model is not ready.
    def one(name: str, model: str, probe: str) -> Command:
        c = fake(tmp_path, name, name.split("-")[0], words=["--dies-at", "1"] if probe == "health" else [])
        return Command(c.name, c.role, c.argv, {}, c.url, c.log, model, probe=probe, scratch=tmp_path / "files")

    worker = one("decode-0", "fake", "health")
    with up(tmp_path, worker, one("router", "fake", "listed")) as cluster:
        assert cluster.complete({"prompt": "x"})["choices"][0]["text"] == "x"
        assert (tmp_path / "files").is_dir()
    assert not (tmp_path / "files").exists()
    other = one("router", "another", "listed")
    with pytest.raises(RunFailed, match="not ready after 2 s: router"), up(tmp_path, worker, other, limit_s=2):
        pytest.fail("it is up")
    assert left(tmp_path) == []


PARSE = """
import argparse, json, sys
from dynamo.frontend import main as frontend
from dynamo.mocker.args import parse_args as mocker
from dynamo.vllm.args import parse_args
given = json.load(sys.stdin)
said = []
for words in given["vllm"]:
    c = parse_args(words)
    e, kv = c.engine_args, c.engine_args.kv_transfer_config
    said.append({
        "mode": c.disaggregation_mode.value, "endpoint": f"{c.namespace}.{c.component}.{c.endpoint}",
        "planes": [c.discovery_backend, c.request_plane, c.event_plane],
        "model": [c.model, c.served_model_name], "dtype": e.dtype, "tp": e.tensor_parallel_size, "block": e.block_size,
        "limits": [e.max_model_len, e.max_num_batched_tokens, e.max_num_seqs, e.kv_cache_memory_bytes],
        "memory": e.gpu_memory_utilization, "eager": e.enforce_eager, "prefix": e.enable_prefix_caching,
        "kv": [kv.kv_connector, kv.kv_role, kv.kv_connector_extra_config], "load": e.load_format,
        "images": e.limit_mm_per_prompt, "shutdown": e.shutdown_timeout,
    })
m = mocker(given["mocker"])
said.append([m.disaggregation_mode, m.model_path, m.discovery_backend, m.request_plane, m.event_plane, m.speedup_ratio])
sys.argv[1:] = given["frontend"]
f = frontend.parse_args()[0]
said.append([f.http_host, f.http_port, f.router_mode, f.discovery_backend, f.request_plane, f.event_plane])
try:
    parse_args([*given["vllm"][0], "--no-such-flag"])
except SystemExit as error:
    said.append(error.code)
print(json.dumps(said, default=str))
"""


@pytest.mark.live
def test_the_installed_parsers_take_every_word(second):
    engines = [Engine(role=role, model="org/net", gpu_set="0,1,2,3", **FULL) for role in ("prefill", "decode")]
    *workers, frontend = plan(*engines, router=Dynamo(python=second))
    slow = Engine(role="decode", model="org/net", extra=["--speedup-ratio", "10"])
    _, mocker, _ = plan(pair()[0], slow, router=Dynamo(python=second, engine="mocker"))
    given = {"vllm": [c.argv[3:] for c in workers], "frontend": frontend.argv[3:], "mocker": mocker.argv[3:]}
    env = {k: v for k, v in os.environ.items() if not k.startswith("DYN_")}
    parsed = subprocess.run(
        [second, "-c", PARSE], input=json.dumps(given), env=env, capture_output=True, text=True, timeout=300
    )
    assert parsed.returncode == 0, parsed.stderr[-2000:]
    *both, mocked, front, refused = json.loads(parsed.stdout.splitlines()[-1])
    for role, component, got in zip(("prefill", "decode"), ("prefill", "backend"), both, strict=True):
        assert got == {
            "mode": role,
            "endpoint": f"dynamo.{component}.generate",
            "planes": ["file", "tcp", "zmq"],
            "model": ["org/net", "chat"],
            "dtype": "bfloat16",
            "tp": 4,
            "block": 128,
            "limits": [4096, 2048, 8, 1 << 30],
            "memory": 0.4,
            "eager": True,
            "prefix": False,
            "kv": ["NixlConnector", "kv_both", {"num_threads": 8}],
            "load": "dummy",
            "images": {"image": 0},
            "shutdown": 10,
        }
    assert mocked == ["decode", "org/net", "file", "tcp", "zmq", 10.0]
    assert front == ["127.0.0.1", int(flag(frontend, "--http-port")), "round-robin", "file", "tcp", "zmq"]
    assert refused == 2


def mock(folder: Path, python: str, **more):
    model = str(StandIn(layers=1).path())
    specs = [Engine(role=r, model=model, extra=["--speedup-ratio", "100"]) for r in ("prefill", "decode")]
    return launch.up(specs, folder=folder, router=Dynamo(python=python, engine="mocker"), limit_s=120, **more)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 15
    while any(psutil.pid_exists(p) for p in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(psutil.pid_exists(p) for p in pids)


@pytest.mark.live
def test_mocker_answers_and_leaves_nothing(tmp_path, second):
    with mock(tmp_path, second) as cluster:
        pids = [pid for one in cluster.all for pid in one.pids()]
        answer = cluster.complete({"prompt": "t1 t2 t3", "max_tokens": 5, "temperature": 0})
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        own = [c["versions"] for c in launch.record(cluster)]
        assert [v["ai-dynamo"] for v in own] == [dynamo.VERSION] * 3
        assert cluster.url == cluster.router.url and len(pids) >= 3 and list((tmp_path / "dynamo").rglob("*"))
        # Both workers had a part in it: the probe's completion and this one.
        counts = [one.metrics_text() for one in cluster.engines]
        lines = [ln for text in counts for ln in text.splitlines() if ln.startswith("dynamo_component_requests_total")]
        generated = [float(ln.split()[-1]) for ln in lines if 'dynamo_endpoint="generate"' in ln]
        assert generated == [2.0, 2.0]
    assert gone(pids)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["decode-0.log", "frontend.log", "prefill-0.log"]
    assert not any(launch.healthy(one.url) for one in cluster.all)


@pytest.mark.live
def test_mocker_killed_in_mid_load(tmp_path, second):
    with pytest.raises(RunFailed, match=r"^decode-0 was killed by SIGKILL"), mock(tmp_path, second) as cluster:
        pids = [pid for one in cluster.all for pid in one.pids()]
        os.kill(cluster.decode[0].pids()[0], signal.SIGKILL)
        time.sleep(60)
        pytest.fail("the block went on")
    assert gone(pids) and not (tmp_path / "dynamo").exists()
