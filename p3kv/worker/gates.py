"""Next gradients wait while old values are on their way over the same link."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Collection, Dict, List, Mapping, Tuple

from p3kv.wire import messages
from p3kv.wire.connection import Connection
from p3kv.wire.messages import INITIAL_ROUND, Kind, pack_header

_LONGEST_S = 1.0
_LEAST_BYTES = 1 << 20
"""Fewer values are through about as soon as the word that they are, which makes two hops."""


class Gates:
    """Keeps gradients of a round from a server while the worker of its host waits for values.

    Both come to that host over one link. Its worker is the one that is behind, and nobody's
    gradients can be used before it has pushed its own; so they would only take a part of the link
    from the values that all wait for, in this round and again in the next.

    A worker tells the servers of its own host from which round on it needs no older values, and
    they tell everybody. A server without a worker on its host is always open, and so are all after
    a round with few values; a gate that stays closed for a second opens by itself. Belongs to the
    worker's thread.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        here: Collection[int],
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`here`: ranks of the servers of this host, no link between them and this worker."""
        self._rank = rank
        self._servers = servers
        self._here = here
        self._call_later = call_later
        self._round = self._told = INITIAL_ROUND
        self._size_bytes = 0
        self._before_bytes = 0
        """What began in this round, and did in the one before."""
        self._open: Dict[int, int] = {}
        self._held: Dict[Tuple[int, int], List[Tuple[Any, ...]]] = {}

    def begin(self, round: int, size_bytes: int) -> None:
        """Takes note that a transfer of a round begins, before it is sent."""
        if round > self._round:
            self._round = round
            self._before_bytes, self._size_bytes = self._size_bytes, 0
            self._tell(round, self._before_bytes)
        self._size_bytes += size_bytes

    def rest(self) -> None:
        """Takes note that no values are waited for now."""
        if self._size_bytes >= self._before_bytes:
            self._tell(self._round + 1, self._size_bytes)

    def push(self, server: int, round: int, *frame: Any) -> None:
        """Queues a frame, as a connection's writer does, as soon as the server is open for its
        round."""
        few = self._before_bytes < _LEAST_BYTES
        if few or server in self._here or round <= self._open.get(server, round):
            self._servers[server].writer.push(*frame)
            return
        if (server, round) not in self._held:
            self._held[server, round] = []
            self._call_later(_LONGEST_S, partial(self.opened, server, round))
        self._held[server, round].append(frame)

    def opened(self, server: int, round: int) -> None:
        """Lets go what waits for a server and is of this round or an older one."""
        if round <= self._open.get(server, INITIAL_ROUND):
            return
        self._open[server] = round
        for held in [held for held in self._held if held[0] == server and held[1] <= round]:
            for frame in self._held.pop(held):
                self._servers[server].writer.push(*frame)

    def _tell(self, round: int, old_bytes: int) -> None:
        """Tells that this worker waits for no values of the round before this one."""
        if round <= self._told or old_bytes < _LEAST_BYTES:
            return
        self._told = round
        header = pack_header(Kind.OPEN, self._rank, round=round)
        for server in self._here:
            self._servers[server].writer.push(messages.URGENT, header)
