"""Connections to the other workers of this host, over sockets that no network reaches."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time
from contextlib import suppress
from hashlib import sha256
from typing import Dict, Optional, Sequence, Set

from p3kv.errors import P3Error
from p3kv.transport.sockets import SocketLink
from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import ACKNOWLEDGE, LAST, Kind
from p3kv.wire.messages import Failure, LinkEnded
from p3kv.wire.protocol import FROM_NEIGHBOURS, Conversation
from p3kv.worker.exchange import Exchange
from p3kv.worker.job import JobMember
from p3kv.worker.routes import HostSums

_CONNECT_S = 60.0
_LOOK_EVERY_S = 0.2
_LOOK_EVERY = struct.pack("ll", 0, int(_LOOK_EVERY_S * 1e6))
"""For the system: seconds and microseconds."""
_BUFFER_BYTES = 1 << 20
"""Buffer size of a connection for frames without payloads: there is room for thousands."""
_CREDENTIALS = struct.Struct("3i")


class _Goodbye(Frame):
    """This worker's goodbye to a neighbour."""

    __slots__ = ("neighbours", "rank")
    neighbours: Neighbours
    rank: int

    def arrived(self) -> None:
        self.neighbours.ended(self.rank)


class Neighbours(Handler):
    """The other workers of this host, by rank. `HostSums` takes what they say.

    A socket's name follows from the job's key, so that jobs do not meet. Anybody on the host may
    see the names of such sockets; the kernel tells whose process is at the other end, and only one
    of the same user is a neighbour.
    """

    def __init__(self, rank: int, ranks: Sequence[int], key: bytes, job: JobMember) -> None:
        """Listen, if there are others. `ranks`: all workers of the host; `key`: of data
        connections."""
        self.connections: Dict[int, Connection] = {}
        self._rank = rank
        self._ranks = ranks
        self._key = key
        self._goodbyes: Set[int] = set()
        self._job = job
        self._listener: Optional[socket.socket] = None
        if len(ranks) > 1:
            self._listener = _socket()
            self._listener.bind(self._name(rank))
            self._listener.listen(len(ranks))

    def connect(self, sums: HostSums, exchange: Exchange) -> None:
        """Connect to all, which must listen; P3Error where a neighbour does not come."""
        self.arrivals, self.landings, self._exchange = sums.arrivals, sums.landings, exchange
        for rank, sock in self._sockets().items():
            conversation = Conversation(FROM_NEIGHBOURS, "worker")
            conversation.peer = rank
            connection = Connection(SocketLink(sock), conversation, self, _BUFFER_BYTES)
            connection.in_network = False
            connection.begin()
            self.connections[rank] = connection
            self._job.loop.add_connection(connection)

    def lost(self, connection: Connection, reason: str) -> None:
        self._job.loop.remove_connection(connection)
        assert connection.peer is not None
        self.ended(connection.peer)
        known_round = self._exchange.known_round
        if connection.ended and not connection.conversation.over:
            # No network is between the two: the process has ended, and the scheduler knows why.
            failure = Failure(reason, "worker", connection.peer, known_round)
            self._job.control.send(LinkEnded(failure))
        elif not connection.ended:
            reason = f"it broke the protocol: {reason}"
            self._job.control.suspect(Failure(reason, "worker", connection.peer, known_round))

    def say_goodbye(self, words: bytes) -> None:
        """Tells all that nothing more comes. Belongs to the loop's thread."""
        header = Header(Kind.BYE, self._rank, flags=ACKNOWLEDGE)
        self._goodbyes = set(self.connections)
        for rank, connection in self.connections.items():
            if connection.closed:
                self.ended(rank)
            else:
                frame = _Goodbye(LAST, header, memoryview(words))
                frame.neighbours, frame.rank = self, rank
                connection.writer.push(frame)

    def ended(self, rank: int) -> None:
        """A neighbour has received this worker's goodbye, or has ended."""
        if rank in self._goodbyes:
            self._goodbyes.remove(rank)
            self._job.goodbye_answered()

    def close(self) -> None:
        """Ends all connections; may be called twice."""
        if self._listener is not None:
            self._listener.close()
        for connection in self.connections.values():
            self._job.loop.remove_connection(connection)

    def close_in_child(self) -> None:
        """In a forked child: closes its copies of the sockets."""
        if self._listener is not None:
            self._listener.close()
        for connection in self.connections.values():
            connection.close()

    def _sockets(self) -> Dict[int, socket.socket]:
        """Connects to workers of lower ranks, and waits for those of higher ranks."""
        found: Dict[int, socket.socket] = {}
        if self._listener is None:
            return found
        deadline = time.monotonic() + _CONNECT_S
        for rank in self._ranks:
            if rank < self._rank:
                found[rank] = self._connected(rank, deadline)
        names = {self._name(rank, self._rank): rank for rank in self._ranks if rank > self._rank}
        self._listener.settimeout(_LOOK_EVERY_S)
        while len(found) < len(self._ranks) - 1:
            self._job.check()
            with suppress(socket.timeout):
                sock, name = self._listener.accept()
                if name in names and _is_ours(sock):
                    found[names[name]] = sock
                else:
                    sock.close()
            if time.monotonic() > deadline:
                missing = sorted(set(names.values()) - found.keys())
                raise P3Error(f"worker {missing[0]}, on the same host, did not connect")
        return found

    def _connected(self, rank: int, deadline: float) -> socket.socket:
        """A socket to a neighbour, which may have no room for it until it accepts."""
        sock = _socket()
        sock.bind(self._name(self._rank, rank))  # tells who connects
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _LOOK_EVERY)
        while True:
            self._job.check()
            try:
                sock.connect(self._name(rank))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise P3Error(f"worker {rank}, on the same host, accepts nobody") from None
        if not _is_ours(sock):
            raise P3Error(f"another user's process has taken the place of worker {rank}")
        return sock

    def _name(self, *ranks: int) -> bytes:
        digest = hmac.new(self._key, b"p3kv neighbours %s" % repr(ranks).encode(), sha256)
        return b"\0p3kv-" + digest.hexdigest()[:32].encode()


def neighbourhood() -> str:
    """Processes for which this is the same can share memory and be neighbours: those of one user,
    in one machine's network and process namespaces. Empty where the system does not tell."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")]
    except OSError:
        return ""
    return " ".join([boot, *namespaces, str(os.getuid())])


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _is_ours(sock: socket.socket) -> bool:
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(packed)[1] == os.getuid()
