"""A transport within one process: streams whose bytes go when a test says so."""

from __future__ import annotations

import os
from typing import Dict, List, Sequence, Tuple

from p3kv.transport import Address, Link, Listener, Transport


class MemoryLink(Link):
    """One end of a stream in memory. A loop could watch its descriptor, but nothing ever wakes it:
    the test says when bytes go."""

    def __init__(self) -> None:
        self.other: MemoryLink
        self.incoming = bytearray()
        self._most_bytes = 1 << 16
        self._closed = False
        self.descriptor, self._write_end = os.pipe()

    @property
    def has_room(self) -> bool:
        """Whether `send` takes bytes now."""
        return len(self.other.incoming) < self._most_bytes

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        if self._closed:
            raise ConnectionResetError
        count = 0
        for buffer in buffers:
            piece = self.incoming[: len(buffer)]
            buffer[: len(piece)] = piece
            del self.incoming[: len(piece)]
            count += len(piece)
        if not count and not self.other._closed:
            raise BlockingIOError
        return count

    def send(self, buffers: Sequence[memoryview]) -> int:
        """Takes one buffer at most, so that a test can have something happen after it."""
        if self._closed or self.other._closed:
            raise BrokenPipeError
        if not self.has_room:
            raise BlockingIOError
        piece = buffers[0][: self._most_bytes - len(self.other.incoming)]
        self.other.incoming += piece
        return len(piece)

    def hold_at_most(self, size_bytes: int) -> None:
        self._most_bytes = size_bytes

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self.descriptor)
            os.close(self._write_end)


class MemoryListener(Listener):
    """Accepts the links that `connect` has made."""

    def __init__(self, address: Address = ("memory", 0)) -> None:
        self.address = address
        self.descriptor, self._write_end = os.pipe()
        self._waiting: List[Link] = []
        self.closed = False

    def connect(self) -> Link:
        """One end of a new stream; `accept` gives the other."""
        near, far = MemoryLink(), MemoryLink()
        near.other, far.other = far, near
        self._waiting.append(far)
        return near

    def accept(self, most: int) -> Tuple[List[Link], bool]:
        accepted, self._waiting = self._waiting[:most], self._waiting[most:]
        return accepted, False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.descriptor)
            os.close(self._write_end)


_LISTENERS: Dict[Address, MemoryListener] = {}


class Memory(Transport):
    """Links within this process."""

    def listen(self, host: str) -> MemoryListener:
        address = (host, len(_LISTENERS))
        return _LISTENERS.setdefault(address, MemoryListener(address))

    def connect(self, address: Address, timeout_s: float) -> Link:
        listener = _LISTENERS.get(address)
        if listener is None or listener.closed:
            raise ConnectionRefusedError
        return listener.connect()
