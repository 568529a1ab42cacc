"""A quicker start: what is imported on the way to charts and notebooks and used by neither."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import Any


def without_iris() -> None:
    """Import jsonschema, unless it is there, without its grammar of IRIs, which takes 1.7 s at every start.

    Jupyter brings that grammar; altair and papermill import jsonschema, and no schema of theirs has an IRI.
    """
    modules: dict[str, Any] = sys.modules
    if {"jsonschema", "rfc3987_syntax"} & set(modules):
        return
    modules["rfc3987_syntax"] = None  # what is None is not found
    try:
        with contextlib.suppress(ImportError):
            importlib.import_module("jsonschema")
    finally:
        del modules["rfc3987_syntax"]
