"""Two NIXL agents in two processes: READs of DRAM, each with NIXL's own telemetry of it, as JSON on stdout.

python nixl_pair.py ROUNDS IN_FLIGHT DESCRIPTORS DESCRIPTOR_BYTES TRANSFERS_PER_SECOND|0
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import numpy as np


def _agent(name: str):
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(enable_prog_thread=False, capture_telemetry=True, num_threads=0)
    return nixl_agent(name, config)


def _target(pipe: Connection, size: int) -> None:
    agent = _agent("target")
    memory = np.ones(size, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    while not pipe.poll(0):
        agent.get_new_notifs()  # moves UCX on: there is no progress thread
    pipe.recv()
    agent.deregister_memory(registered)


def main(rounds: int, in_flight: int, descriptors: int, size: int, rate: float) -> None:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_target, args=(theirs, 2 * descriptors * size), daemon=True)
    process.start()
    metadata, address = pipe.recv()
    agent = _agent("puller")
    memory = np.zeros(2 * descriptors * size, np.uint8)
    registered = agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    peer = agent.add_remote_agent(metadata)
    handles, lists = [], []
    for number in range(in_flight):
        indices = list(range(max(1, descriptors - number)))
        local = agent.prep_xfer_dlist("", [(memory.ctypes.data + 2 * i * size, size, 0) for i in indices], "DRAM")
        remote = agent.prep_xfer_dlist(peer, [(address + 2 * i * size, size, 0) for i in indices], "DRAM")
        handles.append(agent.make_prepped_xfer("READ", local, indices, remote, indices))
        lists += [local, remote]
    pulls = []
    began = time.monotonic()
    for number in range(rounds):
        if rate:
            while (number * in_flight) / rate > time.monotonic() - began:
                time.sleep(0.0002)
        started = {}
        states = {}
        for handle in handles:
            started[id(handle)] = time.monotonic()
            states[id(handle)] = agent.transfer(handle)
        waiting = list(handles)
        while waiting:
            for handle in list(waiting):
                state = agent.check_xfer_state(handle)
                assert state in ("DONE", "PROC"), state
                if state == "DONE":
                    waiting.remove(handle)
                    if not rate:
                        t = agent.get_xfer_telemetry(handle)
                        pull = [t.postDuration, t.xferDuration, t.totalBytes, started[id(handle)]]
                        pulls.append(pull)
    took = time.monotonic() - began
    for handle in handles:
        agent.release_xfer_handle(handle)
    for prepared in lists:
        agent.release_dlist_handle(prepared)
    agent.deregister_memory(registered)
    time.sleep(0.2)  # one more flush of the telemetry
    pipe.send("done")
    process.join(20)
    print(json.dumps({"seconds": took, "transfers": rounds * in_flight, "pulls": pulls}), flush=True)
    # NIXL's libraries may crash while the interpreter takes itself apart; all that is wanted is written.
    os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:5]), float(sys.argv[5]))  # type: ignore[misc]
