"""The scheduler's session with each node, and the nodes whose connection has ended."""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple, Union

import zmq

from p3kv.errors import P3Error
from p3kv.wire.messages import FromScheduler, Refused, Welcomed, encode
from p3kv.wire.session import Session


class _NodeSession(Session):
    def __init__(self, connection: bytes) -> None:
        super().__init__()
        self.connection = connection
        """ZeroMQ's name for the newest connection of the node."""
        self.ended_at = 0.0
        self.gives_up_at: Optional[float] = None


class Sessions:
    """By the number that a node's process has chosen, which nobody else knows.

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
        """A node says hello, and has received so many messages before; False if it is not known.

        It gets those that it has not. ProtocolError if it can't have received so many.
        """
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
        """Takes note of a message of a node; ProtocolError if the numbers can't be right."""
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
        """A node's connection has ended; the node is waited for."""
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
        """The nodes that have not come back in time, and when their connections have ended; each
        once."""
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
