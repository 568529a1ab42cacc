import json
import shlex
from pathlib import Path

import pytest

from kvlab.engines import launch, pd, versions, vllm
from kvlab.engines.router import Router
from kvlab.engines.vllm import Engine
from kvlab.errors import BadInput, RunFailed
from kvlab.placement.local import Place


def plan(*specs: Engine, **more):
    kw = {"folder": Path("/logs"), "version": "0.30.0", "ports": iter(range(9000, 9100)), "cores": [0, 1], **more}
    return launch.commands(list(specs), **kw)


def flag(command, name: str) -> str:
    return command.argv[command.argv.index(name) + 1]


def pair(**more):
    return [Engine(role=role, model="org/net", **more) for role in ("prefill", "decode")]


def test_pair_on_cpu():
    prefill, decode = plan(*pair())
    assert [c.name for c in (prefill, decode)] == ["prefill-0", "decode-0"]
    assert prefill.argv[1:3] == ("-m", "vllm.entrypoints.launchers.api_server.entry")
    assert (flag(prefill, "--dtype"), flag(prefill, "--block-size")) == ("float16", "32")
    assert flag(prefill, "--host") == "127.0.0.1"
    assert json.loads(flag(decode, "--kv-transfer-config")) == {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    assert [c.env["VLLM_CPU_OMP_THREADS_BIND"] for c in (prefill, decode)] == ["0", "1"]
    assert [c.env["OMP_WAIT_POLICY"] for c in (prefill, decode)] == ["PASSIVE", "PASSIVE"]
    # two HTTP ports and two side channels, all different
    numbers = [c.url.rpartition(":")[2] for c in (prefill, decode)]
    numbers += [c.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for c in (prefill, decode)]
    assert sorted(numbers) == ["9000", "9001", "9002", "9003"]
    assert prefill.env["UCX_PROTO_INFO"] == "used"
    assert decode.env["NIXL_TELEMETRY_DIR"] == str(decode.telemetry_dir) == "/logs/telemetry/decode-0"
    assert "HF_HUB_OFFLINE" not in prefill.env  # a hub name may have to be downloaded
    assert prefill.model == "net"


def test_local_model_is_offline(tmp_path):
    (command,) = plan(Engine(role="replica", model=str(tmp_path)))
    assert command.env["HF_HUB_OFFLINE"] == command.env["TRANSFORMERS_OFFLINE"] == "1"
    assert "--kv-transfer-config" not in command.argv
    assert command.telemetry_dir is None and "VLLM_NIXL_SIDE_CHANNEL_PORT" not in command.env


def test_every_option_reaches_the_command_line():
    (command,) = plan(
        Engine(
            role="decode",
            model="org/net",
            name="d",
            served_name="chat",
            dtype="bfloat16",
            tp=2,
            block_size=128,
            max_model_len=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=8,
            limit_mm_per_prompt={"image": 0},
            prefix_caching=True,
            enforce_eager=False,
            kv_cache_bytes=1 << 30,
            gpu_memory_utilization=0.4,
            kv_role="kv_consumer",
            kv_connector_extra_config={"num_threads": 8, "backends": ["UCX"], "kv_lease_duration": 60},
            env={"UCX_TLS": "tcp", "UCX_PROTO_INFO": "y"},
            gpu_set="2,3",
            port=8200,
            side_channel_port=5700,
            extra=["--attention-backend", "FLASH_ATTN"],
        )
    )
    for name, value in {
        "--model": "org/net",
        "--served-model-name": "chat",
        "--dtype": "bfloat16",
        "--tensor-parallel-size": "2",
        "--block-size": "128",
        "--max-model-len": "4096",
        "--max-num-batched-tokens": "2048",
        "--max-num-seqs": "8",
        "--limit-mm-per-prompt": '{"image": 0}',
        "--kv-cache-memory-bytes": "1073741824",
        "--gpu-memory-utilization": "0.4",
        "--port": "8200",
        "--attention-backend": "FLASH_ATTN",
    }.items():
        assert flag(command, name) == value
    assert "--enable-prefix-caching" in command.argv and "--enforce-eager" not in command.argv
    transfer = json.loads(flag(command, "--kv-transfer-config"))
    assert transfer["kv_role"] == "kv_consumer" and transfer["kv_connector_extra_config"]["kv_lease_duration"] == 60
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5700"
    # the engine's own environment has the last word; a GPU engine gets nothing of the CPU's
    assert (command.env["UCX_TLS"], command.env["UCX_PROTO_INFO"]) == ("tcp", "y")
    assert not [k for k in command.env if k.startswith(("VLLM_CPU", "GOMP", "OMP"))]


def test_gpu_engine_leaves_dtype_and_block_size_to_vllm():
    (command,) = plan(Engine(role="prefill", model="org/net", gpu_set="0"))
    assert "--dtype" not in command.argv and "--block-size" not in command.argv


@pytest.mark.parametrize(
    ("engines", "cores", "expected"),
    [
        (2, [0, 1], ["0", "1"]),
        (2, [0, 1, 2, 3], ["0,1", "2,3"]),
        (3, [0, 1], ["0", "1", "0"]),
        (2, [4, 5, 6, 7, 8], ["4,5", "6,7"]),
        (1, [3], ["3"]),
    ],
)
def test_cores_are_shared_out(engines, cores, expected):
    assert vllm.cpu_sets(engines, cores) == expected


def test_each_rank_gets_its_cores():
    commands = plan(*pair(tp=2), cores=[0, 1, 2, 3, 4, 5, 6, 7])
    assert [c.env["VLLM_CPU_OMP_THREADS_BIND"] for c in commands] == ["0,2|1,3", "4,6|5,7"]
    commands = plan(*pair(tp=2), cores=[0, 1])
    assert [c.env["VLLM_CPU_OMP_THREADS_BIND"] for c in commands] == ["0|0", "1|1"]


def test_same_port_twice_is_refused():
    with pytest.raises(BadInput, match="port 8100"):
        plan(*pair(port=8100))
    with pytest.raises(BadInput, match="name a"):
        plan(*pair(name="a"))
    with pytest.raises(BadInput, match="no engines"):
        plan()


def test_free_ports_are_unique():
    ports = launch.free_ports()
    assert len({next(ports) for _ in range(50)}) == 50


def test_router_disaggregates_or_goes_round():
    engines = [Engine(role=r, model="m") for r in ("prefill", "prefill", "decode", "decode", "decode")]
    commands = plan(*engines, router=Router())
    words = shlex.join(commands[-1].argv)
    assert commands[-1].name == "router"
    assert "--vllm-pd-disaggregation" in words and "--policy round_robin" in words
    assert words.count("--prefill http://127.0.0.1:") == 2 and words.count("--decode http://127.0.0.1:") == 3
    replicas = plan(*[Engine(role="replica", model="m") for _ in range(2)], router=Router(policy="random"))
    assert "--worker-urls http://127.0.0.1:9000 http://127.0.0.1:9001" in shlex.join(replicas[-1].argv)
    with pytest.raises(BadInput, match="cannot mix"):
        plan(*pair(), Engine(role="replica", model="m"), router=Router())
    with pytest.raises(BadInput, match="prefill and decode"):
        plan(Engine(role="prefill", model="m"), router=Router())


def test_shell_says_exactly_the_same_words(tmp_path):
    place = Place("net", prefix=("nsenter", "--net=/x y"), env={"UCX_NET_DEVICES": "kv0"}, address="10.0.0.2")
    spec = Engine(role="decode", model="org/net", env={"ODD": "it's $HOME"})
    (command,) = plan(spec, places={"decode": place})
    assert flag(command, "--host") == command.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.2"
    text = launch.shell([command])
    lines = text.splitlines()
    assert lines[0] == "# decode-0: http://10.0.0.2:9000"
    words = shlex.split(text.partition("&&")[2].replace("\\\n", ""))
    assert words[:3] == ["nsenter", "--net=/x y", "env"]
    env = dict(w.split("=", 1) for w in words[3 : -len(command.argv)])
    assert env == command.env and env["UCX_NET_DEVICES"] == "kv0" and env["ODD"] == "it's $HOME"
    assert tuple(words[-len(command.argv) :]) == command.argv


@pytest.mark.parametrize(
    ("version", "module"),
    [
        ("0.23.0", "vllm.entrypoints.openai.api_server"),
        ("0.30.0", "vllm.entrypoints.launchers.api_server.entry"),
        ("0.32.1.dev3+cpu", "vllm.entrypoints.launchers.api_server.entry"),
    ],
)
def test_entry_module(version, module):
    assert versions.entry_module(version) == module


def test_unknown_option_is_refused():
    with pytest.raises(ValueError, match="block_sise"):
        Engine(role="prefill", model="m", block_sise=16)


def test_prefill_then_decode_bodies():
    body = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    first = pd.prefill_request(body)
    assert (first["max_tokens"], "stream" in first, "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    given = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "e"}
    second = pd.decode_request(body, {"kv_transfer_params": given})
    assert second == {**body, "kv_transfer_params": given}
    with pytest.raises(RunFailed, match="no KV blocks"):
        pd.decode_request(body, {"kv_transfer_params": None, "choices": []})


_VLLM = """\
(APIServer pid=1) INFO 12-02 01:00:00 [entry.py:1] starting
(EngineCore pid=2) ERROR 12-02 01:00:01 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=2) ERROR 12-02 01:00:01 [core.py:1100] ValueError: No available memory for the cache blocks.
(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


_PYDANTIC = """(APIServer pid=1) Traceback (most recent call last):
(APIServer pid=1) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
(APIServer pid=1)   Value error, User-specified max_model_len (36864) is greater than 32768. [type=value_error, input_value=ArgsKwargs()]
(APIServer pid=1)     For further information visit a page
"""  # noqa: E501


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (_PYDANTIC, "ValueError: User-specified max_model_len (36864) is greater than 32768."),
        (_VLLM, "ValueError: No available memory for the cache blocks."),
        ("usage: x\nentry.py: error: unrecognized arguments: --nope\n", "unrecognized arguments: --nope"),
        ("INFO fine\nOSError: [Errno 98] Address already in use\n", "OSError: [Errno 98] Address already in use"),
        ("Exception: invalid value `48159`, expected i16\n", "Exception: invalid value `48159`, expected i16"),
        ("2026-12-02T05:34:29.1Z ERROR dynamo_llm: Error adding model\n", "dynamo_llm: Error adding model"),
        ("all is well\n", ""),
        ("RuntimeError: Engine core initialization failed. See root cause above.\n", "RuntimeError: Engine core"),
    ],
)
def test_last_error_is_the_cause(tmp_path, text, said):
    (tmp_path / "log").write_text(text)
    found = launch.last_error(tmp_path / "log")
    assert found.endswith(said) if not said.startswith("RuntimeError") else found.startswith(said)
    assert launch.last_error(tmp_path / "none") == ""
