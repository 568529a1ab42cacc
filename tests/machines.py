"""Facts of four machines, as :func:`kvlab.capture.machine.facts` gives them."""

from __future__ import annotations

from typing import Any

VARIABLES = {
    "UCX_TLS": "all", "UCX_NET_DEVICES": "all", "UCX_TCP_TX_SEG_SIZE": "8K", "UCX_TCP_RX_SEG_SIZE": "64K",
    "UCX_PROTO_INFO": "n", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": None,
}  # fmt: skip


def cpu(**changes: Any) -> dict[str, Any]:
    """A CPU machine with TCP and shared memory, where nothing is wrong."""
    facts: dict[str, Any] = {
        "nixl": {"version": "1.4.1", "module": "nixl_cu13", "gpu_reads_on": False, "variables": []},
        "ucx": {
            "version": "1.22.0",
            "error": "",
            "modules": ["cma", "cuda", "ib", "ib_efa", "ib_mlx5"],
            "unloadable": {"cuda": "libcuda.so.1: cannot open shared object file: No such file or directory"},
            "transports": ["self/memory", "tcp/eth0", "tcp/lo", "sysv/memory", "posix/memory", "cma/memory"],
            "variables": VARIABLES,
            "warnings": [],
            "cma": True,
        },
        "gpus": [],
        "topology": {},
        "nvidia_devices": 0,
        "amd": False,
        "peermem": False,
        "open_driver": False,
        "rdma": [],
        "rdma_hidden": "",
        "interfaces": [{"name": "eth0", "up": True, "mtu": 1500, "mbit_per_s": 10000}],
        "container": None,
        "namespaces": {"pid": "host", "ipc": "host", "user": "host"},
        "ptrace_scope": 0,
        "ipc_lock": False,
        "sys_ptrace": False,
        "memlock_bytes": 8 << 20,
        "shm_free_bytes": 16 << 30,
        "sockets": {
            "core/rmem_max": 4 << 20,
            "core/wmem_max": 4 << 20,
            "ipv4/tcp_rmem": 32 << 20,
            "ipv4/tcp_wmem": 4 << 20,
        },
        "side_channel": {"host": "localhost", "port": 5600, "state": "free"},
        "environment": {},
    }
    return facts | changes


def _gpu(index: int, links: int) -> dict[str, Any]:
    gpu = {"index": index, "name": "NVIDIA H100 80GB HBM3", "memory_mib": 81559, "driver": "580.159.04"}
    return gpu | {"nvlinks": links, "nvlinks_up": links}


PORT = {
    "device": "mlx5_0", "port": 1, "state": "ACTIVE", "link_layer": "Ethernet", "rate": "400 Gb/sec (4X NDR)",
    "gid": "0000:0000:0000:0000:0000:ffff:0a00:0001", "gid_index": 3, "gid_type": "RoCE v2", "interface": "eth1",
    "numa_node": 0,
}  # fmt: skip


def _with(facts: dict[str, Any], *transports: str, **changes: Any) -> dict[str, Any]:
    library = {**facts["ucx"], "transports": [*facts["ucx"]["transports"], *transports], "unloadable": {}}
    return {**facts, "ucx": library, "memlock_bytes": None, **changes}


def one_gpu(**changes: Any) -> dict[str, Any]:
    """One GPU without NVLink and without RDMA, as the recorded H200 was."""
    own = {"gpus": [_gpu(0, 0)], "nvidia_devices": 1, "open_driver": True}
    return _with(cpu(), "cuda_copy/cuda", "cuda_ipc/cuda", **own) | changes


def nvlink(**changes: Any) -> dict[str, Any]:
    """Two GPUs on NVLink and a RoCE port beside them."""
    topology = {
        "GPU0": {"GPU1": "NV18", "mlx5_0": "PIX"},
        "GPU1": {"GPU0": "NV18", "mlx5_0": "SYS"},
        "mlx5_0": {"GPU0": "PIX", "GPU1": "SYS"},
    }
    own = {"gpus": [_gpu(0, 18), _gpu(1, 18)], "topology": topology, "nvidia_devices": 2, "peermem": True}
    return _with(roce(), "cuda_copy/cuda", "cuda_ipc/cuda", **own) | changes


def roce(**changes: Any) -> dict[str, Any]:
    """A CPU node with a RoCE port."""
    return _with(cpu(), "rc_mlx5/mlx5_0:1", "ud_mlx5/mlx5_0:1", rdma=[PORT]) | changes


def container(**changes: Any) -> dict[str, Any]:
    """A container as a Pod gives it: own namespaces, Docker's shared memory, the NIC on the bus and not inside."""
    own = {"pid": "own", "ipc": "own", "user": "host"}
    hidden = "no RDMA device is in /sys/class/infiniband (driver, or network namespace)"
    return cpu(container="Kubernetes", namespaces=own, shm_free_bytes=64 << 20, rdma_hidden=hidden) | changes
