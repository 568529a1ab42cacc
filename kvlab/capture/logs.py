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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from kvlab.errors import BadInput

Source = str | Path | BinaryIO
CHUNK = 1 << 18
#: of a longer line only this much is looked at
LINE_MAX = 1 << 13
#: what a line must hold to be looked at; debug, trace, request and data lines of UCX's own log are chatter
MARKS = (
    r"\||\+--|UCX(?:  (?:DI|[^TRD])| ?[^ ])|cfg|NIXL|nixl|NixlPush|KV |ZMQ|zmq\.error|messages transport|zero-copy"
    r"|get zcopy|ALLOC_CONF|across cluster|kv_buffer_device|failed to start|expandable_seg|/dev/shm|Heterogeneous TP"
    r"|Event: |Value: |/sys/class/|_bytes|PortXmit|PortRcv|port_xmit_|port_rcv_|counters: Lid|ethtool -"
)
ESCAPES = re.compile(r"(?:\x1b|\\x1b|\\033|\\e|\\u001b|␛|\^\[)\[[0-9;?]*[A-Za-z]|\[\d{1,3}(?:;\d{1,3})*m(?![\w.])|\x00")


def _zstd(stream: Any) -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)


def _utf16(stream: Any) -> Any:
    return codecs.EncodedFile(stream, "utf-8", "utf-16", errors="replace")


#: first bytes of a stream -> what reads it
_PACKED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"\x28\xb5\x2f\xfd": _zstd,
    b"\xfd7zX": lzma.LZMAFile,
    b"BZh": bz2.BZ2File,
    b"\xff\xfe": _utf16,
    b"\xfe\xff": _utf16,
}


class Input:
    """One log, decompressed by its first bytes (gzip, zstd, xz, bzip2; UTF-16 too), read as a stream.

    ``lines`` counts the lines read so far; ``damage`` says why a compressed stream ended early ('' if it
    did not).  Raises BadInput when the source cannot be opened.
    """

    def __init__(self, source: Source) -> None:
        named = str(source) if isinstance(source, str | Path) else str(getattr(source, "name", "stream"))
        self.name, self.lines, self.damage = "standard input" if named == "-" else named, 0, ""
        self._own: BinaryIO | None = None
        try:
            raw: Any = sys.stdin.buffer if str(source) == "-" else source
            if isinstance(raw, str | Path):
                raw = self._own = open(raw, "rb")  # noqa: SIM115
            stream: Any = raw if hasattr(raw, "peek") else io.BufferedReader(raw)
            head = stream.peek(4)[:4]
        except (OSError, ValueError, TypeError, AttributeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"{self.name} cannot be read: {reason}") from None
        self._stream = next((unpack(stream) for mark, unpack in _PACKED.items() if head.startswith(mark)), stream)

    def close(self) -> None:
        """Close what was opened here."""
        if self._own:
            self._own.close()

    def _read(self, most: int) -> bytes:
        try:
            return bytes(self._stream.read(most))
        except Exception as error:
            # Each decompressor has its own errors; what was read before the damage counts.
            self.damage = str(error) or type(error).__name__
            return b""

    def read(self, most: int) -> bytes:
        """Return the first ``most`` bytes, decompressed; damage ends them."""
        parts: list[bytes] = []
        while most > 0 and (data := self._read(min(most, CHUNK))):
            parts.append(data)
            most -= len(data)
        return b"".join(parts)

    def chunks(self) -> Iterator[bytes]:
        """Yield whole lines in chunks; damage ends the stream."""
        rest = b""
        while data := self._read(CHUNK):
            cut = data.rfind(b"\n") + 1
            if not cut:
                # A line without end must not grow in memory: its beginning is kept, the rest dropped.
                rest += data[: max(0, LINE_MAX - len(rest))]
                continue
            start = data.find(b"\n") if len(rest) >= LINE_MAX else 0
            yield rest + data[start:cut]
            rest = data[cut:]
        if rest:
            yield rest

    def candidates(self) -> Iterator[tuple[int, bytes]]:
        """Yield (line number, line) of the lines that hold a mark, and of a line after one that stops short.

        Lines that hold a ``|`` and do not end with one may have been wrapped: the next line is handed on too.
        Arrow searches all lines of a chunk at once: a step of Python for each would cost most of the time.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        wrapped = False
        for chunk in self.chunks():
            text = chunk.replace(b"\r\n", b"\n") if b"\r" in chunk else chunk
            text = text if text.endswith(b"\n") else text + b"\n"
            starts = np.append(0, np.flatnonzero(np.frombuffer(text, np.uint8) == 10) + 1).astype(np.int32)
            count = len(starts) - 1
            lines = pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(starts), pa.py_buffer(text)])
            hit = np.append(pc.match_substring_regex(lines, MARKS), False)
            hit[0] |= wrapped
            first, at = self.lines + 1, starts.tolist()
            self.lines += count
            for i in np.flatnonzero(hit[:-1] & np.asarray(pc.invert(pc.ends_with(lines, "|\n")))).tolist():
                hit[i + 1] |= text.find(b"|", at[i], at[i + 1]) >= 0
            wrapped = bool(hit[-1])
            for i in np.flatnonzero(hit[:-1]).tolist():
                yield first + i, text[at[i] : min(at[i + 1] - 1, at[i] + LINE_MAX)]


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
    "run the side that reads (decode) with UCX_PROTO_INFO=used and let it shut down cleanly: these tables are printed when "
    "the UCX worker is destroyed, so SIGKILL or os._exit loses them. UCX_PROTO_INFO=y prints at the first use, and is what "
    "UCX before 1.21 (NIXL before 1.1) needs: there 'used' prints nothing"
)

#: symptom: (code, words of which one must be there, pattern or None, what to do).  The first that fits counts.
_RULES: list[tuple[str, str, str | None, str]] = [
    ("cuda-ipc-get-disabled", "get zcopy disabled", None,
     "UCX turns cuda_ipc reads off where it sees no active NVLink, and writes stay on; so a pull (ucp_get) falls to "
     "another transport. Set UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on on the reading side, or use NixlPushConnector, or RDMA"),
    ("cuda-closed-before-ucx", "cuDevicePrimaryCtxGetState", r"error code 4\b|CUDA_ERROR_DEINITIALIZED",
     "CUDA had closed before the UCX worker did; UCX_PROTO_INFO=used prints no table then, UCX_PROTO_INFO=y does, at the "
     "first use. Otherwise harmless"),
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
    ("push-connector", "NixlPushConnector", r"connector with name",
     "this engine pushes: prefill writes KV into decode's memory (ucp_put), so there is no pull here, and the table of remote "
     "memory writes on the prefill side is what shows its transport"),
    ("shared-memory-full", "/dev/shm", r"(?i)no space|not enough|more available memory|failed",
     "/dev/shm is too small for UCX's shared-memory transports: docker run --shm-size, or a larger emptyDir of medium Memory"),
    ("cuda-ipc-open-failed", "cuIpcOpenMemHandle", None,
     "this process cannot map the peer's GPU memory: separate pods or containers must see each other's GPUs and share "
     "the IPC and PID namespaces"),
    ("memory-not-exportable", "cuIpcGetMemHandle|unable to export handle for VMM", None,
     "this memory cannot be exported over CUDA IPC: VMM or pool allocations (expandable_segments, cudaMallocAsync)"),
    ("tcp-connect-failed", "connect(fd", r"failed", "the peer's address cannot be reached over this interface: set UCX_NET_DEVICES to one "
     "that both nodes share (not docker0 or a management network)"),
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
    ("side-channel-timeout", "zmq.error.Again", None,
     "the prefill engine did not answer on the side channel: check VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT, a firewall, and "
     "whether its listener thread died"),
    ("engine-id-mismatch", "engine ID mismatch", None,
     "another engine answers on this side-channel port: an old process, or overlapping port ranges"),
    ("nixl-not-installed", "NIXL is not available", None, "pip install nixl (the wheel that fits the CUDA version)"),
    ("layout-mismatch", "Heterogeneous TP", None,
     "prefill and decode of different TP sizes need the same KV layout: set it on both sides as the message says"),
    ("kv-load-failure", "KV load failure", None, "the KV of these requests did not arrive; see the transfer failures before this line"),
    ("kv-blocks-expired", "Releasing expired KV blocks", None,
     "prefill freed blocks before decode had read them (0 workers: nobody read; fewer than the TP ranks: some did). "
     "Check the transport's speed first, then raise kv_lease_duration (newer vLLM) or "
     "VLLM_NIXL_ABORT_REQUEST_TIMEOUT (older)"),
    ("kv-blocks-invalid", "Potentially invalid KV blocks", None,
     "decode read blocks that were already freed: count this request's answer as wrong, not as slow"),
    ("expandable-segments-refused", "expandable_segments", r"(?i)incompatible|not supported|cannot",
     "this version refuses to start with expandable segments, because the KV pool could not be exported: unset the allocator option"),
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
    ("backend-error", "NIXL_ERR_BACKEND|createBackend: backend", None, "UCX failed below NIXL: the first UCX WARN or ERROR before this line is the cause"),
    ("peer-unreachable", "Destination is unreachable", None,
     "UCX found no common transport to the peer: compare UCX_TLS and UCX_NET_DEVICES of both sides"),
    ("engine-failed", "EngineCore failed to start", None, "a consequence: the first warning or error before this line is the cause"),
    ("failed-transfers", "nixl_num_failed_transfers", r"^\s*vllm:nixl_num_failed_transfers(?:_total)?(?:\{.*\})?\s+0*[1-9]",
     "pulls failed on this engine: its log has the reasons. The counter is cumulative: take the difference of two scrapes"),
    ("kv-blocks-expired", "nixl_num_kv_expired_reqs", r"^\s*vllm:nixl_num_kv_expired_reqs(?:_total)?(?:\{.*\})?\s+0*[1-9]",
     "prefill freed blocks before decode had read them (counted on the prefill side): check the transport's speed first"),
    ("nixl-error", "NIXL_ERR_", None, "an error of NIXL: look for the first UCX or NIXL warning before it"),
]  # fmt: skip
_COMPILED = [(code, words.split("|"), re.compile(p) if p else None, advice) for code, words, p, advice in _RULES]
_UCX_LEVEL = re.compile(r"\bUCX\s+(FATAL|ERROR|WARN)\b")
_NIXL_LEVEL = re.compile(r"^[EF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\]|\bNIXL (?:ERROR|WARNING)\b")
_HARMLESS = re.compile(r"set UCX_WARN_UNUSED_ENV_VARS=n|unused environment variables?: UCX_HOME\s*$")
_REASON = re.compile(r"([a-z]\w*)(?:/([^\s/]+))? - ([^,]+)")


def symptom(text: str) -> tuple[str, str] | None:
    """Return (code, advice) of the trouble that a line reports, or None."""
    if _HARMLESS.search(text) or "UCX  DIAG" in text:  # the peer closing its sockets is a diagnostic, not trouble
        return None
    for code, words, pattern, advice in _COMPILED:
        if any(w in text for w in words) and (pattern is None or pattern.search(text)):
            return code, advice
    outside = "outside the known list: read the line, and what stands before it"
    if level := _UCX_LEVEL.search(text):
        return "ucx-warning" if level[1] == "WARN" else "ucx-error", f"an error of UCX {outside}"
    return ("nixl-error", f"an error of NIXL {outside}") if _NIXL_LEVEL.search(text) else None


def reasons(text: str) -> list[dict[str, str | None]]:
    """Read ``self/memory - no peer failure handler, cma/memory - no am bcopy`` into rows."""
    tail = text[:3000].split("transport", 1)[-1].split(": ", 1)[-1]
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
    "counts-disagree": "UCX counted no use of the row that covers this size, and uses of others: check --descriptor-bytes",
    "no-row-for-size": "no row of the read table covers this size: the log is cut, or --descriptor-bytes is wrong",
    "not-pull-evidence": "put and active-message tables, lane lists and an echoed UCX_TLS do not show the pull. "
    + GET_EVIDENCE,
    "no-evidence": GET_EVIDENCE,
    "lanes-differ": "endpoints of the same locality got different transports: compare the GPU pairs, their NUMA nodes and "
    "topology, and the NIXL versions (0.10.0 lost cuda_ipc across NUMA nodes). A transport in no lane list cannot have been "
    "used; one that is listed need not have been",
    "failed-interval": "something happened in this interval and no transfer succeeded: look at "
    "vllm:nixl_num_failed_transfers on /metrics; the line weighs nothing in a mean",
    "input-damaged": "the compressed file is cut or damaged; only what stands before the damage was read",
    "self-endpoint-only": "the read table is of the process's own loopback endpoint, a pull goes to a peer. "
    + GET_EVIDENCE,
}


def as_list(sources: Source | Iterable[Source]) -> list[Source]:
    """Return ``sources`` as a list, one alone too."""
    if isinstance(sources, str | Path) or hasattr(sources, "read"):
        return [cast(Source, sources)]
    return list(sources)
