"""One side of the pull, in a process of its own: ``python -m kvlab.pull_agent FD PARENT``.

Speaks over the inherited socket FD with :class:`kvlab.pull.Pair`; imports NIXL and, for VRAM, torch.
Everything that NIXL and UCX print goes to stdout and stderr, which the parent sends to a log.
"""

from __future__ import annotations

import gc
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.placement.local import die_with_parent

# An odd multiplier makes every 8-byte word of the pool different (a bijection modulo 2**64), so a block
# that landed in the wrong place cannot pass.  2**64 / golden ratio, as in Knuth's multiplicative hashing.
_GOLDEN = 0x9E3779B97F4A7C15


def pattern(first_byte: int, size: int, seed: int) -> npt.NDArray[np.uint64]:
    """Return the words that the target holds in [first_byte, first_byte + size); both multiples of 8."""
    words = np.arange(first_byte // 8, (first_byte + size) // 8, dtype=np.uint64)
    return words * np.uint64(_GOLDEN) + np.uint64(seed)


class InputError(Exception):
    """The user's environment or numbers made this fail."""


class Agent:
    """A NIXL agent with one registered pool."""

    def __init__(self, m: dict[str, Any]) -> None:
        self.seed, self.gpu, self.memory = m["seed"], m["gpu"], m["memory"]
        size = m["pool_bytes"]
        # The pool is allocated before the agent, as an engine's KV cache is.
        self.tensor: Any = None
        if self.memory == "VRAM":
            import torch

            if not torch.cuda.is_available():
                raise InputError("has no GPU (memory: VRAM); use memory: DRAM here")
            if self.gpu >= torch.cuda.device_count():
                raise InputError(f"has no GPU {self.gpu}; this machine has {torch.cuda.device_count()}")
            free, _ = torch.cuda.mem_get_info(self.gpu)
            if size > free:
                raise InputError(f"wants {size / 1e9:.1f} GB on GPU {self.gpu} and {free / 1e9:.1f} GB are free")
            self.tensor = torch.zeros(size, dtype=torch.uint8, device=f"cuda:{self.gpu}")
            if m["role"] == "target":
                step = 1 << 28
                for start in range(0, size, step):
                    words = pattern(start, min(step, size - start), self.seed).view(np.uint8)
                    self.tensor[start : start + words.size] = torch.from_numpy(words).to(self.tensor.device)
            torch.cuda.synchronize(self.gpu)
            self.base = self.tensor.data_ptr()
        else:
            self.pool = np.zeros(size, dtype=np.uint8)
            if m["role"] == "target":
                step = 1 << 26
                for start in range(0, size, step):
                    end = min(start + step, size)
                    self.pool[start:end] = pattern(start, end - start, self.seed).view(np.uint8)
            else:
                self.pool.fill(1)  # touch every page: the first pull must not pay for the kernel's zeroing
            self.base = self.pool.ctypes.data
        from nixl._api import nixl_agent, nixl_agent_config

        try:
            self.agent: Any = nixl_agent(
                m["name"],
                nixl_agent_config(
                    enable_prog_thread=m["progress"],
                    capture_telemetry=True,
                    num_threads=m["threads"],
                    backends=["UCX"],
                ),
            )
        except Exception as error:
            raise InputError(f"could not make a NIXL agent with UCX ({error}); look at UCX_TLS") from error
        if "UCX" not in self.agent.backends:
            raise InputError("has no UCX backend: NIXL could not load its UCX plugin (a missing shared library?)")
        self.device = self.gpu if self.memory == "VRAM" else 0
        self.registered = self.agent.register_memory([(self.base, size, self.device, "")], self.memory)
        self.lists: dict[str, tuple[Any, Any, Any, Any]] = {}

    def open_reply(self) -> dict[str, Any]:
        """What the controller hands to the other side."""
        import importlib.metadata

        versions = {"nixl": importlib.metadata.version("nixl")}
        return {"metadata": self.agent.get_agent_metadata(), "base": self.base, "versions": versions}

    def connect(self, m: dict[str, Any]) -> dict[str, Any]:
        """Take the target's metadata in and prepare both descriptor lists of every case."""
        peer = self.agent.add_remote_agent(m["metadata"])
        peer = peer.decode() if isinstance(peer, bytes) else peer
        remote_device = m["gpu"] if self.memory == "VRAM" else 0
        for name, (offsets, lengths) in m["lists"].items():
            sides = []
            for who, base, device in (("NIXL_INIT_AGENT", self.base, self.device), (peer, m["base"], remote_device)):
                table = np.empty((len(offsets), 3), dtype=np.uint64)
                table[:, 0] = offsets + base
                table[:, 1] = lengths
                table[:, 2] = device
                sides.append(self.agent.prep_xfer_dlist(who, table, self.memory))
            self.lists[name] = (*sides, offsets, lengths)
        return {}

    def serve(self, end: Connection) -> None:
        """Drive progress until the controller speaks, as an engine's target side does by looking for
        notifications; without a progress thread nothing else moves a software-emulated read."""
        look, n = self.agent.get_new_notifs, 0
        while True:
            look()
            n += 1
            # Asking the socket costs a system call; a look without traffic costs less than a microsecond.
            if n % 256 == 0 and end.poll(0):
                return

    def pull(self, m: dict[str, Any]) -> dict[str, Any]:
        """Post the READs of one round, poll until all are done, and return what each cost."""
        agent, clock = self.agent, time.perf_counter_ns
        local, remote, offsets, lengths = self.lists[m["case"]]
        if m["verify"]:
            self._clear()
        handles = [agent.make_prepped_xfer("READ", local, ours, remote, theirs, b"kv") for ours, theirs in m["indices"]]
        began, posted, ended = [0] * len(handles), [0] * len(handles), [0] * len(handles)
        gc.disable()
        try:
            for i, handle in enumerate(handles):
                began[i] = clock()
                state = agent.transfer(handle)
                posted[i] = clock()
                if state == "DONE":
                    ended[i] = posted[i]
                elif state == "ERR":
                    raise RuntimeError("got an error from NIXL while posting the reads")
            pending = [i for i in range(len(handles)) if not ended[i]]
            deadline = clock() + int(m["pull_limit_s"] * 1e9)
            pause = m["poll_s"]
            check = agent.check_xfer_state
            while pending:
                if pause:
                    time.sleep(pause)
                for i in pending:
                    state = check(handles[i])
                    if state == "DONE":
                        ended[i] = clock()
                    elif state == "ERR":
                        raise RuntimeError("got an error from NIXL: the peer or the connection failed")
                pending = [i for i in pending if not ended[i]]
                if pending and clock() > deadline:
                    raise TimeoutError(f"did not finish a pull within {m['pull_limit_s']:g} s")
        finally:
            gc.enable()
        rows = []
        for i, handle in enumerate(handles):
            t = agent.get_xfer_telemetry(handle)
            rows.append(
                {
                    "descriptors": int(t.descCount),
                    "bytes": int(t.totalBytes),
                    "post_us": float(t.postDuration),
                    "xfer_us": float(t.xferDuration),
                    "post_clock_us": (posted[i] - began[i]) / 1e3,
                    "xfer_clock_us": (ended[i] - began[i]) / 1e3,
                }
            )
            agent.release_xfer_handle(handle)
        if m["verify"]:
            for ours, theirs in m["indices"]:
                self._verify(ours, theirs, offsets, lengths)
        return {"pulls": rows}

    def _clear(self) -> None:
        if self.memory == "VRAM":
            import torch

            self.tensor.zero_()
            torch.cuda.synchronize(self.gpu)
        else:
            self.pool.fill(0)

    def _verify(self, ours: Any, theirs: Any, offsets: Any, lengths: Any) -> None:
        """Compare every byte of one pull with the target's pattern, on the GPU where the pool is there."""
        gpu = self.memory == "VRAM"
        if gpu:
            import torch

            pool = self.tensor.view(torch.int64)
        else:
            pool = self.pool.view(np.uint64)
        sizes = lengths[ours]
        for size in np.unique(sizes):
            mine, its = (offsets[side[sizes == size]][:, None] // 8 for side in (ours, theirs))
            words = int(size) // 8
            wide = min(words, 1 << 22)
            tall = max(1, (1 << 22) // wide)
            for i in range(0, len(mine), tall):
                for first in range(0, words, wide):
                    column = np.arange(first, min(first + wide, words))[None, :]
                    at, source = mine[i : i + tall] + column, its[i : i + tall] + column
                    if gpu:
                        at, source = torch.from_numpy(at).to(pool.device), torch.from_numpy(source).to(pool.device)
                        # Two's complement multiplication wraps as the unsigned one does.
                        same = bool((pool[at] == source * (_GOLDEN - 2**64) + self.seed).all())
                    else:
                        same = np.array_equal(pool[at], source.astype(np.uint64) * np.uint64(_GOLDEN) + self.seed)
                    if not same:
                        raise ValueError(
                            f"received wrong data in descriptors {i} to {i + tall - 1} of {int(size)} bytes: "
                            "this pull corrupts KV"
                        )

    def copy(self, m: dict[str, Any]) -> dict[str, Any]:
        """Time a plain copy of ``size`` bytes within this side's memory."""
        size = m["size"]
        if self.memory == "VRAM":
            import torch

            source = self.tensor[:size]
            target = torch.empty_like(source)
            times = []
            for _ in range(3):
                torch.cuda.synchronize(self.gpu)
                t = time.perf_counter()
                target.copy_(source)
                torch.cuda.synchronize(self.gpu)
                times.append(time.perf_counter() - t)
            del target
            torch.cuda.empty_cache()
            return {"seconds": times[-1]}
        # Copy within the pool, half to half, so that the limit costs no memory of its own.
        half = len(self.pool) // 2
        done, t = 0, time.perf_counter()
        while done < size:
            n = min(half, size - done)
            self.pool[half : half + n] = self.pool[:n]
            done += n
        return {"seconds": time.perf_counter() - t}


class Sockets:
    """Plain TCP from target to initiator, the limit that a pull over TCP is held against."""

    CHUNK = 1 << 20

    def __init__(self) -> None:
        self.listener: socket.socket | None = None
        self.streams = 1

    def listen(self, m: dict[str, Any]) -> dict[str, Any]:
        """Open a listener on the address, a port of the system's choice."""
        self.streams = m["streams"]
        self.listener = socket.create_server((m["address"], 0), backlog=self.streams)
        self.listener.settimeout(20)
        return {"port": self.listener.getsockname()[1]}

    def feed(self, m: dict[str, Any]) -> dict[str, Any]:
        """Send ``size`` bytes, split over the streams."""
        assert self.listener is not None
        block = memoryview(bytearray(b"\1") * self.CHUNK)
        with self.listener:
            peers = [self.listener.accept()[0] for _ in range(self.streams)]
        left = [m["size"] // len(peers)] * len(peers)
        while any(left):
            for i, peer in enumerate(peers):
                n = min(left[i], self.CHUNK)
                if n:
                    peer.sendall(block[:n])
                    left[i] -= n
        for peer in peers:
            peer.close()
        return {}

    def drink(self, m: dict[str, Any]) -> dict[str, Any]:
        """Receive until every stream is closed; the clock starts with the first connection."""
        import selectors

        buffer = bytearray(self.CHUNK)
        t = time.perf_counter()
        with selectors.DefaultSelector() as selector:
            for _ in range(m["streams"]):
                peer = socket.create_connection((m["address"], m["port"]), timeout=20)
                selector.register(peer, selectors.EVENT_READ)
            got = 0
            while selector.get_map():
                for key, _ in selector.select(20):
                    peer = key.fileobj  # type: ignore[assignment]
                    n = peer.recv_into(buffer)
                    got += n
                    if not n:
                        selector.unregister(peer)
                        peer.close()
        seconds = time.perf_counter() - t
        if got < m["size"] - m["streams"]:
            raise RuntimeError(f"received {got} of {m['size']} bytes over the plain socket")
        return {"seconds": seconds}


def main() -> None:
    """Answer the controller's requests until it says close or goes away."""
    die_with_parent(int(sys.argv[2]))
    end = Connection(int(sys.argv[1]))
    agent: Agent | None = None
    sockets = Sockets()
    while True:
        try:
            m = end.recv()
        except (EOFError, OSError):
            return
        try:
            op = m["op"]
            if op == "open":
                agent = Agent(m)
                reply = agent.open_reply()
            elif op in ("listen", "feed", "drink"):
                reply = getattr(sockets, op)(m)
            elif op == "rest":
                reply = {}
            elif op == "close":
                # NIXL destroys its UCX worker with the agent, and UCX then prints its tables.
                agent = None
                gc.collect()
                return
            else:
                assert agent is not None
                if op == "serve":
                    end.send({})
                    agent.serve(end)
                    continue
                reply = {"connect": agent.connect, "pull": agent.pull, "copy": agent.copy}[op](m)
            end.send(reply)
        except MemoryError:
            end.send({"error": f"could not allocate {m.get('pool_bytes', 0) / 1e9:.1f} GB of memory", "input": True})
            return
        except InputError as error:
            end.send({"error": str(error), "input": True})
            return
        except Exception as error:
            traceback.print_exc()
            text = str(error) if isinstance(error, RuntimeError | TimeoutError | ValueError) else repr(error)
            end.send({"error": text})
            return


if __name__ == "__main__":
    main()
