"""Lets workers into the job: accepts connections, has each show whose it is, and welcomes it."""

from __future__ import annotations

import logging
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit
from typing import Callable, Dict, Optional
from weakref import ref

from p3kv.errors import ProtocolError
from p3kv.server.dispatcher import Dispatcher
from p3kv.server.handshakes import HANDSHAKE_S, Handshakes
from p3kv.server.workers import Workers
from p3kv.transport import Link, Listener
from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header, HelloHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT, Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import DataWelcome, JobSettings, encode
from p3kv.wire.protocol import FROM_WORKERS, Conversation

_log = logging.getLogger(__name__)

_ACCEPT_BATCH = 64
_ACCEPT_AGAIN_S = 1.0
"""When to look again, where there was no room for a connection."""


class Admission(Handler):
    """Connections until they are a worker's. The first worker says what holds for the whole job.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        rank: int,
        loop: Loop,
        listener: Listener,
        credit_bytes: int,
        handshakes: Handshakes,
        workers: Workers,
        begin: Callable[[JobSettings], Optional[Dispatcher]],
    ) -> None:
        """`credit_bytes` are the most unsent bytes on a link, until slice sizes are known.
        `begin(job)` makes what takes the frames of a job with these settings; None if it can't, and
        the job ends."""
        self._rank = rank
        self._loop = loop
        self._listener = listener
        self._credit_bytes = credit_bytes
        self._handshakes = handshakes
        self._workers = workers
        self._begin = begin
        self._job: Optional[JobSettings] = None
        """What all workers have agreed on, once one of them has said hello."""
        self._dispatcher: Optional[Dispatcher] = None
        self.arrivals = {Kind.HELLO: self._challenge, Kind.PROOF: self._admit}
        self.landings = {Kind.HELLO: handshakes.land_hello}
        self._received: Dict[int, int] = {}
        """By rank, what the worker had received when it said hello last."""
        self._serving = False
        self._warned = False
        self._listen()

    def begin_to_serve(self) -> None:
        """Welcomes the workers, and those that come later as soon as they come."""
        self._serving = True
        for rank, connection in self._workers.connections.items():
            self._welcome(rank, connection)

    def lost(self, connection: Connection, reason: str) -> None:
        if self._handshakes.refuse(connection, reason):
            self._loop.remove_connection(connection)
        else:
            self._workers.lose(connection, reason)

    # Accepting.

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.descriptor, self._accept)

    def _accept(self) -> None:
        links, no_room = self._listener.accept(_ACCEPT_BATCH)
        for link in links:
            connection = self._connection(link)
            self._loop.add_connection(connection)
            self._loop.call_later(HANDSHAKE_S, partial(self._check_handshake, ref(connection)))
            oldest = self._handshakes.add(connection)
            if oldest is not None:
                self._read_or_drop(oldest)
        if no_room:
            self._pause_accepting()

    def _connection(self, link: Link) -> Connection:
        conversation = Conversation(FROM_WORKERS, "worker")
        return Connection(link, conversation, self, self._credit_bytes)

    def _read_or_drop(self, oldest: Connection) -> None:
        """Makes room for newer connections. Reads first: a worker's hello may have arrived."""
        oldest.receive()
        if self._handshakes.waits_for_hello(oldest):
            self.lost(oldest, "too many newer ones did not say hello either")

    def _pause_accepting(self) -> None:
        """Accepts nothing for a while: waiting connections would wake the loop again and again."""
        self._loop.remove_reader(self._listener.descriptor)
        self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
        if not self._warned:
            self._warned = True
            _log.warning(
                "the system has no room for more connections, and tries again every %g s. Raise "
                "the limit of open files ('ulimit -n', here %d): a server needs one for every "
                "worker, and some more.",
                _ACCEPT_AGAIN_S, getrlimit(RLIMIT_NOFILE)[0],
            )  # fmt: skip

    def _check_handshake(self, waiting: ref[Connection]) -> None:
        connection = waiting()
        if connection is not None and connection in self._handshakes:
            self.lost(connection, f"it did not complete the handshake within {HANDSHAKE_S:g} s")

    # The handshake.

    def _challenge(self, connection: Connection, header: HelloHeader, payload: memoryview) -> None:
        words = memoryview(self._handshakes.challenge(connection, header, payload))
        connection.writer.push(Frame(URGENT, Header(Kind.CHALLENGE, self._rank), words))

    def _admit(self, connection: Connection, header: Header, payload: memoryview) -> None:
        hello = self._handshakes.admit(connection, payload)
        connection = self._workers.add(hello.rank, connection)
        self._received[hello.rank] = hello.received
        if self._job is None:
            self._job = hello.settings
            self._dispatcher = self._begin(self._job)
        elif hello.settings != self._job:
            raise ProtocolError(f"it has {hello.settings.besides(self._job)}, unlike the others")
        if self._serving:
            self._welcome(hello.rank, connection)

    def _welcome(self, rank: int, connection: Connection) -> None:
        """Welcomes a worker: it gets what it has not received, if anything was sent before."""
        if self._dispatcher is None:
            return
        words = encode(DataWelcome(connection.received_bytes))
        header = pack_header(Header(Kind.WELCOME, self._rank), len(words), received=0)
        is_new = not connection.welcome
        connection.handler = self._dispatcher
        if is_new:
            connection.conversation.welcome()
        try:
            connection.resume(self._received[rank], header + words)
        except ProtocolError as error:
            # Not raised: another connection may have made the handshake.
            self.lost(connection, str(error))
        if is_new:
            self._dispatcher.welcomed(rank, connection)
