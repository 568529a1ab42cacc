"""``kvlab check``: exit codes, the text, the document, and which parameters ``-f`` means."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlab import check, cli
from kvlab.capture import machine

sys.path.insert(0, str(Path(__file__).parent.parent))
from machines import container, cpu, nvlink, one_gpu


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the verb see recorded facts, and let every tiny pull answer as told."""

    def put(facts: dict[str, Any], took: str | None = None) -> None:
        monkeypatch.setattr(machine, "facts", lambda: facts)
        said = {"transport": took, "emulated": False, "verdict": f"{took}, zero-copy", "gb_per_s": 1.5, "error": None}
        monkeypatch.setattr(check, "probe", lambda *of: said)

    return put


ARMS = "arms:\n- {label: fast, env: {UCX_TLS: 'cuda_copy,cuda_ipc,tcp'}, expect: nvlink}\nmemory: VRAM\n"


@pytest.mark.parametrize(
    ("facts", "took", "words", "code"),
    [
        (cpu(), None, [], 0),
        (container(), None, [], 0),
        (cpu(), "cma", ["-f", "post-vs-completion"], 1),  # its TCP arm went over cma
        (cpu(), None, ["-f", "post-vs-completion", "--no-probe"], 0),
        (cpu(), None, ["-f", "post_vs_completion/loopback", "--no-probe"], 0),
        (cpu(), None, ["-f", "post-vs-completion/h200_one_gpu", "--no-probe"], 1),
        (cpu(nixl=None, ucx=None), None, ["-f", "post-vs-completion"], 1),
        (one_gpu(), None, ["-f", "FILE", "--no-probe"], 1),
        (one_gpu(), "tcp", ["-f", "FILE"], 1),
        (nvlink(), None, ["-f", "FILE", "--no-probe"], 0),
        (nvlink(), "cuda_ipc", ["-f", "FILE"], 0),
        (one_gpu(), "cuda_ipc", ["-f", "FILE"], 0),  # what was pulled counts, not what was expected
        (cpu(), None, ["-f", "no-such"], 2),
        (cpu(), None, ["-f", "post-vs-completion/no-such"], 2),
        (cpu(), None, ["-f", "which-transport"], 2),
        (cpu(), None, ["-p", "tp=2"], 2),
        (cpu(), None, ["-f", "post-vs-completion", "-p", "tpp=2"], 2),
        (cpu(), None, ["--no-such-flag"], 2),
    ],
)
def test_exit_codes(
    facts: dict[str, Any], took: str | None, words: list[str], code: int, on: Any, tmp_path: Path, capsys: Any
) -> None:
    on(facts, took)
    file = tmp_path / "mine.yaml"
    file.write_text(ARMS)
    named = [str(file) if w == "FILE" else w for w in words]
    assert cli.main(["check", *named]) == code
    text = capsys.readouterr()
    if code == 2:
        assert not text.out and text.err.strip().splitlines()[-1].startswith("kvlab")
        return
    assert text.out.startswith("NIXL ")
    assert cli.main(["check", "--json", *named]) == code
    whole = json.loads(capsys.readouterr().out)
    assert set(whole) == {"machine", "arms", "findings"}
    assert bool(whole["arms"]) == ("-f" in words)
    for finding in whole["findings"]:
        assert finding["rule"] in check.RULES and finding["remedy"] and finding["source"]
        assert finding["rule"] in text.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("arms: 3\n", "arms"),
        ("- 1\n", "a mapping of parameters is wanted"),
        ("arms: [{label: x}]\nmemory: TAPE\n", "memory"),
        ("\tx", "not a readable YAML file"),
    ],
)
def test_a_bad_file_gives_one_line(text: str, said: str, on: Any, tmp_path: Path, capsys: Any) -> None:
    on(cpu())
    (tmp_path / "bad.yaml").write_text(text)
    assert cli.main(["check", "-f", str(tmp_path / "bad.yaml")]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.strip().splitlines()) == 1


def test_text_says_arm_prediction_pull_trap_and_remedy(on: Any, tmp_path: Path, capsys: Any) -> None:
    on(one_gpu(), "tcp")
    (tmp_path / "mine.yaml").write_text(ARMS)
    assert cli.main(["check", "-f", str(tmp_path / "mine.yaml")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "UCX 1.22.0; cuda yes, verbs yes, mlx5 yes, efa yes, gdrcopy no, rocm no",
        "GPU 0 NVIDIA H100 80GB HBM3, 0 of 0 NVLinks up",
        "BLOCKED fast: claims nvlink; expected tcp by software emulation; a tiny pull took tcp, zero-copy, 1.5 GB/s",
        "blocks probe-contradicts",
        "trap gpu-reads-off",
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on on both sides (openucx/ucx#7566, ai-dynamo/nixl#1097)",
    ):
        assert words in said, words


def test_text_of_a_roce_machine(on: Any, capsys: Any) -> None:
    on(nvlink())
    assert cli.main(["check"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "usable self, tcp (eth0, lo), sysv, posix, cma, rc_mlx5 (mlx5_0:1), ud_mlx5 (mlx5_0:1), cuda_copy, cuda_ipc",
        "topology GPU0-GPU1 NV18, GPU0-mlx5_0 PIX, GPU1-mlx5_0 SYS",
        "mlx5_0:1 ACTIVE, Ethernet, 400 Gb/sec (4X NDR), GID 0000:0000:0000:0000:0000:ffff:0a00:0001 RoCE v2, NUMA 0",
        "GPUDirect nvidia_peermem",
        "nothing found that is in the way",
    ):
        assert words in said, words


@pytest.mark.live
def test_this_machine(capsys: Any) -> None:
    pytest.importorskip("nixl")
    assert cli.main(["check", "-f", "post-vs-completion"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "shared memory: claims shared memory; expected cma; a tiny pull took cma on memory" in said
    assert "TCP: claims tcp; expected tcp by software emulation; a tiny pull took tcp" in said
    assert "prediction-wrong" not in said
