"""Processes on this machine that never outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """Where a process runs: a name for people, words put before its command line, extra environment.

    The local place puts nothing before it; a network namespace puts the helper that joins it.
    """

    name: str = "local"
    prefix: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    #: the address at which processes in this place reach each other
    address: str = "127.0.0.1"
    #: a :class:`kvlab.placement.ray.Node`, which starts what runs there
    node: Any = None


LOCAL = Place()


class Started(Protocol):
    """A process, here or on a node of a cluster."""

    @property
    def pid(self) -> int:
        """Its id on its machine."""

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask Linux to SIGKILL this process when the one that started it dies (prctl(2), PR_SET_PDEATHSIG).

    Called in the child.  The signal is tied to the thread that forked, so children are started from
    threads that live as long as they do.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call; then nothing would ever signal us.
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    place: Place = LOCAL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start ``argv`` at ``place`` with exactly ``env``; stdout and stderr go to ``log``."""
    with open(log, "ab") as sink:
        return subprocess.Popen(
            [*place.prefix, *argv],
            env={**env, **place.env},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            pass_fds=pass_fds,
            # Ctrl-C goes to kvlab alone, which ends its children in order.
            start_new_session=True,
        )


def python(*words: str) -> list[str]:
    """Return the command line of a module run by this very interpreter."""
    return [sys.executable, *words]


def start_speaking(
    module: str, *, env: Mapping[str, str], log: Path, place: Place = LOCAL
) -> tuple[Started, Connection]:
    """Start ``python -m MODULE FD PARENT`` with a socket on FD, and return the process and our end of it."""
    if place.node:
        on_node: tuple[Started, Connection] = place.node.start_speaking(module, env, log)
        return on_node
    ours, theirs = socket.socketpair()
    with theirs:
        os.set_inheritable(theirs.fileno(), True)
        words = python("-m", module, str(theirs.fileno()), str(os.getpid()))
        process = start(words, env=env, log=log, place=place, pass_fds=(theirs.fileno(),))
    return process, Connection(ours.detach())


def guarded(
    argv: Sequence[str], *, env: Mapping[str, str], log: Path, lifeline: int, grace_s: float, place: Place = LOCAL
) -> subprocess.Popen[bytes]:
    """Start ``argv`` under :mod:`kvlab.engines.guard`, which ends everything of it when ``lifeline`` closes."""
    from kvlab.engines import guard

    words = [sys.executable, "-S", "-E", str(Path(guard.__file__)), str(lifeline), str(grace_s), *argv]
    return start(words, env=env, log=log, place=place, pass_fds=(lifeline,))


def stop(process: Started, grace_s: float = 5) -> int:
    """Wait ``grace_s`` for the process to end by itself, then SIGTERM, then SIGKILL; return its code."""
    for action in (None, process.terminate, process.kill):
        if action is not None:
            action()
        try:
            return process.wait(grace_s)
        except subprocess.TimeoutExpired:
            grace_s = 2
    return process.wait()
