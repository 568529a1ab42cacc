"""Starting engines, all at once, and ending them and everything they started, whatever happens.

::

    with launch.up([Engine(role="prefill", model=m), Engine(role="decode", model=m)], folder=run.logs,
                   router=Router()) as cluster:
        cluster.url, cluster.engines[0].url, cluster.decode[0].telemetry_dir

Each process runs under :mod:`kvlab.engines.guard`.  Ready means that /health says 200 and a completion of one
token comes back, from every engine and then through the router, which makes the first, slow, pull.  Dynamo's workers
take no requests of their own: there the completion comes through the frontend alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.capture.vllm import scrape
from kvlab.engines import cores, dynamo, guard, pd, versions, vllm
from kvlab.engines import router as routers
from kvlab.engines.dynamo import Dynamo
from kvlab.engines.router import Router
from kvlab.engines.vllm import Command, Engine
from kvlab.errors import BadInput, Contradicted, RunFailed
from kvlab.placement import local
from kvlab.placement.local import Place

_given: set[int] = set()
#: what a watcher breaks the main thread off with
BREAK = signal.SIGUSR1


def free_ports(below: int | None = None) -> Iterator[int]:
    """Yield ports that nothing listens on and that this process has not handed out before."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", below - 1 - secrets.randbelow(12_000) if below else 0))
            except OSError:
                continue
            port: int = probe.getsockname()[1]
        if port not in _given:
            _given.add(port)
            yield port


def commands(
    specs: Sequence[Engine],
    *,
    folder: Path,
    router: Router | Dynamo | None = None,
    places: Mapping[str, Place] | None = None,
    version: str = "",
    ports: Iterator[int] | None = None,
    cores: Sequence[int] | None = None,
) -> list[Command]:
    """Return what :func:`up` would start, engines first: ``print(shell(commands(...)))`` is the dry run.

    :param folder: where logs and telemetry go
    :param places: engine's name or role -> where it runs
    :param router: a :class:`Dynamo` makes the engines its workers
    :param version: vLLM's; the installed one by default, or the one that the cpu extra pins
    """
    if not specs:
        raise BadInput("no engines to start")
    ports = free_ports(dynamo.PORTS_BELOW if isinstance(router, Dynamo) else None) if ports is None else ports
    version = version or versions.installed() or versions.DEFAULT
    settled = vllm.settle(specs, ports, cores or sorted(os.sched_getaffinity(0)), places)
    if isinstance(router, Dynamo):
        return dynamo.commands(router, settled, ports, folder, places)
    out = [vllm.command(e, folder, version, vllm.place_of(e.name, e.role, places)) for e in settled]
    return (
        [*out, routers.command(router, out, ports, folder, vllm.place_of("router", "router", places))]
        if router
        else out
    )


def shell(todo: Sequence[Command]) -> str:
    """Return commands as shell that a person can paste, one paragraph a process."""
    return "\n\n".join(c.shell() for c in todo) + "\n"


# Said by the parents of what failed, whose own message is the cause.
_ECHO = re.compile(
    r"See root cause|initialization failed|died unexpectedly|EngineDeadError|leaked|nanobind|DeprecationWarning"
    r"|Engine core proc|EngineCore failed|EngineCore encountered|worker_busy_loop|WorkerProc hit|[Ss]hutting down"
)
_ERROR = re.compile(r"(^|[\s.])\w*(Error|Exception|Interrupt|Exit): |\berror: |\bERROR\b|\bFATAL\b|panicked at")
_PREFIX = re.compile(
    r"^[\d-]+T[\d:.]+Z +[A-Z]+ |^[\w.-]+: error: "
    r"|^(\((\w+) pid=\d+\) )?((ERROR|FATAL|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]*\] )?"
)


def last_error(log: Path) -> str:
    """Return the engine's own last error line, without vLLM's prefixes; empty when the log holds none.

    The parents of a failed process echo it ("Engine core initialization failed"); the cause is preferred.
    """
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            lines = file.read(200_000).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    # pydantic says what is wrong in the line below.
    below = {line: lines[i + 1] for i, line in enumerate(lines[:-1]) if "ValidationError: 1 validation error" in line}
    lines = [below[line].split(" [type=")[0].replace("Value error, ", "ValueError: ") if line in below else line
             for line in lines]  # fmt: skip
    errors = [line for line in lines if _ERROR.search(line)]
    # "ValueError: ..." before a bare "ERROR 12-02 ..." line of a traceback's middle.
    named = [e for e in errors if re.search(r"(Error|Exception): \S|\berror: \S|panicked at", e)]
    for choice in ([e for e in named if not _ECHO.search(e)], [e for e in errors if not _ECHO.search(e)], errors):
        if choice:
            return _PREFIX.sub("", choice[-1]).strip()[:400]
    return ""


@dataclass
class Running:
    """One engine or router that answers: started here (``process``) or attached (None)."""

    name: str
    role: str
    url: str
    log: Path | None = None
    telemetry_dir: Path | None = None
    model: str = ""
    #: see :class:`kvlab.engines.vllm.Command`
    probe: str = "completion"
    process: local.Started | None = field(default=None, repr=False)
    #: seconds from start to ready
    ready_s: float | None = None

    def metrics_text(self) -> str:
        """Return /metrics as text; BadInput when the engine does not answer."""
        return scrape(self.url)

    def pids(self) -> list[int]:
        """Return the process ids of the engine, its own first; empty for an attached one or one elsewhere."""
        return guard.descendants(self.process.pid) if isinstance(self.process, subprocess.Popen) else []

    def says(self) -> str:
        """Return its own last error line; empty when its log holds none."""
        if fetch := getattr(self.process, "fetch", None):
            fetch()
        return last_error(self.log) if self.log else ""

    def fate(self) -> str | None:
        """Say how the process ended, with its own last error; None while it runs."""
        code = self.process.poll() if self.process else None
        if code is None:
            return None
        if lost := getattr(self.process, "lost", ""):
            return f"{self.name}: {lost}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        said = self.says()
        return f"{self.name} {how}" + (f": {said}" if said else "") + f" (log: {self.log})"


@dataclass
class Cluster:
    """The engines, and where to send requests: ``url`` (router, else the only replica); without one see ``pd``."""

    engines: list[Running]
    router: Running | None = None
    commands: list[Command] = field(default_factory=list)
    #: what died, in words, as soon as the watcher has seen it
    died: str = ""

    @property
    def url(self) -> str | None:
        """The address that takes whole requests; None for prefill and decode engines without a router."""
        alone = self.engines[0] if len(self.engines) == 1 else None
        return self.router.url if self.router else alone.url if alone else None

    @property
    def model(self) -> str:
        """The model's name in requests."""
        return self.engines[0].model

    @property
    def prefill(self) -> list[Running]:
        """The prefill engines."""
        return [e for e in self.engines if e.role == "prefill"]

    @property
    def decode(self) -> list[Running]:
        """The decode engines."""
        return [e for e in self.engines if e.role == "decode"]

    @property
    def all(self) -> list[Running]:
        """Engines, then the router."""
        return [*self.engines, *([self.router] if self.router else [])]

    def fates(self) -> list[str]:
        """Return one line for each process that has ended."""
        return [fate for one in self.all if (fate := one.fate())]

    def check(self) -> None:
        """Raise RunFailed, quoting the engine's own last error, when one of the processes has ended."""
        if fates := self.fates():
            raise RunFailed("; ".join(fates))

    def complete(self, body: Mapping[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        """POST one completion, through the router, the only replica, or prefill and decode in turn."""
        body = {"model": self.model, **body}
        if self.url:
            return pd.post(self.url + "/v1/completions", body, timeout_s)
        if not (self.prefill and self.decode):
            raise BadInput("several replicas and no router: send the request to one of cluster.engines")
        return pd.complete(self.prefill[0].url, self.decode[0].url, body, timeout_s=timeout_s)


def healthy(url: str, model: str = "") -> bool:
    """Tell whether /health says 200, and /v1/models has the ``model``, asked through no proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url + "/health", timeout=2) as answer:
            well = bool(answer.status == 200)
        if not model:
            return well
        with opener.open(url + "/v1/models", timeout=2) as answer:
            return well and model in [m["id"] for m in json.load(answer)["data"]]
    except (urllib.error.URLError, OSError, ValueError, LookupError, TypeError):
        return False


def _start(command: Command, lifeline: int, grace_s: float) -> Running:
    folders = [f for f in (command.log.parent, command.telemetry_dir, command.scratch) if f]
    try:
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        process: local.Started
        if command.place.node:
            process = command.place.node.start(command, grace_s)
        else:
            env = {**os.environ, **command.env}
            process = local.guarded(
                command.argv, env=env, log=command.log, lifeline=lifeline, grace_s=grace_s, place=command.place
            )
    except OSError as error:
        raise RunFailed(f"cannot start {command.name}: {error.strerror} ({error.filename})") from None
    c = command
    return Running(c.name, c.role, c.url, c.log, c.telemetry_dir, c.model, c.probe, process)


def _blame(cluster: Cluster) -> None:
    """Raise RunFailed if an engine's death is behind a failure; it may take seconds to end after its core did."""
    deadline = time.monotonic() + 10
    while not cluster.fates() and time.monotonic() < deadline and not all(healthy(one.url) for one in cluster.all):
        time.sleep(0.1)
    cluster.check()


def _wait_ready(cluster: Cluster, todo: list[Running], began: float, limit_s: float) -> None:
    """Wait until each of ``todo`` is healthy and has completed a token; the first death ends it."""
    deadline = began + limit_s
    body = {"prompt": "Hello", "max_tokens": 1, "temperature": 0}
    while todo:
        cluster.check()
        for one in [one for one in todo if healthy(one.url, one.model if one.probe == "listed" else "")]:
            left = max(1.0, deadline - time.monotonic())
            cores.keep(cluster)
            try:
                if one.probe != "health":
                    pd.post(one.url + "/v1/completions", {"model": one.model, **body}, left)
            except RunFailed as error:
                _blame(cluster)
                said = one.says()
                raise RunFailed(
                    f"{one.name} is healthy and completes nothing: {error}" + (f"; it says: {said}" if said else "")
                ) from None
            one.ready_s = time.monotonic() - began
            todo.remove(one)
        if time.monotonic() > deadline and todo:
            said = "; ".join(f"{one.name}: {one.says() or 'no error in its log'}" for one in todo)
            raise RunFailed(f"not ready after {limit_s:g} s: {said} (log: {todo[0].log})")
        time.sleep(0.1)


def _stop(running: Sequence[Running], grace_s: float) -> None:
    """SIGTERM to all guards, wait, then kill what is left; a second Ctrl-C kills at once."""
    processes = [one.process for one in running if one.process]
    try:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + grace_s + 12  # the guard's own patience, and its killing
        for process in processes:
            process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            if process.poll() is None:
                if isinstance(process, subprocess.Popen):
                    guard.kill_below(process.pid)
                process.kill()
                process.wait()


def _remove(folders: Sequence[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


class _Watch(threading.Thread):
    """Looks for the end of any process, and then breaks the main thread's work off as Ctrl-C would.

    By a signal of its own: a shell starts background jobs with SIGINT ignored, and SIGINT would then break nothing.
    """

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="kvlab-engines", daemon=True)
        self._cluster, self._lock, self._off = cluster, threading.Lock(), threading.Event()
        main = threading.current_thread() is threading.main_thread()
        self._main = threading.get_ident() if main else None
        self._before = signal.signal(BREAK, signal.default_int_handler) if main else None
        self.start()

    def run(self) -> None:
        while not self._off.wait(0.1):
            fates = self._cluster.fates()
            if fates:
                with self._lock:
                    if not self._off.is_set():
                        self._cluster.died = "; ".join(fates)
                        if self._main is not None:
                            signal.pthread_kill(self._main, BREAK)
                return

    def stop(self) -> None:
        """Let go; a break that was on its way is swallowed, ``cluster.died`` says it all.  Safe to call twice."""
        while self.is_alive():
            try:
                with self._lock:
                    self._off.set()
                self.join()
            except KeyboardInterrupt:
                if not self._cluster.died:
                    raise
        if self._before is not None:
            signal.signal(BREAK, self._before)
            self._before = None


@contextlib.contextmanager
def up(
    specs: Sequence[Engine],
    *,
    folder: Path,
    router: Router | Dynamo | None = None,
    places: Mapping[str, Place] | None = None,
    version: str = "",
    limit_s: float = 300,
    grace_s: float = 15,
    planned: Sequence[Command] | None = None,
) -> Iterator[Cluster]:
    """Start engines in parallel, then the router; yield the :class:`Cluster`; end everything afterwards.

    :param folder: logs and telemetry rings go here, ``run.logs`` for a run
    :param limit_s: all have to be ready within these seconds
    :param grace_s: seconds that each process gets to end by itself after SIGTERM
    :param planned: what :func:`commands` returned, to start exactly that
    :raises BadInput: specs that do not go together
    :raises RunFailed: an engine died (also in the middle of the block), or was not ready in time; its own last
        error line is quoted
    """
    todo = list(planned or commands(specs, folder=folder, router=router, places=places, version=version))
    dynamo.versions(todo)  # or BadInput before anything has started
    scratch = [c.scratch for c in todo if c.scratch]
    _remove(scratch)  # a run that was killed may have left it
    lifeline, ours = os.pipe()
    cluster = Cluster([], commands=todo)
    watch: _Watch | None = None
    try:
        began = time.monotonic()
        for c in todo:
            if c.role != "router":
                cluster.engines.append(_start(c, lifeline, grace_s))
        _wait_ready(cluster, list(cluster.engines), began, limit_s)
        for c in todo:
            if c.role == "router":
                cluster.router = _start(c, lifeline, grace_s)
                _wait_ready(cluster, [cluster.router], time.monotonic(), limit_s)
        cores.keep(cluster)  # once more: threads of the first request
        watch = _Watch(cluster)
        try:
            yield cluster
        except (BadInput, Contradicted):
            raise
        except (KeyboardInterrupt, Exception) as error:
            watch.stop()
            if cluster.died:
                raise RunFailed(cluster.died) from None
            if not isinstance(error, KeyboardInterrupt):
                _blame(cluster)
            raise
        watch.stop()
        cluster.check()
    finally:
        try:
            if watch:
                watch.stop()
        finally:
            try:
                _stop(cluster.all[::-1], grace_s)
            finally:
                os.close(ours)  # a guard that is there yet kills at once
                os.close(lifeline)
                _remove(scratch)


def record(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the command lines and environments for the manifest, and versions where they are not kvlab's own."""
    theirs = dynamo.versions(cluster.commands)
    more = {"versions": theirs} if theirs else {}
    lines = [(c, shlex.join([*c.place.prefix, *c.argv])) for c in cluster.commands]
    return [{"name": c.name, "command": line, "env": c.env, **more} for c, line in lines]
