"""Connects again to servers, where the network has ended a worker's link."""

from __future__ import annotations

import threading
from functools import partial
from typing import Dict, NamedTuple, Optional

from p3kv.errors import ProtocolError
from p3kv.transport import Link
from p3kv.wire.breaks import Breaks
from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header
from p3kv.wire.header import Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import DataWelcome
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from p3kv.worker.joining import Handshakes, Joining

_FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 1.0
_WELCOME_S = 10.0
"""A server that has answered once answers soon."""
_HANDSHAKE_BYTES = 1 << 16


class _Attempt(NamedTuple):
    """A handshake on a new link."""

    connection: Connection
    """The one that waits for the link."""
    delay_s: float
    """When to try again, if it fails."""


class Reconnecting(Handler):
    """Gives connections new links. Belongs to the worker's thread. A thread of its own waits while
    a link is made, because the worker's thread serves the other connections meanwhile."""

    def __init__(
        self,
        loop: Loop,
        handshakes: Handshakes,
        joining: Joining,
        breaks: Breaks,
    ) -> None:
        self._loop = loop
        self._handshakes = handshakes
        self._joining = joining
        self._breaks = breaks
        self._attempts: Dict[Connection, _Attempt] = {}
        """By the connection that shakes hands."""
        self.arrivals = {Kind.CHALLENGE: handshakes.answer, Kind.WELCOME: self._welcomed}
        self.landings = {Kind.CHALLENGE: handshakes.land_challenge}

    def begin(self, connection: Connection, reason: str, round: int) -> None:
        """A connection's link has ended: makes another, until `breaks` gives the connection up."""
        self._loop.pause_connection(connection)
        connection.drop_link()
        in_vain = self._breaks.begin(connection, reason, round)
        delay_s = min(_FIRST_DELAY_S * 2 ** min(in_vain, 10), LONGEST_DELAY_S)
        self._loop.call_later(delay_s, partial(self._try, connection, delay_s))

    def _try(self, connection: Connection, delay_s: float) -> None:
        if connection in self._breaks:
            thread = threading.Thread(
                target=self._make, args=(connection, delay_s), name="p3kv-connect", daemon=True
            )
            thread.start()

    def _make(self, connection: Connection, delay_s: float) -> None:
        link: Optional[Link] = None
        try:
            assert connection.peer is not None
            link = self._joining.link(connection.peer)
        except OSError:
            pass  # tried again
        finally:
            self._loop.call_soon(self._made, connection, link, delay_s)

    def _made(self, connection: Connection, link: Optional[Link], delay_s: float) -> None:
        if link is None:
            self._try_later(connection, delay_s)
        elif connection not in self._breaks:
            link.close()
        else:
            conversation = Conversation(FROM_SERVERS, "server")
            conversation.peer = connection.peer
            attempt = Connection(link, conversation, self, _HANDSHAKE_BYTES)
            self._attempts[attempt] = _Attempt(connection, delay_s)
            self._loop.add_connection(attempt)
            assert connection.peer is not None
            self._handshakes.begin(attempt, connection.peer, connection.received_bytes)
            self._loop.call_later(_WELCOME_S, partial(self._check, attempt))

    def _try_later(self, connection: Connection, delay_s: float) -> None:
        again = partial(self._try, connection, min(2 * delay_s, LONGEST_DELAY_S))
        self._loop.call_later(delay_s, again)

    def _check(self, attempt: Connection) -> None:
        if attempt in self._attempts:
            self.lost(attempt, "no welcome")

    def lost(self, connection: Connection, reason: str) -> None:
        self._loop.remove_connection(connection)
        self._handshakes.forget(connection)
        failed = self._attempts.pop(connection, None)
        if failed is not None:
            self._try_later(*failed)

    def _welcomed(self, attempt: Connection, header: Header, welcome: DataWelcome) -> None:
        connection = self._attempts.pop(attempt).connection
        self._loop.pause_connection(attempt)
        link, ahead = attempt.hand_over()
        if connection not in self._breaks:
            link.close()
            return
        begins = not connection.welcome
        connection.take_over(link)
        connection.conversation.go_on()
        self._loop.add_connection(connection)
        self._breaks.reconnected(connection)
        try:
            connection.resume(welcome.received, ahead=ahead)
        except ProtocolError as error:
            connection.handler.lost(connection, str(error))
            return
        if begins:
            assert connection.peer is not None
            self._joining.welcomed(connection.peer)

    def close(self) -> None:
        """The job has failed, or this worker leaves it: no link is made any more."""
        self._breaks.clear()
        for attempt in self._attempts:
            self._loop.remove_connection(attempt)
        self._attempts.clear()
