"""A telemetry ring written as NIXL writes it."""

from __future__ import annotations

import struct
from pathlib import Path

from kvlab.capture import nixl

PULL = (nixl.POST_TIME, nixl.XFER_TIME, nixl.RX_BYTES, nixl.RX_REQUESTS)


class Writer:
    """Drops an event where there is no room, never overwrites."""

    def __init__(self, path: Path, capacity: int = 16, version: int = 4, header: int = 40):
        self.path, self.capacity, self.header, self.lost = path, capacity, header, 0
        self.read_at = 8 if header == 40 else 256
        data = bytearray(header + 16 * capacity)
        struct.pack_into("<ii", data, 16, version, version)
        struct.pack_into("<QQ", data, 24, *((capacity, capacity - 1) if header == 40 else (capacity - 1, 0)))
        if header != 40:
            struct.pack_into("<Q", data, 8, capacity)
        path.write_bytes(data)

    def _word(self, at: int) -> int:
        return struct.unpack("<Q", self.path.read_bytes()[at : at + 8])[0]

    def _put(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)

    def push(self, kind: int, value: int) -> None:
        at = self._word(0)
        following = (at + 1) % self.capacity
        if following == self._word(self.read_at):
            self.lost += 1
            return
        self._put(self.header + 16 * at, struct.pack("<IIQ", kind, 0xDEAD, value))  # the padding is garbage
        self._put(0, struct.pack("<Q", following))

    def pull(self, post: int, xfer: int, size: int) -> None:
        for kind, value in zip(PULL, (post, xfer, size, 1), strict=True):
            self.push(kind, value)

    def restart(self) -> None:
        self._put(0, bytes(8))
        self._put(self.read_at, bytes(8))
