"""Every rule of ``kvlab check`` on machines where it holds and where it does not; the prediction; the probe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from machines import PORT, container, cpu, nvlink, one_gpu, roce

from kvlab import check, params
from kvlab.paths import shared_dir
from kvlab.predict import allowed, predict

GET = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
VMM = "PYTORCH_CUDA_ALLOC_CONF"


def view(facts: dict[str, Any], memory: str = "DRAM", gpus: tuple[int, int] = (0, 0), **arm: Any) -> check.View:
    given = params.Arm.model_validate({"label": "arm", **arm})
    return check.View(facts, given.label, given, memory, 131072, gpus)


def found(facts: dict[str, Any], *views: check.View) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for f in check.judge(facts, views):
        rules.setdefault(f.rule, []).append(f.text)
    return rules


MACHINE = {
    "nixl-missing": (cpu(nixl=None), "no wheel here"),
    "ucx-does-not-start": (cpu(ucx={**cpu()["ucx"], "error": "ended with code -11"}), "code -11"),
    "variable-misspelt": (cpu(environment={"UCX_NET_DEVICE": "mlx5_0:1"}), "UCX_NET_DEVICE: UCX_NET_DEVICES?"),
    "memory-lock-limit": (roce(memlock_bytes=65536), "64 KiB"),
    "ptrace-forbidden": (cpu(ptrace_scope=1, ucx={**cpu()["ucx"], "cma": False}), "ptrace_scope 1"),
    "namespaces-isolated": (container(), "Kubernetes: pid, ipc namespace of its own"),
    "shared-memory-small": (container(), "64 MiB free"),
    "rdma-port-down": (roce(rdma=[PORT, {**PORT, "device": "mlx5_1", "state": "DOWN"}]), "mlx5_1:1 is DOWN"),
    "rdma-without-address": (roce(rdma=[{**PORT, "gid": None}]), "mlx5_0:1"),
    "rdma-not-visible": (container(), "no RDMA device"),
    "no-gpudirect": (nvlink(peermem=False), "nvidia_peermem"),
    "gpu-library-missing": (cpu(nvidia_devices=8), "libcuda.so.1"),
    "side-channel": (
        cpu(side_channel={"host": "localhost", "port": 5600, "state": "in use"}),
        "localhost:5600: in use",
    ),
}


@pytest.mark.parametrize("rule", MACHINE)
def test_machine_rule(rule: str) -> None:
    facts, text = MACHINE[rule]
    assert text in found(facts)[rule][0]
    assert rule not in found(cpu())


@pytest.mark.parametrize("facts", [cpu(), one_gpu(), nvlink(), roce()])
def test_nothing_is_wrong_with_a_machine_in_order(facts: dict[str, Any]) -> None:
    assert found(facts) == {}


#: rule -> an arm for which it holds, words of its text, an arm beside it for which it does not
ARM = {
    "arm-variable-misspelt": (view(cpu(), target_env={"UCX_NETDEVICES": "eth0"}), "UCX_NET_DEVICES?",
                              view(cpu(), env={"UCX_HOME": "/opt", "UCX_NET_DEVICES": "eth0"})),
    "transport-unknown": (view(cpu(), env={"UCX_TLS": "tcp,rc_ml5x"}), "rc_ml5x: rc_mlx5?",
                          view(cpu(), env={"UCX_TLS": "^rc_mlx5,ib"})),
    "transport-not-in-build": (view(one_gpu(), env={"UCX_TLS": "tcp,gdr_copy"}), "gdr_copy",
                               view(one_gpu(), env={"UCX_TLS": "tcp,cuda"})),
    "transport-not-here": (view(cpu(), env={"UCX_TLS": "tcp,rc"}), "rc", view(roce(), env={"UCX_TLS": "tcp,rc"})),
    "no-message-transport": (view(cpu(), env={"UCX_TLS": "sm,self"}), "UCX_TLS=sm,self",
                             view(cpu(), env={"UCX_TLS": "sm,self,tcp"})),
    "device-not-here": (view(cpu(), env={"UCX_NET_DEVICES": "mlx5_0:1"}), "here: eth0, lo",
                        view(roce(), env={"UCX_NET_DEVICES": "mlx5_0:1"})),
    "one-side-only": (view(cpu(), initiator_env={"UCX_NET_DEVICES": "eth0"}), "reader eth0, target default",
                      view(cpu(), env={"UCX_NET_DEVICES": "eth0"}, initiator_env={"UCX_NET_DEVICES": "eth0"})),
    "no-gpu": (view(one_gpu(), "VRAM", (0, 1)), "1 GPUs here, GPU 1 wanted", view(nvlink(), "VRAM", (0, 1))),
    "gpu-reads-off": (view(one_gpu(), "VRAM"), "NVLinks", view(one_gpu(), "VRAM", env={GET: "on"})),
    "memory-not-exportable": (view(nvlink(), "VRAM", env={VMM: "expandable_segments:True"}), "expandable_segments",
                              view(nvlink(), "VRAM", env={VMM: "expandable_segments:False"})),
    "no-cuda-copy": (view(nvlink(), "VRAM", env={"UCX_TLS": "rc,cuda_ipc"}), "UCX_TLS=rc,cuda_ipc",
                     view(nvlink(), "VRAM", env={"UCX_TLS": "rc,cuda"})),
    "not-nvlink": (view(nvlink(topology={"GPU0": {"GPU1": "SYS"}}), "VRAM", (0, 1), label="NVLink"),
                   "GPU0 to GPU1: the link between CPU sockets", view(nvlink(), "VRAM", (0, 1), expect="nvlink")),
    "tcp-segment-default": (view(cpu(), env={"UCX_TLS": "tcp"}), "8K",
                            view(cpu(), env={"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256k"})),
    "socket-buffers-small": (view(cpu(sockets={"ipv4/tcp_rmem": 212992}), env={"UCX_TLS": "tcp"}), "212992",
                             view(cpu(sockets={"ipv4/tcp_rmem": 212992}), env={"UCX_TLS": "tcp,cma"})),
    "old-protocols": (view(cpu(), env={"UCX_PROTO_ENABLE": "n"}), "UCX_PROTO_ENABLE",
                      view(cpu(), env={"UCX_PROTO_ENABLE": "y"})),
    "no-evidence": (view(cpu(), env={"UCX_PROTO_INFO": "n"}), "UCX_PROTO_INFO",
                    view(cpu(), env={"UCX_PROTO_INFO": "y"})),
    "not-measurable": (view(cpu(nixl=None)), "cannot run", view(cpu())),
    "label-not-met": (view(one_gpu(), "VRAM", env={"UCX_TLS": "cuda_copy,cuda_ipc,tcp"}, expect="nvlink"),
                      "claims nvlink, expected tcp by software emulation",
                      view(nvlink(), "VRAM", env={"UCX_TLS": "cuda_copy,cuda_ipc,tcp"}, expect="nvlink")),
}  # fmt: skip


@pytest.mark.parametrize("rule", ARM)
def test_arm_rule(rule: str) -> None:
    bad, text, good = ARM[rule]
    assert text in found(bad.facts, bad)[rule][0]
    assert rule not in found(good.facts, good)


TOOK_TCP = {
    "transport": "tcp",
    "emulated": True,
    "verdict": "tcp on lo, software emulation",
    "gb_per_s": 1.0,
    "error": None,
}
PROBES = {
    "probe-failed": ({"transport": None, "error": "UCX says: no usable transports"}, "cma", "no usable transports"),
    "probe-contradicts": (TOOK_TCP, "cma", "claims cma, the pull went over tcp on lo"),
    "prediction-wrong": (TOOK_TCP, "", "expected cma, took tcp"),
}


@pytest.mark.parametrize("rule", PROBES)
def test_probe_rule(rule: str) -> None:
    probe, expect, text = PROBES[rule]
    seen = check.View(cpu(), "arm", params.Arm(label="arm", expect=expect), probe=probe)
    assert text in found(cpu(), seen)[rule][0]
    right = check.View(cpu(), "arm", params.Arm(label="arm", expect=expect), probe={**TOOK_TCP, "transport": "cma"})
    assert rule not in found(cpu(), right)
    # what was pulled counts, not what was expected
    assert "label-not-met" not in found(cpu(), seen)


def test_every_rule_is_tested_has_a_source_and_is_in_the_table() -> None:
    assert {*MACHINE, *ARM, *PROBES} == set(check.RULES)
    table = check.rules_markdown().splitlines()
    assert len(table) == len(check.RULES) + 2
    for rule, line in zip(check.RULES.values(), table[2:], strict=True):
        cells = [c.strip() for c in line.strip("|").split(" | ")]
        assert cells == [f"`{rule.id}`", rule.weight, rule.what, rule.remedy, rule.source]
        assert all(cells) and rule.weight in ("blocks", "trap", "note") and rule.of in ("machine", "arm")


@pytest.mark.parametrize(
    ("facts", "memory", "env", "transports", "emulated"),
    [
        # seen with NIXL 1.4.1 and UCX 1.22 on a CPU machine
        (cpu(), "DRAM", {}, ("cma",), False),
        (cpu(), "DRAM", {"UCX_TLS": "sm,self,cma,tcp"}, ("cma",), False),
        (cpu(), "DRAM", {"UCX_TLS": "tcp"}, ("tcp",), True),
        (cpu(), "DRAM", {"UCX_TLS": "posix,tcp"}, ("tcp",), True),
        (cpu(), "DRAM", {"UCX_TLS": "^cma"}, ("tcp",), True),
        (cpu(), "DRAM", {"UCX_TLS": "tcp,rc_ml5x"}, ("tcp",), True),
        (cpu(), "DRAM", {"UCX_TLS": "cma,tcp", "UCX_NET_DEVICES": "lo"}, ("cma",), False),
        (cpu(), "DRAM", {"UCX_TLS": "sm,self"}, (), None),
        (cpu(), "DRAM", {"UCX_TLS": "cma"}, (), None),
        (cpu(), "DRAM", {"UCX_TLS": "rc"}, (), None),
        (cpu(), "DRAM", {"UCX_TLS": "^tcp"}, (), None),
        (cpu(), "DRAM", {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx5_0:1"}, (), None),
        (cpu(), "DRAM", {"UCX_TLS": "tcp", "UCX_PROTO_EMULATION_ENABLE": "n"}, (), None),
        (cpu(ucx={**cpu()["ucx"], "cma": False}), "DRAM", {}, ("tcp",), True),
        (roce(), "DRAM", {"UCX_TLS": "rc"}, ("rc_mlx5",), False),
        (roce(), "DRAM", {"UCX_TLS": "ud"}, ("ud_mlx5",), True),
        (roce(), "DRAM", {}, ("cma", "rc_mlx5"), False),
        (roce(), "DRAM", {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "eth0"}, ("tcp",), True),
        (roce(), "DRAM", {"UCX_TLS": "rc,tcp", "UCX_NET_DEVICES": "^mlx5_0:1"}, ("tcp",), True),
        # recorded on one H200 (data/which_transport), and the public cases 01, 04, 05, 45
        (one_gpu(), "VRAM", {"UCX_TLS": "cuda_copy,cuda_ipc,tcp"}, ("tcp",), True),
        (one_gpu(), "VRAM", {"UCX_TLS": "cuda_copy,cuda_ipc,tcp", GET: "on"}, ("cuda_ipc",), False),
        (one_gpu(nixl={"gpu_reads_on": True}), "VRAM", {"UCX_TLS": "cuda,tcp"}, ("cuda_ipc",), False),
        (one_gpu(nixl={"gpu_reads_on": True}), "VRAM", {"UCX_TLS": "cuda,tcp", GET: "n"}, ("tcp",), True),
        (one_gpu(), "VRAM", {"UCX_TLS": "cuda,tcp", GET: "on", VMM: "expandable_segments:True"}, ("tcp",), True),
        (one_gpu(), "VRAM", {"UCX_TLS": "tcp"}, (), None),
        (nvlink(), "VRAM", {"UCX_TLS": "rc_x,cuda_copy,cuda_ipc"}, ("cuda_ipc",), False),
        (nvlink(), "VRAM", {"UCX_TLS": "rc_x,cuda_copy"}, ("rc_mlx5",), False),
        (nvlink(), "VRAM", {VMM: "expandable_segments:True"}, ("rc_mlx5",), False),
        (nvlink(peermem=False), "VRAM", {"UCX_TLS": "rc_x,cuda_copy"}, ("rc_mlx5",), True),
    ],
)  # fmt: skip
def test_prediction(
    facts: dict[str, Any], memory: str, env: dict[str, str], transports: tuple[str, ...], emulated: bool | None
) -> None:
    got = predict(facts, env, memory)
    assert (got.transports, got.emulated) == (transports, emulated), got.why


def test_one_link_down_turns_gpu_reads_off() -> None:
    gpus = [{**g, "nvlinks_up": 17} for g in nvlink()["gpus"]]
    assert predict(nvlink(gpus=gpus), {"UCX_TLS": "cuda,tcp"}, "VRAM").transports == ("tcp",)


@pytest.mark.parametrize(
    ("tls", "left"),
    [
        ("all", {"tcp", "cma", "posix", "rc_mlx5", "cuda_ipc"}),
        ("", {"tcp", "cma", "posix", "rc_mlx5", "cuda_ipc"}),
        ("sm", {"cma", "posix"}),
        ("ib,\\tcp", {"rc_mlx5", "tcp"}),
        ("rc:aux,cuda", {"rc_mlx5", "cuda_ipc"}),
        ("^ib,cuda", {"tcp", "cma", "posix"}),
    ],
)
def test_ucx_tls(tls: str, left: set[str]) -> None:
    assert allowed(tls, {"tcp", "cma", "posix", "rc_mlx5", "cuda_ipc"}) == left


def test_words_of_the_field_are_not_ucx_names() -> None:
    seen = view(cpu(), env={"UCX_TLS": "nvlink,tcp"})
    assert found(seen.facts, seen)["transport-unknown"] == ["nvlink"]


def test_arms_of_engines() -> None:
    given = {
        "decode_gpus": "1",
        "prefill_gpus": "0",
        "engine_env": {"UCX_TLS": "tcp,cuda", "UCX_TCP_TX_SEG_SIZE": "64k"},
        "arms": [{"label": "a", "env": {"UCX_TLS": "rc,cuda"}}],
    }
    [seen] = check.arms(params.RelativeToNvlink.model_validate(given), nvlink(), live=False)
    assert (seen.memory, seen.gpus, seen.env["UCX_TLS"]) == ("VRAM", (1, 0), "rc,cuda")
    assert seen.env["UCX_TCP_TX_SEG_SIZE"] == "64k"
    [seen] = check.arms(params.RelativeToNvlink.model_validate({"arms": [{"label": "a"}]}), cpu(), live=False)
    assert (seen.memory, seen.size) == ("DRAM", 131072)


SHIPPED = sorted(p for p in shared_dir("params").glob("*/*.yaml") if "arms:" in p.read_text())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_shipped_parameter_files_can_be_checked(path: Path) -> None:
    chosen = params.validate(path.parent.name, params.read_file(path))
    views = check.arms(chosen, nvlink(), live=False)
    assert [v.label for v in views] == [a.label for a in chosen.arms]  # type: ignore[attr-defined]
    assert all(v.size >= 8 and v.prediction and v.prediction.transports for v in views)


def test_visible_gpus_limit_the_arm() -> None:
    seen = view(nvlink(), "VRAM", (0, 1), env={"CUDA_VISIBLE_DEVICES": "3"})
    assert "no-gpu" in found(seen.facts, seen)


def test_document_is_json_without_the_list_of_variables() -> None:
    seen = view(one_gpu(), "VRAM", expect="cuda_ipc")
    whole = json.loads(json.dumps(check.document(seen.facts, [seen], check.judge(seen.facts, [seen]))))
    assert "variables" not in whole["machine"]["ucx"]
    assert whole["arms"][0]["prediction"]["transports"] == ["tcp"]
    assert whole["machine"]["why_not"]["rc_mlx5"] == "no RDMA device"
    assert whole["machine"]["why_not"]["gdr_copy"] == "not in this build"
    assert {f["rule"] for f in whole["findings"]} >= {"gpu-reads-off", "label-not-met"}


def test_nothing_can_be_said_without_ucx() -> None:
    seen = view(cpu(nixl=None, ucx=None), expect="tcp")
    assert seen.prediction is None
    assert set(found(seen.facts, seen)) == {"nixl-missing", "not-measurable"}
    assert check.why_not(seen.facts) == {}


@pytest.mark.slow
@pytest.mark.live
@pytest.mark.parametrize(("tls", "expect"), [("sm,self,cma,tcp", "cma"), ("tcp", "tcp")])
def test_probe_pulls(tls: str, expect: str) -> None:
    """In CI the same two pulls are those of test_check_verb.py::test_this_machine."""
    pytest.importorskip("nixl")
    arm = {"label": "probe", "env": {"UCX_TLS": tls}, "expect": expect}
    chosen = params.PostVsCompletion.model_validate({"arms": [arm]})
    [seen] = check.arms(chosen, cpu(), live=True)
    got = seen.probe or {}
    assert (got["transport"], got["error"]) == (expect, None)


@pytest.mark.live
def test_probe_reports_what_ucx_said() -> None:
    pytest.importorskip("nixl")
    chosen = params.PostVsCompletion.model_validate({"arms": [{"label": "x", "env": {"UCX_TLS": "sm,self"}}]})
    [seen] = check.arms(chosen, cpu(), live=True)
    assert "no active messages transport" in (seen.probe or {})["error"]


def test_predictions_on_a_recorded_h200_are_what_the_probes_there_saw():
    """Facts, predictions and live probes of one run of `kvlab check` on one H200, without NVLink and RDMA."""
    import json
    from pathlib import Path

    from kvlab import params
    from kvlab.predict import predict

    recorded = json.loads((Path(__file__).parent / "data/check/h200_one_gpu.json").read_text())
    given = params.read_file(params.resolve_file("post-vs-completion", "h200_one_gpu"))
    arms = params.validate("post-vs-completion", given).arms
    seen = {a["arm"]: a["probe"] for a in recorded["arms"]}
    assert {a.label for a in arms} == set(seen)
    for arm in arms:
        found = predict(recorded["machine"], dict(arm.env), "VRAM")
        assert seen[arm.label]["transport"] in found.transports, arm.label
        assert found.emulated == seen[arm.label]["emulated"]
