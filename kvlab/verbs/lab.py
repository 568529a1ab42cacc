"""``kvlab lab``: open JupyterLab on notebooks/; from an installed wheel, on a copy that is yours to change."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from kvlab.errors import BadInput
from kvlab.paths import shared_dir


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "--folder", default="kvlab-notebooks", help="where an installed kvlab copies them (default: kvlab-notebooks)"
    )
    parser.add_argument("jupyter", nargs="*", help="words for jupyter lab, after --")


def main(args: argparse.Namespace) -> int:
    """Copy the notebooks where needed (those that are not there yet) and hand over to JupyterLab."""
    source = shared_dir("notebooks")
    # In a checkout the notebooks are the user's own files already.
    folder = source if source.parent.name != "share" else Path(args.folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for notebook in sorted(source.glob("*.ipynb")):
            if not (folder / notebook.name).exists():
                shutil.copy2(notebook, folder / notebook.name)
    except OSError as error:
        raise BadInput(
            f"cannot put the notebooks into {folder}: {error.strerror}; choose another with --folder"
        ) from None
    words = [sys.executable, "-m", "jupyterlab", "--notebook-dir", str(folder), *args.jupyter]
    os.execv(sys.executable, words)
