"""One TCP connection between a worker and a server."""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from typing import Callable, List, Optional, Tuple

from p3kv.errors import ProtocolError
from p3kv.wire.framing import FrameReader, FrameWriter, Place
from p3kv.wire.header import Header

_DEAD_IDLE_S = 8
"""An idle connection to a host that has vanished ends after about this time (keep-alive)."""
_DEAD_SENDING_S = 60
"""The same while bytes are unacknowledged. Longer, because a peer that is only busy reads none: for
example, a server that imports MXNet from a slow disk. The scheduler notices a lost host sooner."""


_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOST_BEFORE = (
    errno.ECONNABORTED, errno.EPERM, errno.EPROTO, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENOPROTOOPT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENONET, errno.EOPNOTSUPP,
)  # fmt: skip
"""What Linux says of a connection that has ended before it was accepted, or that a firewall did
not let in; see accept(2)."""


class Connection:
    """Frames in both directions over a non-blocking socket, driven by a `Loop`.

    `on_frame(connection, header, payload)` is called for every complete frame, and
    `on_lost(connection, reason)` once, when the peer is gone or broke the protocol.
    """

    def __init__(
        self,
        sock: socket.socket,
        place: Callable[[Connection, Header], Optional[memoryview]],
        on_frame: Callable[[Connection, Header, Optional[memoryview]], None],
        on_lost: Callable[[Connection, str], None],
        send_buffer_bytes: int,
    ) -> None:
        """`send_buffer_bytes`: most unsent bytes in the kernel, until `hold_at_most` changes it."""
        _prepare(sock)
        self._socket = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        placed: Place = lambda header: place(self, header)  # noqa: E731
        self._reader = FrameReader(placed)
        self.closed = False
        """Lost, or closed by this process: nothing is sent or received any more."""
        self.ended = False
        """The peer or the network ended it; False if it was lost for what the peer has sent."""
        self.descriptor = sock.fileno()
        self.hold_at_most(send_buffer_bytes)
        self.writer = FrameWriter()
        self.blocked = False
        """The connection is full: the kernel takes no more bytes for now."""
        self.peer: Optional[int] = None
        """Rank of the peer, once it has shown that it belongs to the job."""

    def receive(self) -> None:
        """Reads once; the loop calls again while there is more."""
        try:
            count = self._socket.recvmsg_into(self._reader.buffers())[0]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(_translated(error))
            return
        if count == 0:
            self._end("it closed the connection")
            return
        try:
            for header, payload in self._reader.received(count):
                self._on_frame(self, header, payload)
        except ProtocolError as error:
            self._lose(str(error))

    def send(self) -> int:
        """Writes once, and returns how many bytes; sets `blocked` when the kernel is full."""
        buffers = self.writer.buffers()
        try:
            count = self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            self.blocked = True
            return 0
        except OSError as error:
            self.blocked = True
            self._end(_translated(error))
            return 0
        self.writer.sent(count)
        self.blocked = len(buffers) > 0
        return count

    def hold_at_most(self, size_bytes: int) -> None:
        """Limits the unsent bytes that the kernel holds (SO_SNDBUF); from any thread.

        No frame overtakes these bytes, so they should be few.
        """
        with suppress(OSError):  # the connection may be closed already
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size_bytes)

    def close_socket(self) -> None:
        """Closes the socket; no callback comes after it. May be called twice."""
        self.closed = True
        self.blocked = True
        self._socket.close()

    def _end(self, reason: str) -> None:
        self.ended = True
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if not self.closed:
            self.closed = True
            self._on_lost(self, reason)


def connect(address: Tuple[str, int], timeout_s: float, first_words: bytes) -> socket.socket:
    """A blocking socket connected to `address`, on which `first_words` were sent.

    They are sent before anything else is done: a server closes connections that send no hello when
    there are too many. OSError when that fails.
    """
    try:
        sock = socket.create_connection(address, timeout=timeout_s)
    except ValueError as error:  # a name or port that no address can have
        raise OSError(str(error)) from error
    try:
        sock.sendall(first_words)
    except OSError:
        sock.close()
        raise
    return sock


def listen(host: str) -> socket.socket:
    """A non-blocking socket listening on a free port of `host`; OSError when that fails."""
    listener = socket.create_server((host, 0), backlog=512)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket, most: int) -> Tuple[List[socket.socket], bool]:
    """Connections that wait on `listener` now, and whether the system has no room for another.

    At most `most`: a peer that connects as fast as the caller accepts would keep it from all other
    work. Without room, connections wait until this process closes a descriptor.
    """
    accepted: List[socket.socket] = []
    while len(accepted) < most:
        try:
            accepted.append(listener.accept()[0])
        except (BlockingIOError, InterruptedError):
            break
        except OSError as error:
            if error.errno in _NO_ROOM:
                return accepted, True
            if error.errno not in _LOST_BEFORE:
                raise
    return accepted, False


def _prepare(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_SENDING_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_IDLE_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _DEAD_IDLE_S // 2)


def _translated(error: OSError) -> str:
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return "its connection was reset"
    if isinstance(error, TimeoutError):
        return "nothing is heard from its host any more"
    return f"its connection failed: {error.strerror or error}"
