"""The scheduler's connections: who may speak to it, which are open, and the nodes' sessions.

ZeroMQ accepts connections itself, and closes those whose handshake fails or takes too long. It has
no limit on their number. So this closes the oldest of too many that no process of the job uses.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Dict, List, NamedTuple, Optional, Tuple, Union

import zmq

from p3kv.common import words
from p3kv.errors import P3Error
from p3kv.wire.address import own_account
from p3kv.wire.credentials import Credentials, Refusals
from p3kv.wire.messages import FromScheduler, Refused, Welcomed, encode
from p3kv.wire.scheduler_socket import Session, receive_event

_ADDRESS = "inproc://zeromq.zap.01"
"""Where ZeroMQ asks. No other process can reach it."""


class Door:
    """Answers ZeroMQ's question who may connect: whoever has the nodes' key."""

    def __init__(self, context: zmq.Context, credentials: Credentials) -> None:
        """To be made before the scheduler's socket is bound, in the same context."""
        self._credentials = credentials
        self.socket = context.socket(zmq.REP)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answers one question; to be called when `socket` is readable."""
        version, request, _, _, _, mechanism, *shown = self.socket.recv_multipart()
        known = (
            mechanism == b"CURVE" and len(shown) == 1 and self._credentials.are_of_a_node(shown[0])
        )
        status = (b"200", b"") if known else (b"400", b"not a process of this job")
        self.socket.send_multipart([version, request, *status, b"", b""])

    def close(self) -> None:
        """Lets nobody in any more."""
        self.socket.close(0)


_HUNG_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | _HUNG_UP
EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _REFUSED
"""The events that the monitor must report."""

_MAX_STRANGERS = 128
"""Most connections without a process of the job on them, besides one for each process: all may come
at the same time."""
_IPV4 = "::ffff:"


class _Origin(NamedTuple):
    """Where a connection comes from: no two that are open at the same time have the same."""

    host: str
    port: int


class Connections:
    """Follows the events of a ZeroMQ monitor. The system reuses a descriptor's number at once, so
    events are taken in their order, and all that have come before anything is decided."""

    def __init__(
        self, monitor: zmq.Socket, num_processes: int, refusals: Refusals, has_secret: bool
    ) -> None:
        """`num_processes` of the job will connect. A job without a secret is one account's."""
        self._has_secret = has_secret
        self._monitor = monitor
        self._most_strangers = _MAX_STRANGERS + num_processes
        self._refusals = refusals
        self._nodes: Dict[int, bytes] = {}
        """By descriptor, the node's identity."""
        self._strangers: Dict[int, Optional[_Origin]] = {}
        """Where other open connections come from, the oldest first."""
        self._failure: Optional[int] = None
        """ZeroMQ's number of a failure, or _HUNG_UP; the next event tells which peer."""

    def notice(self) -> List[bytes]:
        """Take the events that have come; return the nodes whose connections have ended."""
        lost = []
        while self._monitor.poll(0):
            event, value = receive_event(self._monitor)
            if event == zmq.EVENT_ACCEPTED:
                self._strangers[value] = _place_of(value)
            elif event & _REFUSED:
                self._failure = _HUNG_UP if event == _HUNG_UP else value
            else:
                node = self._ended(value)
                if node is not None:
                    lost.append(node)
        self._close_too_many()
        return lost

    def is_of(self, descriptor: int, identity: bytes) -> bool:
        """Note that a node speaks on a connection; False if that has ended since. Call `notice`
        first: events of earlier connections with this descriptor must not count for this one."""
        if descriptor not in self._strangers:
            return False
        del self._strangers[descriptor]
        self._nodes[descriptor] = identity
        return True

    def _ended(self, descriptor: int) -> Optional[bytes]:
        failure, self._failure = self._failure, None
        if descriptor in self._strangers:
            place = self._strangers.pop(descriptor)
            if failure is not None:
                host = "an unknown host" if place is None else place.host
                self._refusals.note(_what_failed(failure, host, self._has_secret))
        return self._nodes.pop(descriptor, None)

    def _close_too_many(self) -> None:
        while len(self._strangers) > self._most_strangers:
            descriptor, place = next(iter(self._strangers.items()))
            del self._strangers[descriptor]
            if place is not None:
                self._refusals.note(f"too many newer ones did not say hello either ({place.host})")
                _end(descriptor, place)


def _what_failed(failure: int, host: str, has_secret: bool) -> str:
    if failure in (zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH, _HUNG_UP):
        says = words.current()
        # Both sides may see that the other speaks another protocol, and the first one hangs up.
        looked = "only looked whether somebody listens, or " if failure == _HUNG_UP else ""
        of = f", very likely that of {says.native_store}" if says.native_store else ""
        return (
            f"a process on {host} {looked}speaks another protocol over ZeroMQ{of}. If it is a "
            "worker of this job, its script must 'import p3kv' first (or be started with 'p3kv "
            f"run'), and use {says.use_store}."
        )
    if not has_secret:
        return (
            f"a process on {host} is of another account, or has a secret, or is in a container "
            f"with a /tmp of its own. This job has no secret, so only processes of {own_account()} "
            "can join it. Give each job a port of its own. If it belongs to this job, set the same "
            "P3KV_SECRET (or P3KV_SECRET_FILE) in all its processes."
        )
    return (
        f"a process on {host} does not know this job's secret. If it belongs to this job, give it "
        "the same P3KV_SECRET (or P3KV_SECRET_FILE) as this scheduler has."
    )


def _place_of(descriptor: int) -> Optional[_Origin]:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, port = connection.getpeername()[:2]
        # A socket for IPv6 and IPv4 shows IPv4 addresses with this prefix.
        return _Origin(host[len(_IPV4) :] if host.startswith(_IPV4) else host, port)
    return None


def _end(descriptor: int, place: _Origin) -> None:
    """Shut a connection of ZeroMQ's down, which then closes it. ZeroMQ may have closed it, and the
    number may be another connection's: so a descriptor of our own holds it while it is compared."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        host, port = connection.getpeername()[:2]
        if (host.endswith(place.host), port) == (True, place.port):
            connection.shutdown(socket.SHUT_RDWR)


class _NodeSession(Session):
    def __init__(self, connection: bytes) -> None:
        super().__init__()
        self.connection = connection
        """ZeroMQ's name for the newest connection of the node."""
        self.ended_at = 0.0
        self.gives_up_at: Optional[float] = None


class Sessions:
    """Sessions with nodes, by the random number that each node's process has chosen.

    ZeroMQ has another name for each connection, and loses what is on its way when one ends. Times
    are of the monotonic clock.
    """

    def __init__(self, router: zmq.Socket) -> None:
        self._router = router
        self._sessions: Dict[bytes, _NodeSession] = {}
        self._nodes: Dict[bytes, bytes] = {}
        """By connection."""

    def node(self, connection: bytes) -> Optional[bytes]:
        """Node that speaks on a connection."""
        return self._nodes.get(connection)

    def begin(self, node: bytes, connection: bytes) -> None:
        """A node says hello for the first time."""
        self._sessions[node] = _NodeSession(connection)
        self._nodes[connection] = node

    def forget(self, node: bytes) -> None:
        """The node is not let in."""
        del self._nodes[self._sessions.pop(node).connection]

    def resume(self, node: bytes, connection: bytes, received: int) -> bool:
        """Resume a session, and send again what the node lacks of `received` messages; False if the
        node is not known. ProtocolError for a number that can't be."""
        known = self._sessions.get(node)
        if known is None:
            return False
        self._nodes.pop(known.connection, None)
        self._nodes[connection] = node
        known.connection, known.gives_up_at = connection, None
        again = known.again(received)
        self.send(node, Welcomed())
        for parts in again:
            self._send(connection, parts)
        return True

    def take(self, connection: bytes, numbers: Union[bytes, memoryview]) -> None:
        """Count a node's message; ProtocolError if its numbers can't be right."""
        self._sessions[self._nodes[connection]].take(numbers)

    def send(self, node: bytes, message: FromScheduler) -> None:
        """Sends a message, now or when the node has a connection again."""
        session = self._sessions[node]
        if isinstance(message, Welcomed):
            self._send(session.connection, [encode(Welcomed(session.received))])
        elif isinstance(message, Refused):
            self.answer(session.connection, message)
        else:
            self._send(session.connection, session.keep(encode(message)))

    def answer(self, connection: bytes, message: FromScheduler) -> None:
        """Answers a process that is no node."""
        self._send(connection, [encode(message)])

    def ended(self, connection: bytes, now: float, waits_s: float) -> None:
        """Note that a node's connection has ended, and wait `waits_s` for another one."""
        session = self._sessions[self._nodes.pop(connection)]
        session.ended_at, session.gives_up_at = now, now + waits_s

    @property
    def gives_up_at(self) -> Optional[float]:
        """When the next node is lost if it does not come back."""
        times = [
            session.gives_up_at
            for session in self._sessions.values()
            if session.gives_up_at is not None
        ]
        return min(times, default=None)

    def lost(self, now: float) -> List[Tuple[bytes, float]]:
        """Pop the nodes that have not come back in time, with the ends of their connections."""
        late = [
            (node, session)
            for node, session in self._sessions.items()
            if session.gives_up_at is not None and now >= session.gives_up_at
        ]
        for _, session in late:
            session.gives_up_at = None
        return [(node, session.ended_at) for node, session in late]

    def _send(self, connection: bytes, parts: List[bytes]) -> None:
        try:
            self._router.send_multipart([connection, *parts])
        except zmq.ZMQError as error:
            raise P3Error(f"the scheduler can't send: {error}") from error
