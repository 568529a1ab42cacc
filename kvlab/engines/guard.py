"""Runs one command and lets nothing of it survive: ``python guard.py LIFELINE GRACE_S COMMAND...``.

LIFELINE is the read end of a pipe whose write end only kvlab has.  When kvlab ends in whatever way, SIGKILL
included, the kernel closes that end and everything is killed at once.  SIGTERM is passed on to the command,
which has GRACE_S seconds to close (UCX prints what it used only then).  When the command has ended by itself
the guard kills what it left and ends as the command did, with its code or by the same signal.

The guard is a child subreaper (prctl(2)): a process whose parent died becomes its child, so an engine's workers
cannot get away, whatever session they made.  Shared memory that only the killed had open is removed.

It runs as a file, with the standard library alone (``-S -E``): it starts in milliseconds at any place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SHM = "/dev/shm/"


def descendants(root: int) -> list[int]:
    """Return the pids of all living processes below ``root``."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                # After the command in brackets, which may hold anything: state, parent.
                state, parent = Path(f"/proc/{name}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _shared_memory(pids: list[int]) -> set[int]:
    """Return the inodes of the shared memory that ``pids`` have mapped.

    Not names: glibc makes a semaphore under a temporary name, and in its maker's maps it keeps that one, as deleted.
    """
    inodes = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
        except OSError:
            continue
        # address, permissions, offset, device, inode, path
        inodes |= {
            int(words[4]) for line in lines if len(words := line.split(None, 5)) > 5 and words[5].startswith(_SHM)
        }
    return inodes


def kill_below(root: int, held: set[int] | None = None) -> None:
    """SIGKILL everything below ``root`` until nothing is left, then remove the shared memory that only it had.

    ``held`` are inodes of shared memory that processes which are gone by now had mapped.
    """
    held = set(held or ())
    deadline = time.monotonic() + 10
    while (pids := descendants(root)) and time.monotonic() < deadline:
        held |= _shared_memory(pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    if held:
        held -= _shared_memory([int(n) for n in os.listdir("/proc") if n.isdigit()])
        for file in os.scandir(_SHM):
            with contextlib.suppress(OSError):
                if file.inode() in held:
                    os.unlink(file.path)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main(lifeline: int, grace_s: float, argv: list[str]) -> int:
    """Guard ``argv``; return its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked_in, asked = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(asked, b"x"))

    def own() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # if even the guard is killed

    # Sockets and files that vLLM leaves in the temporary folder go with it.
    scratch = tempfile.mkdtemp(prefix="kvlab-")
    try:
        child = subprocess.Popen(argv, env={**os.environ, "TMPDIR": scratch}, preexec_fn=own)
        ended = os.pidfd_open(child.pid)
        ready = select.select([lifeline, asked_in, ended], [], [])[0]
        held = _shared_memory(descendants(os.getpid()))
        if lifeline not in ready:
            if asked_in in ready:
                child.terminate()
                select.select([lifeline, ended], [], [], grace_s)
            # A tracker that outlives the engine by a moment removes what the engine left.
            deadline = time.monotonic() + 1
            while child.poll() is not None and descendants(os.getpid()) and time.monotonic() < deadline:
                time.sleep(0.02)
        code = child.poll()
        kill_below(os.getpid(), held)
        code = child.wait() if code is None else code
        _reap()
    except OSError as error:
        print(f"error: cannot start {argv[0]}: {error.strerror}", flush=True)
        return 127
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
