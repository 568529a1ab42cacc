"""What the UCX beside NIXL is: version, modules, transports here, and the environment variables it knows.

The wheel has no ``ucx_info``, so a child process loads the library and asks it (``ucp_context_print_info``,
``ucs_config_parser_print_all_opts``: what ``ucx_info -d -c`` calls).  A child, because UCX puts handlers into the
process that loads it.  Modules that cannot load here (no ``libcuda.so.1``) are read for their names instead.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_PRINT_CONFIG, _PRINT_HIDDEN = 1, 8  # UCS_CONFIG_PRINT_CONFIG, UCS_CONFIG_PRINT_HIDDEN
_FIELD_FEATURES, _RMA_AND_AM = 1, 2 | 64  # UCP_PARAM_FIELD_FEATURES; UCP_FEATURE_RMA | UCP_FEATURE_AM


def libraries() -> dict[str, Any] | None:
    """Find NIXL's wheel and its UCX, or a UCX of the system; None without either."""
    for module in _variants():
        spec = importlib.util.find_spec(module)
        if spec and spec.origin:
            site = Path(spec.origin).parent.parent
            folder = site / f"{module}.libs"
            if found := sorted(folder.glob("libucp-*.so*")):
                plugin = sorted(folder.glob("nixl/libplugin_UCX.so")) + sorted(site.glob(f".{module}.*/plugins/*UCX*"))
                return {
                    "module": module,
                    "ucp": str(found[0]),
                    "folder": str(folder),
                    "plugin": str(plugin[0]) if plugin else None,
                }
    system = ctypes.util.find_library("ucp")
    return {"module": None, "ucp": system, "folder": None, "plugin": None} if system else None


def _variants() -> list[str]:
    """Choose as the nixl package does, by the CUDA of torch, read from its file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    version = Path(spec.origin).parent / "version.py" if spec and spec.origin else None
    text = version.read_text("utf-8") if version and version.is_file() else ""
    found = re.search(r"^cuda\b.*= '(\d+)", text, re.M)
    return [f"nixl_cu{found[1]}"] if found else ["nixl_cu13", "nixl_cu12", "nixl"]


def look(env: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what the library says of itself and this machine under ``env``, or None where there is none.

    :returns: ``version``, ``modules`` (in the wheel), ``unloadable`` (those that cannot load -> why), ``transports``
        (``tcp/eth0``), ``variables`` (name -> default), ``warnings``, ``cma`` (whether a child process may read
        this one's memory), ``error``, and the paths of :func:`libraries`
    """
    where = libraries()
    if where is None:
        return None
    block = ctypes.create_string_buffer(b"kvlab", 8)
    words = [sys.executable, "-m", __name__, where["ucp"], str(os.getpid()), str(ctypes.addressof(block))]
    here = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [here, env.get("PYTHONPATH", "")]))
    try:
        done = subprocess.run(
            words, env={**env, "PYTHONPATH": paths}, capture_output=True, text=True, errors="replace", timeout=20
        )
        text, error = done.stdout, "" if done.returncode == 0 else f"ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        text, error = "", "gave no answer within 20 s"
    said = {**where, **parse(text), "error": error}
    inherited = [v.removeprefix("UCX_SELF_") for v in said["variables"] if v.startswith("UCX_SELF_")]
    if where["folder"]:
        said["variables"] |= _unloaded(where["folder"], said["unloadable"], inherited)
    return said


def parse(text: str) -> dict[str, Any]:
    """Read what the child printed."""
    version = re.search(r"^kvlab version (\S+)", text, re.M)
    return {
        "version": version[1] if version else None,
        "transports": re.findall(r"^#\s+resource \d+\s+:.*-- (\S+/\S+)", text, re.M),
        "variables": dict(re.findall(r"^(UCX_[A-Z0-9_]+)(?:=(.*)| \(deprecated\))$", text, re.M)),
        "warnings": re.findall(r"UCX +(?:WARN|ERROR) +(.*)", text),
        "modules": re.findall(r"^kvlab module (\w+)", text, re.M),
        "unloadable": dict(re.findall(r"^kvlab module (\w+) cannot load: (.+)", text, re.M)),
        "cma": "kvlab cma yes" in text if "kvlab cma" in text else None,
    }


def _unloaded(folder: str, modules: Iterable[str], inherited: Iterable[str]) -> dict[str, None]:
    """Return the variables of modules that cannot load: each prefix in the file with each name beside it.

    Names that every transport inherits are in another library: ``inherited`` has them.
    """
    found: dict[str, None] = {}
    for module in modules:
        path = next(iter(Path(folder, "ucx").glob(f"libuct_{module}.so*")))
        words = {w.decode() for w in re.findall(rb"(?<=\0)([A-Z][A-Z0-9_]{1,40})(?=\0)", path.read_bytes())}
        ends = [*(w for w in words if not w.endswith("_")), *inherited]
        found |= {f"UCX_{start}{end}": None for start in words if start.endswith("_") for end in ends}
    return found


def main(ucp_path: str, pid: int, address: int) -> None:
    """The child: print version, resources and configuration; ends without Python's clean-up, which UCX disturbs."""
    libc = ctypes.CDLL(None)
    out = ctypes.c_void_p.in_dll(libc, "stdout")
    ucp = ctypes.CDLL(ucp_path, mode=ctypes.RTLD_GLOBAL)
    ucs = _beside(ucp_path, "libucs")
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    print("kvlab version", ucp.ucp_get_version_string().decode(), flush=True)
    print("kvlab cma", "yes" if _reads(libc, pid, address) else "no", flush=True)
    major, minor, release = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(release))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    # Larger than any version's ucp_params_t; only the fields named in the mask are read.
    params = (ctypes.c_uint64 * 64)(_FIELD_FEATURES, _RMA_AND_AM)
    failed = ucp.ucp_config_read(None, None, ctypes.byref(config))
    failed = failed or ucp.ucp_init_version(major, minor, params, config, ctypes.byref(context))
    if not failed:
        ucp.ucp_context_print_info(context, out)
    known = ctypes.c_void_p(ctypes.addressof(ctypes.c_void_p.in_dll(ucs, "ucs_config_global_list")))
    ucs.ucs_config_parser_print_all_opts(out, b"UCX_", _PRINT_CONFIG | _PRINT_HIDDEN, known, None)
    libc.fflush(out)
    for path in sorted(Path(ucp_path).parent.glob("ucx/libuct_*.so*")):
        why = ""
        try:
            ctypes.CDLL(str(path))
        except OSError as error:
            why = f" cannot load: {error}"
        print(f"kvlab module {path.name.removeprefix('libuct_').split('.')[0]}{why}", flush=True)
    os._exit(0)


def _beside(ucp_path: str, name: str) -> ctypes.CDLL:
    """Load UCX's own base library from the folder of ``ucp_path`` (a wheel), or the system's."""
    found = sorted(Path(ucp_path).parent.glob(f"{name}-*.so*")) if "/" in ucp_path else []
    return ctypes.CDLL(str(found[0]) if found else f"{name}.so.0", mode=ctypes.RTLD_GLOBAL)


def _reads(libc: ctypes.CDLL, pid: int, address: int) -> bool:
    """Read five bytes out of another process as UCX's cma does (process_vm_readv(2))."""
    ours = ctypes.create_string_buffer(8)
    vectors = [(ctypes.c_size_t * 2)(a, 5) for a in (ctypes.addressof(ours), address)]
    count = libc.process_vm_readv(pid, ctypes.byref(vectors[0]), 1, ctypes.byref(vectors[1]), 1, 0)
    return bool(count == 5 and ours.value == b"kvlab")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
