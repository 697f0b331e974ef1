"""The workers of a server: which are connected, in which round each is, which are lost or done."""

from __future__ import annotations

import logging
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit
from typing import Callable, Dict, Optional, Set
from weakref import ref

from p3kv.errors import ProtocolError
from p3kv.server.handshakes import HANDSHAKE_S, Handshakes
from p3kv.transport import Link, Listener
from p3kv.wire.breaks import Breaks
from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header, HelloHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, LAST_ROUND, URGENT, Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN, DataHello, DataWelcome, Failure, encode
from p3kv.wire.proofs import Proofs

_log = logging.getLogger(__name__)

_ACCEPT_BATCH = 64
_ACCEPT_AGAIN_S = 1.0
"""When to look again, where there was no room for a connection."""


class Workers:
    """The connections of this job's workers, by rank, once their handshake is complete.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        num_workers: int,
        loop: Loop,
        listener: Listener,
        connection: Callable[[Link], Connection],
        suspect: Callable[[Failure, bool], None],
        report_break: Callable[[Failure], None],
        silence_timeout_s: float,
    ) -> None:
        """`connection` makes an accepted link a connection. `suspect` is told which worker is lost,
        and whether other processes may know a better cause; `report_break` is told whose link has
        ended."""
        self.connections: Dict[int, Connection] = {}
        self.done: Set[int] = set()
        """Ranks of the workers that have said that they send nothing more."""
        self._num_workers = num_workers
        self._loop = loop
        self._listener = listener
        self._connection = connection
        self._suspect = suspect
        self._handshakes: Optional[Handshakes] = None
        self._received: Dict[int, int] = {}
        """By rank, what the worker had received when it said hello last."""
        self._breaks = Breaks(
            "worker", silence_timeout_s, loop.call_later, report_break,
            lambda failure: suspect(failure, True),
        )  # fmt: skip
        self._warned = False
        self._last_round: Dict[int, int] = {}
        self._local_workers: Dict[int, int] = {}
        """By rank of a worker on this host: the step before which it waits for no values."""

    def accept_workers(self, proofs: Proofs) -> None:
        """Accepts connections from now on; those that show the right proofs become workers."""
        self._handshakes = Handshakes(proofs, self._num_workers)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.descriptor, self._accept)

    def land_hello(self, connection: Connection, header: HelloHeader) -> memoryview:
        """Where a hello's payload goes; ProtocolError for one of another protocol."""
        assert self._handshakes is not None
        return self._handshakes.land(connection, header)

    def challenge(self, connection: Connection, header: HelloHeader) -> bytes:
        """Takes a hello that has arrived, and returns the challenge; ProtocolError if whoever sent
        it does not belong to the job."""
        assert self._handshakes is not None
        return self._handshakes.challenge(connection, header)

    def admit(self, connection: Connection, payload: memoryview) -> DataHello:
        """Completes a handshake; ProtocolError if the peer is not a worker of this job.

        A worker that was connected before goes on here: its new link takes the place of the old
        one, of whose end this server may not have heard.
        """
        assert self._handshakes is not None
        hello = self._handshakes.admit(connection, payload)
        known = self.connections.setdefault(hello.rank, connection)
        if known is not connection:
            self._loop.pause_connection(known)
            self._loop.pause_connection(connection)
            link, ahead = connection.hand_over()
            known.take_over(link)
            self._loop.add_connection(known)
            if ahead:
                self.lose(known, "it said more before the welcome")
        self._received[hello.rank] = hello.received
        self._breaks.reconnected(known)
        _log.info("worker %d is connected", hello.rank)
        return hello

    def welcome(self, connection: Connection, rank: int) -> None:
        """Welcomes a worker that was admitted: it gets what it has not received, if anything was
        sent before."""
        words = encode(DataWelcome(connection.received_bytes))
        header = pack_header(Header(Kind.WELCOME, rank), len(words), received=0)
        if not connection.welcome:
            connection.conversation.welcome()
        assert connection.peer is not None
        try:
            connection.resume(self._received[connection.peer], header + words)
        except ProtocolError as error:
            # Not raised: another connection may have made the handshake.
            self.lose(connection, str(error))

    def note_round(self, rank: int, round: int) -> None:
        """Takes note of how far a worker is."""
        self._last_round[rank] = max(round, self._last_round.get(rank, INITIAL_ROUND))

    def tell(self, header: Header, words: Optional[memoryview] = None) -> None:
        """Sends a frame to all workers that still take one."""
        for connection in self.connections.values():
            if self.listens(connection):
                connection.writer.push(Frame(URGENT, header, words))

    def listens(self, connection: Connection) -> bool:
        """Whether a worker still takes frames."""
        return not connection.closed and connection.peer not in self.done

    def needs_no_values_before(self, rank: int, step: int) -> None:
        """Takes note that a worker on this host waits for no values of steps before `step`."""
        self._local_workers[rank] = step

    @property
    def open_step(self) -> int:
        """The last step before which no worker on this host waits for values; UNKNOWN while none
        of them has said so."""
        return min(self._local_workers.values(), default=UNKNOWN)

    def end(self, rank: int) -> None:
        """Takes note that a worker is done."""
        self.done.add(rank)
        if rank in self._local_workers:
            self._local_workers[rank] = LAST_ROUND
        _log.info(
            "worker %d is done after round %d", rank, self._last_round.get(rank, INITIAL_ROUND)
        )

    def lose(self, connection: Connection, reason: str) -> None:
        """Closes a connection. The job ends if its worker broke the protocol; if its link has
        ended, this server waits for the worker's next one."""
        refused = self._handshakes is not None and self._handshakes.refuse(connection, reason)
        if not refused and connection.ended and connection.peer is not None:
            self._loop.pause_connection(connection)
            connection.drop_link()
            if connection.peer not in self.done:
                round_ = self._last_round.get(connection.peer, UNKNOWN)
                self._breaks.begin(connection, reason, round_)
            return
        self._loop.remove_connection(connection)
        if not refused and connection.peer is not None:
            self.suspect(connection.peer, f"it broke the protocol: {reason}")

    def suspect(self, rank: int, reason: str, hint: str = "", error: str = "PeerLostError") -> None:
        """Reports that the job can't go on because of a worker; `error` names a class in
        p3kv.errors."""
        round_ = self._last_round.get(rank, UNKNOWN)
        self._suspect(Failure(reason, "worker", rank, round_, error, hint), False)

    def known_round(self) -> int:
        """The newest round that any of them has pushed for; from any thread."""
        newest = max(list(self._last_round.values()), default=INITIAL_ROUND)
        return newest if newest > INITIAL_ROUND else UNKNOWN

    def _accept(self) -> None:
        assert self._handshakes is not None
        links, no_room = self._listener.accept(_ACCEPT_BATCH)
        for link in links:
            connection = self._connection(link)
            self._loop.add_connection(connection)
            self._loop.call_later(HANDSHAKE_S, partial(self._check_handshake, ref(connection)))
            oldest = self._handshakes.add(connection)
            if oldest is not None:
                self._read_or_drop(self._handshakes, oldest)
        if no_room:
            self._pause_accepting()

    def _read_or_drop(self, handshakes: Handshakes, oldest: Connection) -> None:
        """Makes room for newer connections. Reads first: a worker's hello may have arrived."""
        oldest.receive()
        if handshakes.waits_for_hello(oldest):
            self.lose(oldest, "too many newer ones did not say hello either")

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
        if connection is not None and self._handshakes and connection in self._handshakes:
            self.lose(connection, f"it did not complete the handshake within {HANDSHAKE_S:g} s")
