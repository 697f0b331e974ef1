"""The workers of a server: which are connected, in which round each is, which are lost or done."""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import DefaultDict, Dict, Optional, Set

from p3kv.wire.breaks import Breaks
from p3kv.wire.connection import Connection
from p3kv.wire.control import ControlClient
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, LAST_ROUND, URGENT
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN, Failure

_log = logging.getLogger(__name__)


class Workers:
    """The connections of this job's workers, by rank, once their handshake is complete. Belongs to
    the server's thread."""

    def __init__(self, loop: Loop, control: ControlClient, silence_timeout_s: float) -> None:
        self.server = UNKNOWN
        """The rank of this server, from the roster on."""
        self.connections: Dict[int, Connection] = {}
        self.done: Set[int] = set()
        """Ranks of the workers that have said that they send nothing more."""
        self._loop = loop
        self._control = control
        self._breaks = Breaks("worker", silence_timeout_s, loop, control)
        self.last_round: DefaultDict[int, int] = defaultdict(int)
        """By rank, how far the workers are that have pushed."""
        self.queued: DefaultDict[int, int] = defaultdict(int)
        """By rank, how many of a worker's frames wait or are being handled."""
        self._local_workers: Dict[int, int] = {}
        """By rank of a worker on this host: the step before which it waits for no values."""

    def add(self, rank: int, connection: Connection) -> Connection:
        """Take an authenticated connection; return the worker's from now on: where it was connected
        before, its new link replaces the old one, of whose end this server may not know."""
        known = self.connections.setdefault(rank, connection)
        if known is not connection:
            self._loop.pause_connection(known)
            self._loop.pause_connection(connection)
            link, ahead = connection.hand_over()
            known.take_over(link)
            self._loop.add_connection(known)
            if ahead:
                self.lose(known, "it said more before the welcome")
        self._breaks.reconnected(known)
        _log.info("worker %d is connected", rank)
        return known

    def tell(self, header: Header, words: Optional[memoryview] = None) -> None:
        """Sends a frame to all workers that still take one."""
        for connection in self.connections.values():
            if self.listens(connection):
                connection.writer.push(Frame(URGENT, header, words))

    def tell_rank_0(self, header: Header, words: memoryview) -> None:
        """Sends a frame to worker rank 0, if it still takes one."""
        connection = self.connections[0]
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
            "worker %d is done after round %d", rank, self.last_round.get(rank, INITIAL_ROUND)
        )

    def departed(self, rank: int) -> bool:
        """Whether no more push of a worker comes. Its BYE overtakes its pushes in the queue."""
        return rank in self.done and not self.queued[rank]

    def lose(self, connection: Connection, reason: str) -> None:
        """Close a connection: the job ends if its worker broke the protocol; if its link has ended,
        this server waits for the next."""
        if connection.ended and connection.peer is not None:
            self._loop.pause_connection(connection)
            connection.drop_link()
            if connection.peer not in self.done:
                round_ = self.last_round.get(connection.peer, UNKNOWN)
                self._breaks.begin(connection, reason, round_)
            return
        self._loop.remove_connection(connection)
        if connection.peer is not None:
            self.suspect(connection.peer, f"it broke the protocol: {reason}")

    def suspect(self, rank: int, reason: str, hint: str = "", error: str = "PeerLostError") -> None:
        """Reports that the job can't go on because of a worker; `error` names a class in
        p3kv.errors."""
        round_ = self.last_round.get(rank, UNKNOWN)
        self._control.suspect(Failure(reason, "worker", rank, round_, error, hint), False)

    def fail(self, reason: str, round: int, error: str = "P3Error") -> None:
        """Reports that the job can't go on because of this server; `error` names a class in
        p3kv.errors."""
        self._control.suspect(Failure(reason, "server", self.server, round, error), False)

    def known_round(self) -> int:
        """The newest round that any of them has pushed for; from any thread."""
        newest = max(list(self.last_round.values()), default=INITIAL_ROUND)
        return newest if newest > INITIAL_ROUND else UNKNOWN
