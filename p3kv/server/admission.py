"""Lets workers into the job: accepts connections, has each show whose it is, and welcomes it."""

from __future__ import annotations

import logging
from resource import RLIMIT_NOFILE, getrlimit
from typing import Callable, Dict, NamedTuple, Optional
from weakref import ref

from p3kv.errors import ProtocolError
from p3kv.server.dispatcher import Dispatcher
from p3kv.server.workers import Workers
from p3kv.transport import Link, Listener
from p3kv.wire.connection import Connection, Handler, Landing, new_memory
from p3kv.wire.credentials import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    Proofs,
    Refusals,
    is_right,
    nonce,
)
from p3kv.wire.fields import Header, HelloHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import MAGIC, URGENT, Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import PROTOCOL_VERSION, DataHello, DataWelcome, JobSettings, decode, encode
from p3kv.wire.protocol import FROM_WORKERS, Conversation

_log = logging.getLogger(__name__)

_ACCEPT_BATCH = 64
_ACCEPT_AGAIN_S = 1.0
"""When to look again, where there was no room for a connection."""
HANDSHAKE_S = 5.0
"""A connection without a complete handshake is closed after this time."""
_MAX_PENDING = 128
"""Connections that may be open without a hello, or without a proof, besides one for each worker, as
all may come at the same time. A worker sends its hello at once."""
_NOT_OURS = (
    "it does not know this job's secret. If it is a worker of this job, give all its processes the "
    "same P3KV_SECRET"
)


class _Challenge(NamedTuple):
    """Challenge that a worker has to answer."""

    worker: int
    workers_nonce: bytes
    servers_nonce: bytes


class Handshakes:
    """Authenticates connections, and tells which worker each belongs to (`wire.credentials`)."""

    def __init__(self, proofs: Proofs, num_workers: int) -> None:
        self._proofs = proofs
        self._num_workers = num_workers
        self._most_pending = _MAX_PENDING + num_workers
        self._strangers: Dict[Connection, None] = {}
        """Connections without a hello, the oldest first."""
        self._challenged: Dict[Connection, _Challenge] = {}
        self._processes: Dict[int, bytes] = {}
        """By rank, what the worker's process has chosen."""
        self._refusals = Refusals(_log)

    def add(self, connection: Connection) -> Optional[Connection]:
        """Take a new connection; return the oldest without a hello if there are too many."""
        self._strangers[connection] = None
        if len(self._strangers) <= self._most_pending:
            return None
        return next((c for c in self._strangers if not c.is_known), connection)

    def waits_for_hello(self, connection: Connection) -> bool:
        """Whether a connection has said nothing that a worker says."""
        return connection in self._strangers and not connection.is_known

    def __contains__(self, connection: Connection) -> bool:
        return connection in self._strangers or connection in self._challenged

    def land_hello(self, connection: Connection, header: HelloHeader) -> Landing:
        """Lands a hello; ProtocolError for one of another protocol."""
        if header.magic != MAGIC:
            raise ProtocolError("what it sent is not p3kv's protocol")
        if header.version != PROTOCOL_VERSION:
            raise ProtocolError(
                f"it speaks protocol {header.version}, this server {PROTOCOL_VERSION}; "
                "install the same p3kv everywhere"
            )
        if header.payload_bytes != HELLO_BYTES:
            raise ProtocolError(f"it sent a hello of {header.payload_bytes} bytes")
        return new_memory(header)

    def challenge(self, connection: Connection, header: HelloHeader, payload: memoryview) -> bytes:
        """Take a hello; return the challenge. ProtocolError if it does not show the secret."""
        hello = bytes(payload)
        workers_nonce, proof = hello[:NONCE_BYTES], hello[NONCE_BYTES:]
        if not is_right(proof, self._proofs.hello(header.rank, workers_nonce)):
            raise ProtocolError(_NOT_OURS)
        if len(self._challenged) >= self._most_pending:
            raise ProtocolError("too many others have said hello and shown no proof")
        del self._strangers[connection]
        challenge = _Challenge(header.rank, workers_nonce, nonce())
        self._challenged[connection] = challenge
        return challenge.servers_nonce + self._proofs.challenge(*challenge)

    def admit(self, connection: Connection, payload: memoryview) -> DataHello:
        """Complete a handshake; ProtocolError if the peer is not this job's worker, or not the
        process that was connected as this one before."""
        challenge = self._challenged[connection]
        proof, words = bytes(payload[:PROOF_BYTES]), bytes(payload[PROOF_BYTES:])
        if not is_right(proof, self._proofs.answer(*challenge, words)):
            raise ProtocolError(f"its proof is wrong: {_NOT_OURS}")
        hello: DataHello = decode(words, DataHello)
        right = hello.rank == challenge.worker and 0 <= hello.rank < self._num_workers
        if not right or self._processes.get(hello.rank, hello.process) != hello.process:
            raise ProtocolError(f"it says to be worker {hello.rank}, which can't be")
        self._processes[hello.rank] = hello.process
        del self._challenged[connection]
        connection.conversation.peer = hello.rank
        return hello

    def refuse(self, connection: Connection, reason: str) -> bool:
        """Forgets a connection whose handshake failed; False if its handshake was complete."""
        if connection not in self:
            return False
        self._strangers.pop(connection, None)
        self._challenged.pop(connection, None)
        self._refusals.note(f"{reason} ({connection.place})")
        return True


class Admission(Handler):
    """Connections until they are a worker's. The first worker says what holds for the whole job.
    Belongs to the server's thread."""

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
        """`credit_bytes`: most unsent bytes on a link, until slice sizes are known. `begin(job)`
        makes what takes a job's frames; None if it can't, and the job ends."""
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
            self._loop.call_later(HANDSHAKE_S, self._check_handshake, ref(connection))
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
