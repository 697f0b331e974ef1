"""TCP whose links end again and again, in the middle of whatever they carry, in either process.

TEST_RESET_BYTES is how much a link carries at most in both directions; TEST_RESET_SILENTLY has
links end so that the other process is not told before it sends something.
"""

import os
import random
import socket
import struct
from typing import Callable, Sequence

from p3kv.transport import TRANSPORTS, Address, Link, SocketLink
from p3kv.transport.sockets import Tcp

_MOST_BYTES = int(os.environ.get("TEST_RESET_BYTES", "100000"))
_SILENTLY = "TEST_RESET_SILENTLY" in os.environ
_AT_ONCE = struct.pack("ii", 1, 0)
_TCP_REPAIR = 19
_RANDOM = random.Random(os.getpid())


class ResettingLink(SocketLink):
    """Ends after some bytes, and drops those that have not left."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        self._left_bytes = _RANDOM.randrange(_MOST_BYTES)

    def receive_into(self, buffers: Sequence[memoryview]) -> int:
        return self._counted(super().receive_into, buffers)

    def send(self, buffers: Sequence[memoryview]) -> int:
        return self._counted(super().send, buffers)

    def _counted(self, act: Callable[[Sequence[memoryview]], int], buffers) -> int:  # type: ignore
        if self._left_bytes <= 0:
            if _SILENTLY:
                self._socket.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
            else:
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
            print("a link ends", flush=True)
            raise ConnectionResetError  # whoever gets it closes the link
        part = [buffer[: self._left_bytes] for buffer in list(buffers)[:1]]
        count = act(part)
        self._left_bytes -= count
        return count


class Resetting(Tcp):
    """Both ends of each link may end it; there are no new ones once the file TEST_RESET_FOR_GOOD
    exists."""

    def connect(self, address: Address, timeout_s: float) -> Link:
        if os.path.exists(os.environ.get("TEST_RESET_FOR_GOOD", "")):
            raise ConnectionRefusedError
        return super().connect(address, timeout_s)

    def _link(self, sock: socket.socket) -> Link:
        link = super()._link(sock)
        assert isinstance(link, SocketLink)
        return ResettingLink(link._socket)


TRANSPORTS.register("resetting", Resetting)
