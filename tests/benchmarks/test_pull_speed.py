"""The pull against raw UCP, and what Python adds to NIXL's own time (run by hand: -m slow -s).

Needs a C compiler and UCX's headers (Debian: libucx-dev); links against the UCX that NIXL's wheel bundles,
so that both sides of the comparison run the same library.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kvlab.params import Arm
from kvlab.pull import Case, Options, Pair

pytestmark = pytest.mark.slow
ARMS = {"shared memory": "sm,self,cma,tcp", "TCP": "tcp"}
ROUNDS = 7


def bundled_libraries() -> Path:
    """Return the folder of the shared libraries that NIXL's wheel brings."""
    spec = importlib.util.find_spec("nixl_cu12")
    if spec is None or spec.origin is None:
        pytest.skip("nixl_cu12 is not installed")
    return Path(spec.origin).parents[1] / "nixl_cu12.libs"


@pytest.fixture(scope="module")
def raw_ucp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("cc") or not Path("/usr/include/ucp/api/ucp.h").is_file():
        pytest.skip("needs a C compiler and libucx-dev")
    libs = bundled_libraries()
    program = tmp_path_factory.mktemp("raw") / "raw_ucp"
    found = [str(next(libs.glob(f"lib{name}-*.so*"))) for name in ("ucp", "ucs")]
    source = Path(__file__).with_name("raw_ucp.c")
    flags = [f"-Wl,-rpath,{libs}", "-Wl,--allow-shlib-undefined"]
    subprocess.run(["cc", "-O2", str(source), "-o", str(program), *found, *flags], check=True)
    return program


def test_the_pull_is_as_fast_as_raw_ucp(raw_ucp: Path, tmp_path: Path) -> None:
    count, size = 2000, 125_000
    case = Case("2,000 x 125 KB", ((count, size),))
    for label, tls in ARMS.items():
        ours, raw, copies, sockets = [], [], [], []
        env = {**os.environ, "UCX_TLS": tls, "UCX_MODULE_DIR": str(bundled_libraries() / "ucx")}
        with Pair(Arm(label=label, env={"UCX_TLS": tls}), Options(), [case], tmp_path) as pair:
            pair.pull(case, verify=True)
            for _ in range(ROUNDS):
                ours += [case.bytes / row["xfer_us"] / 1e3 for row in pair.pull(case)]
                done = subprocess.run(
                    [str(raw_ucp), str(count), str(size), "3"], env=env, check=True, capture_output=True, text=True
                )
                raw += [case.bytes / float(line.split()[1]) / 1e3 for line in done.stdout.splitlines()[1:]]
                copies.append(case.bytes / pair.copy_limit(case.bytes) / 1e9)
                sockets.append(case.bytes / pair.socket_limit(case.bytes) / 1e9)
        middle = {k: float(np.median(v)) for k, v in (("kvlab", ours), ("raw UCP", raw))}
        limits = {k: float(np.median(v)) for k, v in (("memory copy", copies), ("plain socket", sockets))}
        print(f"\n{label}: " + ", ".join(f"{k} {v:.2f} GB/s" for k, v in {**middle, **limits}.items()))
        assert middle["kvlab"] > 0.8 * middle["raw UCP"]


def test_python_adds_less_than_two_percent(tmp_path: Path) -> None:
    case = Case("4,250 x 128 KiB", ((4250, 131072),))
    for label, tls in ARMS.items():
        with Pair(Arm(label=label, env={"UCX_TLS": tls}), Options(), [case], tmp_path) as pair:
            pair.pull(case, verify=True)
            rows = [row for _ in range(15) for row in pair.pull(case)]
        added = float(np.median([row["xfer_clock_us"] / row["xfer_us"] - 1 for row in rows]))
        print(f"\n{label}: Python adds {added:.2%} to NIXL's own time of a pull of 4,250 descriptors")
        assert added < 0.02
