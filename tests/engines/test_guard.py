"""The guard: what the processes below it leave when they are killed."""

import os
import subprocess
import sys
from pathlib import Path

# A semaphore with a name, as vLLM's workers share one; its resource tracker would remove it, were it not killed too.
MAKER = """
import multiprocessing, time
from multiprocessing import resource_tracker
lock = multiprocessing.get_context("spawn").Lock()
name = lock._semlock.name
resource_tracker.unregister(name, "semaphore")
print("/dev/shm/sem." + name.lstrip("/"), flush=True)
time.sleep(600)
"""


def test_a_killed_maker_leaves_no_semaphore_and_nobody_elses_goes():
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as other:
        kept = Path(other.stdout.readline().strip())
        lifeline, held = os.pipe()
        guard = [sys.executable, "-m", "kvlab.engines.guard", str(lifeline), "1", sys.executable, "-c", MAKER]
        with subprocess.Popen(guard, stdout=subprocess.PIPE, text=True, pass_fds=[lifeline]) as running:
            made = Path(running.stdout.readline().strip())
            assert made.exists() and kept.exists() and made != kept
            os.close(held)
            running.wait(20)
        os.close(lifeline)
        assert not made.exists() and kept.exists()
        other.kill()
    kept.unlink()
