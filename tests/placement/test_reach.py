"""The relay carries requests both ways, and ends with what started it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from kvlab.placement import local, reach


def _ask(url: str, text: bytes) -> bytes:
    there = urlsplit(url)
    with socket.create_connection((str(there.hostname), int(there.port or 0)), 10) as wire:
        wire.sendall(text)
        return wire.recv(100)


def test_a_place_on_this_machine_needs_no_relay(tmp_path: Path) -> None:
    with reach.into(local.LOCAL, "http://127.0.0.1:7", tmp_path / "log") as url:
        assert url == "http://127.0.0.1:7"
    assert not (tmp_path / "log").exists()


def test_what_is_sent_arrives_and_comes_back(tmp_path: Path) -> None:
    place = local.Place("elsewhere", prefix=("env",))  # a word that joins nothing: the relay still runs
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            with contextlib.suppress(OSError):
                wire, _ = server.accept()
                with wire:
                    wire.sendall(wire.recv(100).upper())

        threading.Thread(target=echo, daemon=True).start()
        with reach.into(place, f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path / "log") as url:
            assert url.rpartition(":")[2] != str(server.getsockname()[1])
            assert _ask(url, b"hello") == b"HELLO"
    with socket.socket() as probe:
        deadline = time.monotonic() + 10
        while probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert time.monotonic() < deadline


def test_nobody_at_the_far_end_closes_the_connection(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with reach.into(local.Place("elsewhere", prefix=("env",)), f"http://127.0.0.1:{port}", tmp_path / "log") as url:
        assert _ask(url, b"hello") == b""
