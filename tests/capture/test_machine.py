"""Facts read from recorded trees and outputs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvlab.capture import machine, ucx_build

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPIX\t48-95\t1\t\tN/A
NIC0\tPIX\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_3
"""


def _write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def _port(root: Path, device: str, **more: str) -> None:
    base = {"state": "4: ACTIVE", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)"} | more
    for name, text in base.items():
        _write(root / "sys/class/infiniband" / device / "ports/1", **{name: text})


def test_topology() -> None:
    assert machine.topology(TOPOLOGY) == {
        "GPU0": {"GPU1": "NV18", "mlx5_0": "PIX", "mlx5_3": "SYS"},
        "GPU1": {"GPU0": "NV18", "mlx5_0": "SYS", "mlx5_3": "PIX"},
        "mlx5_0": {"GPU0": "PIX", "GPU1": "SYS", "mlx5_3": "SYS"},
        "mlx5_3": {"GPU0": "SYS", "GPU1": "PIX", "mlx5_0": "SYS"},
    }
    assert machine.topology("") == {}


def test_gpus_and_their_links() -> None:
    links = (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: NVIDIA H100 (UUID)\n"
    )
    got = machine.gpus("0, NVIDIA H100 80GB HBM3, 81559, 580.159.04\n1, NVIDIA H100, [N/A], 580.159.04\n", links)
    assert [(g["index"], g["memory_mib"], g["nvlinks"], g["nvlinks_up"]) for g in got] == [
        (0, 81559, 2, 1),
        (1, None, 0, 0),
    ]
    assert machine.gpus("No devices were found\n", "") == []


def test_rdma_port_takes_the_routable_gid(tmp_path: Path) -> None:
    empty, local = ":".join(["0000"] * 8), "fe80:0000:0000:0000:0e42:a1ff:fe00:0001"
    routed = "0000:0000:0000:0000:0000:ffff:0a00:0001"
    gids = {f"gids__{i}": g for i, g in enumerate((local, local, routed, routed, empty))}
    kinds = {f"gid_attrs__types__{i}": t for i, t in enumerate(("IB/RoCE v1", "RoCE v2") * 2)}
    _port(tmp_path, "mlx5_0", **gids, **kinds, gid_attrs__ndevs__3="eth1")
    _port(tmp_path, "mlx5_1", state="1: DOWN", link_layer="InfiniBand", gids__0=empty)
    _write(tmp_path, sys__class__infiniband__mlx5_0__device__numa_node="1")
    first, second = machine.rdma(tmp_path)
    assert first == {
        "device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)",
        "gid": routed, "gid_index": 3, "gid_type": "RoCE v2", "interface": "eth1", "numa_node": 1,
    }  # fmt: skip
    assert (second["state"], second["gid"], second["numa_node"]) == ("DOWN", None, None)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_build, "libraries", lambda: None)


def facts(root: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    return machine.facts(root, env or {}, lambda words: "")


@pytest.mark.usefixtures("quiet")
def test_a_container(tmp_path: Path) -> None:
    _write(
        tmp_path,
        proc__self__status="CapEff:\t0000000000080000",
        proc__self__limits="Max locked memory         65536                65536                bytes",
        proc__sys__kernel__yama__ptrace_scope="1",
        proc__sys__net__ipv4__tcp_rmem="4096\t131072\t6291456",
        proc__sys__net__core__rmem_max="212992",
        proc__driver__nvidia__version="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04",
        dev__kfd="",
        dev__nvidia0="",
        sys__module__nvidia_peermem__refcnt="0",
    )
    (tmp_path / ".dockerenv").touch()
    (tmp_path / "proc/self/ns").mkdir()
    for name, inode in (("pid", 4026532999), ("ipc", 4026531839), ("user", 4026531837)):
        os.symlink(f"{name}:[{inode}]", tmp_path / "proc/self/ns" / name)
    got = facts(tmp_path)
    assert got["namespaces"] == {"pid": "own", "ipc": "host", "user": "host"}
    assert got["container"] == "Docker"
    assert (got["sys_ptrace"], got["ipc_lock"], got["ptrace_scope"]) == (True, False, 1)
    assert got["memlock_bytes"] == 65536
    assert got["sockets"] == {
        "core/rmem_max": 212992, "core/wmem_max": None, "ipv4/tcp_rmem": 6291456, "ipv4/tcp_wmem": None,
    }  # fmt: skip
    assert (got["open_driver"], got["peermem"], got["amd"], got["nvidia_devices"]) == (True, True, True, 1)
    assert (got["nixl"], got["ucx"], got["gpus"], got["rdma"]) == (None, None, [], [])
    assert facts(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})["container"] == "Kubernetes"


@pytest.mark.usefixtures("quiet")
def test_an_adapter_that_cannot_be_used(tmp_path: Path) -> None:
    _write(tmp_path, **{"sys__bus__pci__devices__x__class": "0x020000", "sys__bus__pci__devices__x__vendor": "0x15b3"})
    assert "no RDMA device" in facts(tmp_path)["rdma_hidden"]
    _port(tmp_path, "mlx5_0")
    assert "uverbs" in facts(tmp_path)["rdma_hidden"]
    _write(tmp_path, dev__infiniband__uverbs0="")
    assert facts(tmp_path)["rdma_hidden"] == ""


@pytest.mark.usefixtures("quiet")
def test_an_empty_tree_gives_every_key_and_no_secret(tmp_path: Path) -> None:
    env = {"UCX_TLS": "tcp", "NIXL_ETCD_PASSWORD": "x", "HF_TOKEN": "x", "UCX_SECRET": "x", "CUDA_VISIBLE_DEVICES": "1"}
    got = facts(tmp_path, env)
    assert got["environment"] == {"CUDA_VISIBLE_DEVICES": "1", "UCX_TLS": "tcp"}
    assert set(got) == set(json.loads(json.dumps(facts(tmp_path))))
    assert got["memlock_bytes"] is None and got["shm_free_bytes"] is None and got["interfaces"] == []


def test_side_channel() -> None:
    def state(**env: str) -> str:
        return str(machine.side_channel({f"VLLM_NIXL_SIDE_CHANNEL_{k}": v for k, v in env.items()})["state"])

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert state(HOST="127.0.0.1", PORT=port) == "in use"
    assert state(HOST="127.0.0.1", PORT=port) == "free"
    assert state(HOST="192.0.2.1", PORT=port) == "not an address of this machine"
    assert state(HOST="no.such.host.invalid", PORT=port) == "unknown host"
    assert state(PORT="many") == state(PORT="0") == state(PORT="70000") == "not a port"


def test_a_command_that_is_missing_fails_or_succeeds() -> None:
    assert machine.run(["no-such-command-kvlab"]) == ""
    assert machine.run(["false"]) == ""
    assert machine.run(["echo", "a"]) == "a\n"


SAID = """\
kvlab version 1.22.0
kvlab cma no
[1.1] [node:1:0]     ucp_context.c:1492 UCX  WARN  transport 'rc_ml5x' is not available, please use one or more of: tcp
#     component 0  :  self
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 2  dev 2  flags -- rc_mlx5/mlx5_0:1
UCX_TCP_TX_SEG_SIZE=8K
UCX_ERROR_MAIL_TO=
UCX_ASYNC_MAX_EVENTS (deprecated)
kvlab module cma
kvlab module cuda cannot load: libcuda.so.1: cannot open shared object file
"""


def test_what_the_child_says() -> None:
    got = ucx_build.parse(SAID)
    assert got["version"] == "1.22.0" and got["cma"] is False
    assert got["transports"] == ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1"]
    assert got["variables"] == {"UCX_TCP_TX_SEG_SIZE": "8K", "UCX_ERROR_MAIL_TO": "", "UCX_ASYNC_MAX_EVENTS": ""}
    assert got["modules"] == ["cma", "cuda"]
    assert got["unloadable"] == {"cuda": "libcuda.so.1: cannot open shared object file"}
    assert got["warnings"] == ["transport 'rc_ml5x' is not available, please use one or more of: tcp"]
    assert ucx_build.parse("")["version"] is None and ucx_build.parse("")["cma"] is None


@pytest.mark.live
def test_the_wheels_ucx_answers() -> None:
    pytest.importorskip("nixl")
    got = ucx_build.look(dict(os.environ))
    assert got and not got["error"]
    assert {"self/memory", "tcp/lo"} <= set(got["transports"])
    assert {"ib", "cuda", "cma"} <= set(got["modules"])
    names = got["variables"]
    assert names["UCX_TCP_TX_SEG_SIZE"] and "UCX_NET_DEVICES" in names and "UCX_NET_DEVICE" not in names
    # the CUDA module's own names, whether or not it can load here
    assert "UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in names
    only = ucx_build.look({**os.environ, "UCX_TLS": "tcp"})
    assert only and {t.split("/")[0] for t in only["transports"]} == {"tcp"}
