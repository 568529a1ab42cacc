"""What this machine is, as far as a KV pull cares: read under a root folder, so that recorded trees can be read too.

Nothing here judges; :mod:`kvlab.check` does.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.capture import ucx_build

#: inodes of the first namespaces of a kernel (PROC_*_INIT_INO in include/linux/proc_ns.h)
_FIRST = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF, "user": 0xEFFFFFFD}
#: bits of a capability set (include/uapi/linux/capability.h)
_CAPABILITIES = {"ipc_lock": 14, "sys_ptrace": 19}
#: never a secret
_ENVIRONMENT = re.compile(
    r"(?!.*(?:SECRET|TOKEN|PASS|KEY))(?:(UCX|NIXL|VLLM_NIXL)_\w+|CUDA_VISIBLE_DEVICES|PYTORCH(_CUDA)?_ALLOC_CONF)"
)
_GPU_QUERY = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
#: link of ``nvidia-smi topo -m`` -> what is between two devices
LINKS = {"NV": "NVLink", "PIX": "one PCIe switch", "PXB": "several PCIe switches", "PHB": "a PCIe host bridge",
         "NODE": "the PCIe of one NUMA node", "SYS": "the link between CPU sockets"}  # fmt: skip

Command = Callable[[Sequence[str]], str]


def run(words: Sequence[str]) -> str:
    """Return what a command prints, nothing where it is missing, fails or hangs."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def facts(root: Path = Path("/"), env: Mapping[str, str] | None = None, command: Command = run) -> dict[str, Any]:
    """Gather everything that the rules of :mod:`kvlab.check` look at, as plain data."""
    env = os.environ if env is None else env
    plain = {k: v for k, v in env.items() if not k.startswith("UCX_")}
    return {
        "nixl": _nixl(),
        "ucx": ucx_build.look(plain),
        "gpus": gpus(command(_GPU_QUERY), command(["nvidia-smi", "nvlink", "--status"])),
        "topology": topology(command(["nvidia-smi", "topo", "-m"])),
        "nvidia_devices": len(list((root / "dev").glob("nvidia[0-9]*"))),
        "amd": (root / "dev/kfd").exists(),
        "peermem": any((root / "sys/module" / m).exists() for m in ("nvidia_peermem", "nv_peer_mem")),
        "open_driver": "Open Kernel Module" in text(root / "proc/driver/nvidia/version"),
        "rdma": rdma(root),
        "rdma_hidden": _hidden(root),
        "interfaces": interfaces(root),
        "container": _container(root, env),
        "namespaces": {n: _namespace(root, n) for n in _FIRST},
        "ptrace_scope": _int(text(root / "proc/sys/kernel/yama/ptrace_scope")),
        **{c: bool(int(_field(root, "status", r"CapEff:\s+(\w+)") or "0", 16) >> b & 1)
           for c, b in _CAPABILITIES.items()},
        "memlock_bytes": _int(_field(root, "limits", r"Max locked memory\s+(\w+)")),
        "shm_free_bytes": _shm(root),
        "sockets": {n: _int((text(root / "proc/sys/net" / n).split() or [""])[-1])
                    for n in ("core/rmem_max", "core/wmem_max", "ipv4/tcp_rmem", "ipv4/tcp_wmem")},
        "side_channel": side_channel(env),
        "environment": {k: v for k, v in sorted(env.items()) if _ENVIRONMENT.fullmatch(k)},
    }  # fmt: skip


def text(path: Path) -> str:
    """Return a small file without white space around it, '' where it cannot be read (drivers answer with EINVAL)."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def _int(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def _field(root: Path, file: str, pattern: str) -> str:
    found = re.search(pattern, text(root / "proc/self" / file))
    return found[1] if found else ""


def _nixl() -> dict[str, Any] | None:
    """Return NIXL's version and whether its UCX plugin turns GPU reads on by itself (ai-dynamo/nixl#2208)."""
    where = ucx_build.libraries()
    if where is None or where["plugin"] is None:
        return None
    version, plugin = None, Path(where["plugin"])
    for name in ("nixl", where["module"].replace("_", "-")):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
    reads = b"CUDA_IPC_ENABLE_GET_ZCOPY" in plugin.read_bytes()
    names = _nixl_variables(plugin.parent)
    return {"version": version, "module": where["module"], "gpu_reads_on": reads, "variables": names}


def _nixl_variables(folder: Path) -> list[str]:
    """Return whole names of environment variables in NIXL's libraries; compilers split some, so others exist."""
    found: set[str] = set()
    for path in [*folder.glob("*.so*"), *folder.parent.parent.glob(".nixl_cu*/libnixl*.so*")]:
        found |= {n.decode() for n in re.findall(rb"(?<=\0)(NIXL_[A-Z][A-Z0-9_]{2,40})(?=\0)", path.read_bytes())}
    return sorted(n for n in found if not n.startswith("NIXL_ERR_"))


def gpus(listing: str, nvlink: str) -> list[dict[str, Any]]:
    """Read ``nvidia-smi --query-gpu`` and ``nvidia-smi nvlink --status``: NVLinks that are up and in all, by GPU."""
    found: list[dict[str, Any]] = []
    for line in listing.splitlines():
        cells = [c.strip() for c in line.split(",")]
        if len(cells) == 4 and re.fullmatch(r"\d{1,4}", cells[0]):
            index, memory = int(cells[0]), _int(cells[2])
            found.append({"index": index, "name": cells[1], "memory_mib": memory, "driver": cells[3]})
    links: dict[int, list[str]] = {}
    current = -1
    for line in nvlink.splitlines():
        if head := re.match(r"GPU (\d{1,4}):", line):
            current = int(head[1])
        elif link := re.match(r"\s+Link \d+: (.+)", line):
            links.setdefault(current, []).append(link[1])
    for gpu in found:
        states = links.get(gpu["index"], [])
        gpu["nvlinks"], gpu["nvlinks_up"] = len(states), sum("GB/s" in s for s in states)
    return found


def topology(text: str) -> dict[str, dict[str, str]]:
    """Read the matrix of ``nvidia-smi topo -m``: device -> device -> NV18, PIX, PXB, PHB, NODE or SYS."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", x) for x in text.splitlines()]
    names = {m[1]: m[2] for x in lines if (m := re.match(r"\s+(NIC\d+): (\S+)", x))}
    head = next((x.split() for x in lines if re.match(r"\s+GPU\d", x)), [])
    columns = [c for c in head if re.fullmatch(r"(GPU|NIC)\d+|mlx\w+", c)]
    found = {}
    for line in lines:
        cells = line.split()
        if cells and cells[0] in columns and len(cells) > len(columns):
            row = zip(columns, cells[1:], strict=False)
            found[names.get(cells[0], cells[0])] = {names.get(c, c): v for c, v in row if v != "X"}
    return found


def rdma(root: Path) -> list[dict[str, Any]]:
    """Read the RDMA ports under /sys/class/infiniband: state, link layer, rate, first usable GID, NUMA node."""
    found = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        device = port.parent.parent
        gids = [(text(g), int(g.name)) for g in sorted((port / "gids").glob("*"), key=lambda g: int(g.name))]
        usable = [(g, i) for g, i in gids if g.replace("0", "").strip(":")]
        # RoCE v2 on an IPv4 address is what routed networks need; otherwise the first that is set.
        kinds = {i: text(port / f"gid_attrs/types/{i}") for _, i in usable}
        usable.sort(key=lambda x: (kinds[x[1]] != "RoCE v2", ":ffff:" not in x[0], x[1]))
        gid, index = usable[0] if usable else (None, None)
        found.append({
            "device": device.name, "port": int(port.name), "state": text(port / "state").split(": ")[-1],
            "link_layer": text(port / "link_layer"), "rate": text(port / "rate"), "gid": gid, "gid_index": index,
            "gid_type": kinds.get(index) if index is not None else None,
            "interface": text(port / f"gid_attrs/ndevs/{index}") or None,
            "numa_node": _int(text(device / "device/numa_node")),
        })  # fmt: skip
    return found


def _hidden(root: Path) -> str:
    """Say whether an RDMA adapter is on the PCI bus (class 0x0207, or Mellanox Ethernet) and cannot be used."""
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind, vendor = text(device / "class"), text(device / "vendor")
        if kind.startswith("0x0207") or (kind.startswith("0x0200") and vendor == "0x15b3"):
            if not list((root / "sys/class/infiniband").glob("*")):
                return "no RDMA device is in /sys/class/infiniband (driver, or network namespace)"
            return "" if list((root / "dev/infiniband").glob("uverbs*")) else "/dev/infiniband/uverbs* is not there"
    return ""


def interfaces(root: Path) -> list[dict[str, Any]]:
    """Read the network interfaces under /sys/class/net: state, speed, MTU."""
    found = []
    for path in sorted((root / "sys/class/net").glob("*")):
        speed, mtu = _int(text(path / "speed")), _int(text(path / "mtu"))
        up = text(path / "operstate") == "up" or path.name == "lo"
        found.append({"name": path.name, "up": up, "mtu": mtu, "mbit_per_s": speed if speed and speed > 0 else None})
    return found


def _container(root: Path, env: Mapping[str, str]) -> str | None:
    if "KUBERNETES_SERVICE_HOST" in env:
        return "Kubernetes"
    for file, name in ((".dockerenv", "Docker"), ("run/.containerenv", "Podman")):
        if (root / file).exists():
            return name
    return None


def _namespace(root: Path, name: str) -> str | None:
    """Return ``host`` for the kernel's first namespace, ``own`` for another, None where it cannot be seen."""
    try:
        inode = re.search(r"\d+", os.readlink(root / "proc/self/ns" / name))
    except OSError:
        return None
    return None if inode is None else "host" if int(inode[0]) == _FIRST[name] else "own"


def _shm(root: Path) -> int | None:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize


def side_channel(env: Mapping[str, str]) -> dict[str, Any]:
    """Try to bind the address that vLLM's NixlConnector would (defaults in vllm/envs.py: localhost, 5600)."""
    host, text = env.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"), env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    port, state = _int(text), "free"
    if port is None or not 0 < port < 65536:
        return {"host": host, "port": text, "state": "not a port"}
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
    except socket.gaierror:
        state = "unknown host"
    except OSError as error:
        known = {errno.EADDRINUSE: "in use", errno.EADDRNOTAVAIL: "not an address of this machine"}
        state = known.get(error.errno or 0, error.strerror or "cannot be bound")
    return {"host": host, "port": port, "state": state}
