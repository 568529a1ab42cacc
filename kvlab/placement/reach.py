"""A way from this machine's loopback into a place with a network of its own.

A socket belongs to the network namespace that it was made in, whichever process holds it.  So kvlab listens on
loopback here and hands the listening socket to a small process inside the place, which dials the engine there.
Requests and scrapes reach both ends of a shaped link without crossing it, and without root.

``python -m kvlab.placement.reach FD PARENT HOST PORT`` is that process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from kvlab.placement import local


@contextlib.contextmanager
def into(place: local.Place, url: str, log: Path) -> Iterator[str]:
    """Yield an address here that leads to ``url`` inside ``place``: ``url`` itself where nothing lies between."""
    if not place.prefix:
        yield url
        return
    there = urlsplit(url)
    log.parent.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        words = [str(listener.fileno()), str(os.getpid()), str(there.hostname), str(there.port)]
        argv = local.python("-m", "kvlab.placement.reach", *words)
        process = local.start(argv, env={**os.environ}, log=log, place=place, pass_fds=(listener.fileno(),))
        port = listener.getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        local.stop(process, 2)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


async def _serve(listener: socket.socket, host: str, port: int) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.close()  # as if nobody listened: the engine is not up yet
            return
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))

    async with await asyncio.start_server(carry, sock=listener) as server:
        await server.serve_forever()


def main() -> None:
    """Carry connections until the process that started this one ends."""
    fd, parent, host, port = sys.argv[1:]
    local.die_with_parent(int(parent))
    asyncio.run(_serve(socket.socket(fileno=int(fd)), host, int(port)))


if __name__ == "__main__":
    main()
