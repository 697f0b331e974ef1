"""The workers of a server: who is let in, how far each one is, who is lost or done."""

from __future__ import annotations

import logging
import socket
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit
from typing import Callable, Dict, Optional, Set
from weakref import ref

from p3kv.server.strangers import HANDSHAKE_S, Strangers
from p3kv.wire.connection import Connection, accept
from p3kv.wire.header import INITIAL_ROUND, LAST_ROUND, Header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN, DataHello, Failure

_log = logging.getLogger(__name__)

_ACCEPT_TOGETHER = 64
_ACCEPT_AGAIN_S = 1.0
"""When to look again, where there was no room for a connection."""


class Workers:
    """The connections of this job's workers, by rank, once they have shown what they are.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        num_workers: int,
        loop: Loop,
        listener: socket.socket,
        connection: Callable[[socket.socket], Connection],
        suspect: Callable[[Failure, bool], None],
    ) -> None:
        """`connection` is made of every socket that comes; `suspect` is told who is lost, and
        whether others may know more of it."""
        self.connections: Dict[int, Connection] = {}
        self.done: Set[int] = set()
        """Ranks of those that have said that they send nothing more."""
        self._num_workers = num_workers
        self._loop = loop
        self._listener = listener
        self._connection = connection
        self._suspect = suspect
        self._strangers: Optional[Strangers] = None
        self._warned = False
        self._last_round: Dict[int, int] = {}
        self._neighbours: Dict[int, int] = {}
        """Workers of this host, and the steps before which they wait for no values."""

    def let_in(self, token: bytes) -> None:
        """Accepts connections from now on, and as workers those that know the job's token."""
        self._strangers = Strangers(token, self._num_workers)
        self._listen()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def place_hello(self, connection: Connection, header: Header) -> memoryview:
        """Where a stranger's hello goes; ProtocolError for anything else that it sends."""
        assert self._strangers is not None
        return self._strangers.place(connection, header)

    def admit(self, connection: Connection, payload: memoryview) -> DataHello:
        """Makes a worker of a stranger; ProtocolError if it is none of this job."""
        assert self._strangers is not None
        hello = self._strangers.admit(connection, payload, self.connections)
        self.connections[hello.rank] = connection
        _log.info("worker %d is connected", hello.rank)
        return hello

    def pushed(self, rank: int, round: int) -> None:
        """Takes note of how far a worker is."""
        self._last_round[rank] = max(round, self._last_round.get(rank, INITIAL_ROUND))

    def neighbour(self, rank: int, step: int) -> None:
        """Takes note that a worker of this host waits for no values of the steps before."""
        self._neighbours[rank] = step

    @property
    def open_step(self) -> int:
        """The last step before which no worker of this host waits for values, as far as it says
        when it does; UNKNOWN if none ever did."""
        return min(self._neighbours.values(), default=UNKNOWN)

    def end(self, rank: int) -> None:
        """Takes note that a worker is done."""
        self.done.add(rank)
        if rank in self._neighbours:
            self._neighbours[rank] = LAST_ROUND
        _log.info(
            "worker %d is done after round %d", rank, self._last_round.get(rank, INITIAL_ROUND)
        )

    def lose(self, connection: Connection, reason: str) -> None:
        """Closes a connection; it ends the job if a worker that is not done was behind it."""
        self._loop.remove_connection(connection)
        stranger = self._strangers is not None and self._strangers.refuse(connection, reason)
        if not stranger and connection.peer is not None and connection.peer not in self.done:
            what = "it was lost" if connection.ended else "it broke the protocol"
            self.suspect(connection.peer, f"{what}: {reason}", second_hand=connection.ended)

    def suspect(self, rank: int, reason: str, hint: str = "", second_hand: bool = False) -> None:
        """Reports that the job can't go on because of a worker."""
        round_ = self._last_round.get(rank, UNKNOWN)
        self._suspect(Failure(reason, "worker", rank, round_, hint=hint), second_hand)

    def known_round(self) -> int:
        """The newest round that any of them has pushed for; from any thread."""
        newest = max(list(self._last_round.values()), default=INITIAL_ROUND)
        return newest if newest > INITIAL_ROUND else UNKNOWN

    def _accept(self) -> None:
        assert self._strangers is not None
        accepted, no_room = accept(self._listener, _ACCEPT_TOGETHER)
        for sock in accepted:
            connection = self._connection(sock)
            self._loop.add_connection(connection)
            self._loop.call_later(HANDSHAKE_S, partial(self._check_shown, ref(connection)))
            oldest = self._strangers.add(connection)
            if oldest is not None:
                self._hear_or_lose(self._strangers, oldest)
        if no_room:
            self._pause_accepting()

    def _hear_or_lose(self, strangers: Strangers, oldest: Connection) -> None:
        """Makes room for newer connections; a hello may wait to be read, and belong to a worker."""
        oldest.receive()
        if oldest in strangers:
            self.lose(oldest, "too many newer ones did not say hello either")

    def _pause_accepting(self) -> None:
        """Leaves the connections that wait alone for a while; they would wake the loop for ever."""
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
        if not self._warned:
            self._warned = True
            _log.warning(
                "the system has no room for more connections, and tries again every %g s. Raise "
                "the limit of open files ('ulimit -n', here %d): a server needs one for every "
                "worker, and some more.",
                _ACCEPT_AGAIN_S, getrlimit(RLIMIT_NOFILE)[0],
            )  # fmt: skip

    def _check_shown(self, waiting: ref[Connection]) -> None:
        connection = waiting()
        if connection is not None and self._strangers and connection in self._strangers:
            self.lose(connection, f"it did not say hello within {HANDSHAKE_S:g} s")
