"""Looks like an engine to kvlab: /health, /metrics, completions; a worker that got away; faults on demand."""

import argparse
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

parser = argparse.ArgumentParser(prog="fake_engine.py")
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--model", default="")
parser.add_argument("--sick", action="store_true")
parser.add_argument("--dies-at", type=int, default=0, help="the request that it dies of")
parser.add_argument("--workers", default="", help="file that takes the pids")
args = parser.parse_args()

if args.model and not Path(args.model).exists():
    print("(EngineCore pid=7) ERROR 12-02 01:00:00 [core.py:1] OSError: no model at", args.model, flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")

# A worker in a session of its own whose parent is gone at once, as a daemon's; it maps the engine's memory.
WORKER = """
import mmap, os, sys, time
os.fork() and os._exit(0)
os.setsid()
with open("/dev/shm/" + sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print(os.getpid(), flush=True)
time.sleep(600)
"""
if args.workers:
    shm = shared_memory.SharedMemory(create=True, size=4096)
    resource_tracker.unregister(shm._name, "shared_memory")  # type: ignore[attr-defined]
    process = subprocess.Popen([sys.executable, "-c", WORKER, shm.name], stdout=subprocess.PIPE)
    pid = process.stdout.readline()  # type: ignore[union-attr]
    Path(args.workers).write_text(json.dumps({"pids": [os.getpid(), int(pid)], "shm": shm.name}))

seen = 0


class Handler(BaseHTTPRequestHandler):
    def answer(self, code: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        known = self.path == "/v1/models"
        self.answer(503 if args.sick else 200, {"data": [{"id": "fake"}]} if known else {})

    def do_POST(self) -> None:
        global seen
        seen += 1
        if seen == args.dies_at:
            print("(Worker pid=9) ERROR 12-02 01:00:00 [w.py:1] MemoryError: out of blocks", flush=True)
            os._exit(3)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, {"choices": [{"text": "x"}]})

    def log_message(self, *_: object) -> None:
        pass


print("fake engine", args.port, flush=True)
ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
