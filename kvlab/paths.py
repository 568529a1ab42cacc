"""Where notebooks, parameter files and recordings are, in a checkout and in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def shared_dir(kind: str) -> Path:
    """Return the folder of ``notebooks``, ``params`` or ``data``.

    In a checkout they lie beside the package; the wheel carries them in ``kvlab/share``.
    """
    installed = _PACKAGE / "share" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind
