"""What a manifest says about the machine, and what it must never say."""

import json
import shlex
import subprocess
import sys

import pytest

from kvlab import runs
from kvlab.capture import provenance
from kvlab.capture.redact import redact, redacted

PLANTED = "hunter2-Zx9"


@pytest.mark.parametrize(
    "text",
    [
        f"HF_TOKEN={PLANTED} vllm serve",
        f"VLLM_API_KEY='{PLANTED} {PLANTED}'",
        f"--api-key {PLANTED} --port 8000",
        f"--api-key={PLANTED}",
        f"--hf-token '{PLANTED} x{PLANTED}'",
        f"MY_PASSWORD: {PLANTED}",
        f'{{"aws_secret_access_key": "{PLANTED}", "port": 1}}',
        f'--config {{\\"api_key\\": \\"{PLANTED}\\"}}',
        f"Authorization: Bearer {PLANTED}",
        f"curl -H 'authorization: Basic {PLANTED}'",
        f"http://user:{PLANTED}@etcd.example:2379/v2",
        f"https://{PLANTED}@example.org/x",
        f"redis://:{PLANTED}/with@slash@cache:6379",
        f"root:{PLANTED}@10.0.0.1:2379",
        f"https://blob.example/x?sv=1&sig={PLANTED}&se=2",
        f"https://e.example/?X-Amz-Signature={PLANTED}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{PLANTED}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{PLANTED}",
        f"a hf_{PLANTED.replace('-', '')}abcdefgh b",
        f"eyJhbGciOiJI.eyJzdWIi.{PLANTED}",
        f"passphrase={PLANTED}",
        f"NIXL_CREDENTIALS={PLANTED}",
        f"--token-file-key {PLANTED}",
        "HF_TOKEN=12345678",
    ],
)
def test_a_planted_secret_does_not_come_through(text):
    words = [text] if "{" in text or "\n" in text else shlex.split(text)
    for form in (text, f"x {text} y", ["x", text, "y"], words):
        found = redact(form)
        assert PLANTED not in found and PLANTED.replace("-", "") not in found and "12345678" not in found
        assert "REDACTED" in found


@pytest.mark.parametrize(
    "text",
    [
        "--max-num-batched-tokens 2048 --max-tokens=16",
        "prompt_tokens: [4096, 8192]",
        "--tokenizer Qwen/Qwen3-8B --tokenizer-mode auto",
        "UCX_IB_PKEY=0x8001 UCX_TLS=rc_x,cuda_copy UCX_KEEPALIVE_INTERVAL=20s",
        "http://127.0.0.1:8000/v1/completions?n=1&m=2",
        "CUDA_VISIBLE_DEVICES=GPU-8a3b,1 author: someone@example.org",
        "UCX_NET_DEVICES=mlx5_0:1,mlx5_1:1",
        "--enable-auth --port 8000",
        '{"kv_connector":"NixlConnector","kv_role":"kv_both"}',
        "KV Transfer metrics: Num successful transfers=4, token_ids=12",
    ],
)
def test_what_is_no_secret_stays(text):
    assert redact(text) == text


def test_hostile_text_is_read_in_linear_time_and_without_recursion():
    for text in (
        "a=" * 50_000,
        'key="' * 20_000,
        "key" * 30_000,
        "://" + "x" * 100_000,
        '{"' * 20_000,
        "a" * 200_000 + ":b",
        "key " * 30_000,
        "k:" * 50_000,
        "://" * 20_000,
    ):
        redact(text)


def test_plain_data_is_cleaned_by_key():
    data = {"arms": [{"env": {"HF_TOKEN": PLANTED, "UCX_TLS": "tcp"}}], "prompt_tokens": [4096], "api_keys": [PLANTED]}
    # Ray's environment and the node's own, side by side
    assert redacted({"MY_PASSWORD": [None, "hunter2"]}) == {"MY_PASSWORD": [None, "REDACTED"]}
    clean = redacted(data)
    assert clean["arms"][0]["env"] == {"HF_TOKEN": "REDACTED", "UCX_TLS": "tcp"}
    assert clean["prompt_tokens"] == [4096] and clean["api_keys"] == ["REDACTED"]
    assert data["api_keys"] == [PLANTED]


def test_the_manifest_holds_no_secret_and_what_a_reader_needs(monkeypatch, tmp_path):
    for name, value in {
        "VLLM_API_KEY": PLANTED,
        "NIXL_ETCD_ENDPOINTS": f"http://root:{PLANTED}@etcd:2379",
        "UCX_TLS": "tcp",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": PLANTED,
        "AWS_SECRET_ACCESS_KEY": PLANTED,
    }.items():
        monkeypatch.setenv(name, value)
    parameters = {"arms": [{"label": "a", "env": {"HF_TOKEN": PLANTED, "UCX_TLS": "tcp"}}], "prompt_tokens": [8]}
    run = runs.create("post-vs-completion", parameters, out=tmp_path)
    text = (run.path / "manifest.json").read_text()
    assert PLANTED not in text
    found = json.loads(text)
    assert found["parameters"] == {
        "arms": [{"label": "a", "env": {"HF_TOKEN": "REDACTED", "UCX_TLS": "tcp"}}],
        "prompt_tokens": [8],
    }
    found = found["provenance"]
    assert found["environment"]["UCX_TLS"] == "tcp" and found["environment"]["OMP_NUM_THREADS"] == "1"
    assert found["environment"]["VLLM_API_KEY"] == "REDACTED"
    assert found["environment"]["NIXL_ETCD_ENDPOINTS"] == "http://REDACTED@etcd:2379"
    assert found["cpu"] and found["cores"] >= found["cores_allowed"] >= 1 and found["memory_bytes"] > 1 << 28
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert any(n["link_layer"] == "loopback" for n in found["nics"])


def test_collecting_imports_nothing_heavy():
    code = (
        "import sys; from kvlab.capture import provenance; provenance.collect();"
        "print([m for m in ('torch', 'nixl', 'vllm', 'papermill', 'altair', 'pandas') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_the_ucx_of_the_wheel_is_what_the_library_itself_says():
    pytest.importorskip("nixl")
    from importlib.metadata import distribution

    library = next(p for p in distribution("nixl-cu12").files or [] if p.name.startswith("libucp-"))
    # In a process of its own: loading UCX hooks memory calls.
    code = (
        "import ctypes, sys; v = ctypes.CDLL(sys.argv[1]).ucp_get_version_string;"
        "v.restype = ctypes.c_char_p; print(v().decode())"
    )
    said = subprocess.run([sys.executable, "-c", code, str(library.locate())], capture_output=True, text=True)
    assert provenance.ucx_version() == said.stdout.strip() != ""


def git(folder, *words):
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main")
    subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True)


def test_a_parameter_file_is_committed_unchanged_or_not(tmp_path):
    file = tmp_path / "a b.yaml"
    file.write_text("tp: 4\n")
    assert provenance.committed_unchanged(file) is None
    git(tmp_path, "init")
    assert provenance.committed_unchanged(file) is None  # a checkout without a commit has nothing to compare with
    git(tmp_path, "commit", "--allow-empty", "-m", "none")
    assert provenance.committed_unchanged(file) is False
    git(tmp_path, "add", ".")
    assert provenance.committed_unchanged(file) is False
    git(tmp_path, "commit", "-m", "protocol")
    assert provenance.committed_unchanged(file) is True
    (tmp_path / "link.yaml").symlink_to(file)
    assert provenance.committed_unchanged(tmp_path / "link.yaml") is True
    file.write_text("tp: 8\n")
    assert provenance.committed_unchanged(file) is False
    git(tmp_path, "add", ".")
    assert provenance.committed_unchanged(file) is False


def test_commit_and_changes_of_the_checkout(tmp_path):
    assert provenance.git(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "kvlab").mkdir()
    (tmp_path / "kvlab" / "x.py").write_text("1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    clean = provenance.git(tmp_path)
    assert len(clean["commit"]) == 40 and not clean["dirty"]
    (tmp_path / "notes").write_text("beside the code\n")
    assert provenance.git(tmp_path) == clean
    (tmp_path / "kvlab" / "new file.py").write_text("2\n")
    assert provenance.git(tmp_path) == {**clean, "dirty": True, "changed": ['"kvlab/new file.py"']}


def test_nics_of_a_tree(tmp_path):
    for path, text in {
        "net/enp1/type": "1\n",
        "net/enp1/speed": "100000\n",
        "net/enp1/mtu": "9000\n",
        "net/enp1/operstate": "up\n",
        "net/old/type": "1\n",
        "net/old/operstate": "down\n",
        "net/lo/type": "772\n",
        "net/lo/mtu": "65536\n",
        "net/lo/speed": "-1\n",
        "infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
        "infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
        "infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "infiniband/mlx5_1/ports/1/rate": "40 Gb/sec (4X QDR)\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    rows = {r["name"]: r for r in provenance.nics(tmp_path)}
    assert set(rows) == {"enp1", "lo", "mlx5_0:1", "mlx5_1:1"}  # a virtual interface that is down is left out
    assert rows["enp1"] == {
        "name": "enp1",
        "link_layer": "Ethernet",
        "speed": "100000 Mb/s",
        "mtu": 9000,
        "state": "up",
    }
    assert rows["lo"]["speed"] is None and rows["lo"]["mtu"] == 65536
    assert rows["mlx5_0:1"]["speed"] == "400 Gb/sec (4X NDR)" and rows["mlx5_0:1"]["state"] == "ACTIVE"
    assert rows["mlx5_1:1"]["speed"] is None  # 40 Gb/sec is a placeholder


def test_gpus_by_nvml_by_nvidia_smi_or_none(monkeypatch, tmp_path):
    import types

    fake = types.ModuleType("pynvml")
    fake.nvmlInit = lambda: None
    fake.nvmlDeviceGetCount = lambda: 2
    fake.nvmlDeviceGetHandleByIndex = lambda i: i
    fake.nvmlDeviceGetName = lambda i: [b"NVIDIA A", "NVIDIA B"][i]
    fake.nvmlSystemGetDriverVersion = lambda: "570.1"
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert provenance.gpus() == (["NVIDIA A", "NVIDIA B"], "570.1")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 550.54'\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert provenance.gpus() == (["NVIDIA H100 80GB HBM3"], "550.54")
    script.write_text("#!/bin/sh\necho no devices were found\n")
    assert provenance.gpus() == ([], None)


@pytest.mark.parametrize(
    ("path", "text", "says"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("run/systemd/container", "systemd-nspawn\n", "systemd-nspawn"),
        ("proc/1/cgroup", "0::/kubepods/besteffort/pod1\n", "kubepods"),
        ("proc/1/cgroup", "0::/init.scope\n", None),
    ],
)
def test_hint_at_a_container(tmp_path, monkeypatch, path, text, says):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(text)
    assert provenance.container(tmp_path) == says
