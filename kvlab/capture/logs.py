# ruff: noqa: E501  (the table of symptoms is easier to read unwrapped)
"""Reading any log as a stream: decompression, the lines worth a look, and the known symptoms in them.

Memory stays bounded: a log is read in chunks, a chunk is searched for a few marks, and only lines that hold
one are handed on.  Line numbers count newlines, as ``grep -n`` does.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import re
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from kvlab.errors import BadInput

Source = str | Path | BinaryIO
CHUNK = 1 << 18
#: of a longer line only this much is looked at
LINE_MAX = 1 << 13
#: what a line must hold to be looked at
MARKS = (
    b"|", b"+--", b"UCX", b"NIXL", b"nixl", b"KV ", b"cfg", b"messages transport", b"zero-copy",
    b"ALLOC_CONF", b"ZMQError", b"across cluster", b"kv_buffer_device", b"failed to start", b"remote memory", b"Event: ",
    b"zcopy",
)  # fmt: skip
#: marks that are searched only where their leader is in the chunk
FOLLOWERS = {b"Event: ": (b"Value: ",)}
#: marks of counter dumps, searched where the beginning of the stream has one
COUNTER_MARKS = (b"/sys/class/", b"_bytes", b"Port")
ESCAPES = re.compile(r"(?:\x1b|\\x1b|\\033|\\e|\\u001b|␛|\^\[)\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m(?![\w.])|\x00")


def name_of(source: Source) -> str:
    """Return what to call a source in a message."""
    if isinstance(source, str | Path):
        return "standard input" if str(source) == "-" else str(source)
    return str(getattr(source, "name", "stream"))


def open_stream(source: Source) -> BinaryIO:
    """Open a path, ``-`` or a binary stream, decompressed by its first bytes (gzip, zstd, xz, bzip2).

    Raises BadInput when it cannot be opened.
    """
    try:
        if isinstance(source, str | Path):
            raw = sys.stdin.buffer if str(source) == "-" else open(source, "rb")  # noqa: SIM115
        else:
            raw = cast(Any, source)
        stream: Any = raw if hasattr(raw, "peek") else io.BufferedReader(cast(Any, raw))
        head = stream.peek(4)[:4]
    except (OSError, ValueError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{name_of(source)} cannot be read: {reason}") from None
    if head[:2] == b"\x1f\x8b":
        return cast(BinaryIO, gzip.GzipFile(fileobj=stream))
    if head == b"\x28\xb5\x2f\xfd":
        try:
            import zstandard
        except ImportError:
            raise BadInput(f"{name_of(source)} is zstd; pip install zstandard, or decompress it first") from None
        return cast(BinaryIO, zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    if head == b"\xfd7zX":
        return cast(BinaryIO, lzma.LZMAFile(stream))
    if head[:3] == b"BZh":
        return cast(BinaryIO, bz2.BZ2File(stream))
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return cast(BinaryIO, codecs.EncodedFile(stream, "utf-8", "utf-16", errors="replace"))
    return cast(BinaryIO, stream)


def chunks(stream: BinaryIO, damage: list[str]) -> Iterator[bytes]:
    """Yield whole lines in chunks; damage in a compressed stream ends it and is noted in ``damage``."""
    rest, skipping = b"", False
    while True:
        try:
            data = stream.read(CHUNK)
        except (OSError, EOFError, zlib.error, lzma.LZMAError, ValueError) as error:
            damage.append(str(error))
            data = b""
        except Exception as error:  # zstandard has an error class of its own
            if type(error).__name__ != "ZstdError":
                raise
            damage.append(str(error))
            data = b""
        if not data:
            if rest and not skipping:
                yield rest
            return
        cut = data.rfind(b"\n") + 1
        if not cut:
            # A line without end must not grow in memory: its beginning is kept, the rest dropped.
            if len(rest) < LINE_MAX:
                rest += data[: LINE_MAX - len(rest)]
            continue
        if len(rest) >= LINE_MAX:
            first = data.find(b"\n")
            yield rest + data[first:cut]
        else:
            yield rest + data[:cut]
        rest = data[cut:]


def candidates(stream: BinaryIO, damage: list[str], marks: tuple[bytes, ...] = MARKS) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of the lines that hold a mark, and of a line after one that stops short.

    Lines that hold a ``|`` and do not end with one may have been wrapped: the next line is handed on too.
    """
    number, first = 1, True
    for chunk in chunks(stream, damage):
        if first:
            marks, first = marks + tuple(m for m in COUNTER_MARKS if m in chunk), False
        lines_in = chunk.count(b"\n")
        active = [m for m in marks if m in chunk]
        active += [f for m in active for f in FOLLOWERS.get(m, ())]
        if chunk.count(b"|") > lines_in:  # mostly tables: splitting is quicker than searching
            others, carry = [m for m in active if m not in (b"|", b"+--")], False
            for i, line in enumerate(chunk.split(b"\n"), number):
                if b"|" in line:
                    carry = not line.endswith(b"|")
                    yield i, line
                elif carry or b"+--" in line or any(m in line for m in others):
                    carry = False
                    yield i, line
        elif active:
            starts = set()
            for mark in active:
                at, bar = chunk.find(mark), mark == b"|"
                while at >= 0:
                    starts.add(chunk.rfind(b"\n", 0, at) + 1)
                    end = chunk.find(b"\n", at)
                    if end < 0:
                        break
                    if bar and chunk[end - 1] != 0x7C:
                        starts.add(end + 1)
                    at = chunk.find(mark, end)
            here, at = number, 0
            for start in sorted(starts):
                here += chunk.count(b"\n", at, start)
                at = start
                end = chunk.find(b"\n", start)
                yield here, chunk[start : end if end >= 0 else len(chunk)]
        number += lines_in


def clean(line: bytes) -> str:
    """Decode one line: colours removed, whole or half stripped; the tail that docker's JSON adds dropped."""
    text = line[:LINE_MAX].decode("utf-8", "replace")
    if "[" in text:
        text = ESCAPES.sub("", text)
    if text.startswith('{"'):
        text = text.split('\\n"', 1)[0]
    return text.rstrip("\r\n")


# -------------------------------------------------------------------------------------------- symptoms

GET_EVIDENCE = (
    "run the side that reads (decode) with UCX_PROTO_INFO=used and let it close its NIXL agents cleanly: the tables "
    "are printed when the UCX worker is destroyed, so SIGKILL or os._exit loses them (UCX_PROTO_INFO=y prints at once)"
)

#: symptom: (code, words that must be there, pattern or None, what to do).  The first that fits counts.
_RULES: list[tuple[str, str, str | None, str]] = [
    ("cuda-ipc-get-disabled", "get zcopy disabled", None,
     "UCX turns cuda_ipc reads off where it sees no active NVLink, and writes stay on; so a pull (ucp_get) falls to "
     "another transport. Set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on on the reading side, or use NixlPushConnector, or RDMA"),
    ("no-active-message-transport", "no active messages transport", None,
     "UCX_TLS allows no transport that can carry active messages with a peer-failure handler (NIXL asks for one; sm, "
     "self, cuda_ipc and cma have none): add tcp or rc, e.g. UCX_TLS=cuda_ipc,cuda_copy,tcp. The payload still "
     "takes cuda_ipc. If a 'not available' warning stands before this line, that is the cause"),
    ("net-device-not-available", "network device", r"network devices? .* (?:is|are) not available",
     "UCX_NET_DEVICES names a device that this node does not have; names differ between nodes, so set it per node from "
     "the list in the message. No '(ib)' in the list: RDMA devices are not in the container. Harmless when another "
     "named device exists and the run succeeds"),
    ("transport-not-available", "not available", r"transports? '.*' (?:is|are) not available",
     "a name in UCX_TLS is misspelt or not in this UCX build; UCX goes on with the rest, silently slower. The list in "
     "the message is what this build has"),
    ("no-usable-transport", "no usable transports/devices", None,
     "nothing of UCX_TLS on UCX_NET_DEVICES exists here: read the warning before this line"),
    ("unused-variable", "unused environment variable", None,
     "UCX ignored this variable: misspelt (see the suggestion), or its transport is not in UCX_TLS. UCX_HOME and "
     "the like are harmless"),
    ("emulation-refused", "No zero-copy protocol found", None,
     "UCX_PROTO_EMULATION_ENABLE=n made the silent fallback an error: no transport can read this memory pair. For "
     "GPU memory on one node set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on, else allow RDMA (UCX_TLS with rc) and GPUDirect"),
    ("memory-lock-limit", "ulimit -l", None, "raise the locked-memory limit (ulimit -l unlimited, in containers --ulimit memlock=-1)"),
    ("memory-registration", "ibv_reg_mr", None,
     "the NIC could not register this memory: check nvidia_peermem or dmabuf for GPU memory, and ulimit -l"),
    ("vram-seen-as-host", "VRAM memory is detected as host", None,
     "this UCX has no CUDA or ROCm support: install the wheel that fits (nixl-cu12, nixl-cu13) and check libcuda.so.1"),
    ("ucx-without-cuda", "UCX CUDA support was not found", None,
     "GPUs are here but UCX cannot use them: libcuda.so.1 must be visible, and the wheel must fit (nixl-cu12, nixl-cu13)"),
    ("ucx-without-ib", "accelerated IB support was not found", None,
     "RDMA NICs are here but UCX cannot drive them: install rdma-core with the mlx5 provider, map /dev/infiniband"),
    ("compatibility-hash-mismatch", "compatibility hash mismatch", None,
     "prefill and decode are configured differently, no data moved, UCX is not at fault. The hash cannot say what "
     "differs: compare vLLM version, model, dtype, cache dtype, attention backend, KV layout, hybrid KV manager, "
     "speculative config and connector class of both start-ups. enforce_handshake_compat=false only hides it "
     "and can produce garbage"),
    ("plugin-missing", "missing plugin", None,
     "the NIXL plugin did not load, so no backend exists although the agent says Initialized: run ldd on the plugin "
     "(libcuda.so.1 missing?), check NIXL_PLUGIN_DIR and that the wheel fits the CUDA version (nixl-cu12, nixl-cu13)"),
    ("plugin-missing", "Failed to load plugin", None,
     "run ldd on the plugin (a missing shared library such as libcuda.so.1), check NIXL_PLUGIN_DIR"),
    ("plugin-missing", "No plugins available", None, "NIXL found no backend plugin: check NIXL_PLUGIN_DIR and the wheel"),
    ("no-backend-for-memory", "no available backends for mem type", None,
     "no loaded backend takes this memory type: a plugin did not load (see warnings before this line)"),
    ("handshake-listener-died", "nixl_handshake_listener", r"Exception in thread",
     "the side-channel listener died in its thread: the engine stays up and requests hang. See the ZMQ error next to it"),
    ("side-channel-wrong-host", "Cannot assign requested address", None,
     "not a clash: VLLM_NIXL_SIDE_CHANNEL_HOST is an address of another node. Set it to this node's own address"),
    ("side-channel-port-in-use", "Address already in use", None,
     "two engines share a side-channel port: give each its own VLLM_NIXL_SIDE_CHANNEL_PORT, bases apart by at least the "
     "data-parallel size (rank n takes base + n)"),
    ("kv-blocks-expired", "Releasing expired KV blocks", None,
     "prefill freed blocks before decode had read them (0 workers: nobody read; fewer than the TP ranks: some did). "
     "Check the transport's speed first, then raise kv_lease_duration (newer vLLM) or "
     "VLLM_NIXL_ABORT_REQUEST_TIMEOUT (older)"),
    ("kv-blocks-invalid", "Potentially invalid KV blocks", None,
     "decode read blocks that were already freed: count this request's answer as wrong, not as slow"),
    ("transfer-failure", "NIXL transfer failure", None,
     "this request's KV did not arrive; the failure type says at which step (handshake_failed: no data moved)"),
    ("expandable-segments", "expandable_segments:True", None,
     "memory of expandable segments (VMM) cannot be exported over legacy CUDA IPC; registration succeeds and the "
     "bytes go by software emulation. Allocate the KV pool with plain cudaMalloc, or allow RDMA"),
    ("ray-dropped-lines", "across cluster", r"repeated \d+x? ?(?:times )?across cluster",
     "Ray dropped repeated lines of other workers, so tables may be missing: RAY_DEDUP_LOGS=0"),
    ("endpoint-failure", "retry count exceeded", None, "the peer or the fabric stopped answering: check the other side's log first"),
    ("endpoint-failure", "Endpoint timeout", None, "the peer stopped answering: check the other side's log first"),
    ("endpoint-failure", "Connection reset by remote peer", None, "the peer process went away: its log has the cause"),
    ("remote-disconnected", "NIXL_ERR_REMOTE_DISCONNECT", None, "the other agent went away: its log has the cause"),
    ("metadata-missing", "NIXL_ERR_NOT_FOUND", r"(?i)loadRemoteMD|remote agent|metadata|agent '|getXfer|createXfer|makeConn",
     "the remote agent's metadata is not there: not exchanged yet, or invalidated after a disconnect"),
    ("not-found", "NIXL_ERR_NOT_FOUND", None,
     "three causes: at registerMem no backend is loaded (plugin); at a transfer the remote metadata has not arrived; "
     "later, the peer disconnected"),
    ("backend-error", "NIXL_ERR_BACKEND", None, "UCX failed below NIXL: the first UCX WARN or ERROR before this line is the cause"),
    ("backend-error", "createBackend: backend", None, "UCX failed below NIXL: the first UCX WARN or ERROR before this line is the cause"),
    ("peer-unreachable", "Destination is unreachable", None,
     "UCX found no common transport to the peer: compare UCX_TLS and UCX_NET_DEVICES of both sides"),
    ("engine-failed", "EngineCore failed to start", None, "a consequence: the first warning or error before this line is the cause"),
    ("nixl-error", "NIXL_ERR_", None, "an error of NIXL: look for the first UCX or NIXL warning before it"),
]  # fmt: skip
_COMPILED = [(code, words, re.compile(p) if p else None, advice) for code, words, p, advice in _RULES]
_UCX_LEVEL = re.compile(r"\bUCX\s+(FATAL|ERROR|WARN)\b")
_NIXL_LEVEL = re.compile(r"^[EF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\]|\bNIXL (?:ERROR|WARNING)\b")
_HARMLESS = re.compile(r"set UCX_WARN_UNUSED_ENV_VARS=n|unused environment variables?: UCX_HOME\s*$")
_REASON = re.compile(r"([a-z]\w*)(?:/(\S+))? - ([^,]+)")


def symptom(text: str) -> tuple[str, str] | None:
    """Return (code, advice) of the trouble that a line reports, or None."""
    if _HARMLESS.search(text):
        return None
    for code, words, pattern, advice in _COMPILED:
        if words in text and (pattern is None or pattern.search(text)):
            return code, advice
    level = _UCX_LEVEL.search(text)
    if level:
        code = "ucx-warning" if level[1] == "WARN" else "ucx-error"
        return code, "an error of UCX outside the known list: read the line, and what stands before it"
    if _NIXL_LEVEL.search(text):
        return (
            "nixl-error",
            "an error of NIXL outside the known list: read the line, and what stands before it",
        )
    return None


def reasons(text: str) -> list[dict[str, str | None]]:
    """Read ``self/memory - no peer failure handler, cma/memory - no am bcopy`` into rows."""
    tail = text.split("transport", 1)[-1].split(": ", 1)[-1]
    return [{"transport": t, "device": d, "reason": r.strip()} for t, d, r in _REASON.findall(tail)]


#: what to do about what only the whole reading shows
ADVICE = {
    "software-emulation": "the read is emulated by active messages through the CPU (0.3 to 1 GB/s class on TCP). On one "
    "node, in this order: GPUs of separate pods or containers do not see each other; no active NVLink, so cuda_ipc reads "
    "are off (UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on); VMM memory (expandable_segments); cuda_ipc not in UCX_TLS. Between "
    "nodes: no RDMA transport (rc) allowed or available",
    "staged-through-host": "RDMA without GPUDirect: check nvidia_peermem or dmabuf, and UCX_IB_GPU_DIRECT_RDMA",
    "estimate": "'(?)' is UCX's estimate before it knows the remote side: take a table printed after the transfers (used)",
    "config-cut": "UCX cuts the lane list at 127 characters; lanes and shares past the cut are not known",
    "row-cut": "the line was cut; what stands behind the cut is not known",
    "row-without-header": "its header was cut or belongs to another thread; it decides nothing. Give the whole log",
    "header-without-rows": "the rows of this read table are missing; give the whole log",
    "conflicting-reads": "several read tables disagree: give one rank's log at a time, or UCX_PROTO_INFO=used for counts",
    "descriptor-size-assumed": "the row depends on the size: give --descriptor-bytes (bytes of one KV block per layer)",
    "no-row-for-size": "no row of the read table covers this size: the log is cut, or --descriptor-bytes is wrong",
    "not-pull-evidence": "put and active-message tables, lane lists and an echoed UCX_TLS do not show the pull. "
    + GET_EVIDENCE,
    "no-evidence": GET_EVIDENCE,
    "failed-interval": "something happened in this interval and no transfer succeeded: look at "
    "vllm:nixl_num_failed_transfers on /metrics; the line weighs nothing in a mean",
    "input-damaged": "the compressed file is cut or damaged; only what stands before the damage was read",
    "self-endpoint-only": "the read table is of the process's own loopback endpoint, a pull goes to a peer. "
    + GET_EVIDENCE,
}


def names(sources: Source | Iterable[Source]) -> list[Source]:
    """Return ``sources`` as a list, one alone too."""
    if isinstance(sources, str | Path) or hasattr(sources, "read"):
        return [cast(Source, sources)]
    return list(sources)
