"""kvlab: the transport, the bytes, the descriptors, the post and the drain of every KV pull, joined.

A notebook needs only the verbs named in ``__all__``.  They are loaded on first use, so that
``import kvlab`` stays quick and needs neither torch, vllm nor nixl.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

#: verb -> module that holds it
_VERBS = {
    "parameters": "kvlab.params",
    "run_or_replay": "kvlab.experiments",
    "load": "kvlab.runs",
    "show": "kvlab.charts",
}

__all__ = ["__version__", *_VERBS]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(importlib.import_module(_VERBS[name]), name)
    raise AttributeError(f"module 'kvlab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
