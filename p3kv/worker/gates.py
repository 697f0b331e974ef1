"""Next gradients wait while old values are on their way over the same link."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, Collection, Dict, List, Mapping, Tuple

from p3kv.wire.connection import Connection
from p3kv.wire.header import URGENT, Kind, pack_header

_LONGEST_S = 1.0
_LEAST_BYTES = 1 << 20
"""Fewer values are through about as soon as the word that they are, which makes two hops."""


class Gates:
    """Keeps gradients of a step from a server while the worker of its host waits for values.

    Both come to that host over one link. Its worker is the one that is behind, and nobody's
    gradients can be used before it has pushed its own; so they would only take a part of the link
    from the values that all wait for, in this step and again in the next.

    A worker tells the servers of its own host from which step on it needs no older values, and
    they tell everybody. A server without a worker on its host is always open, and so are all after
    a step with few values; a gate that stays closed for a second opens by itself. Belongs to the
    worker's thread.
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        local_servers: Collection[int],
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """`local_servers`: ranks of the servers on this host; no link is between them and it."""
        self._rank = rank
        self._servers = servers
        self._local_servers = local_servers
        self._call_later = call_later
        self._step = self._told = 0
        self._size_bytes = 0
        self._before_bytes = 0
        """What began in this step, and did in the one before."""
        self._open: Dict[int, int] = {}
        self._held: Dict[int, Dict[int, List[Tuple[Any, ...]]]] = {}
        """Frames by server and step."""

    def begin(self, step: int, size_bytes: int) -> None:
        """Takes note that a transfer of a step begins, before it is sent."""
        if step > self._step:
            self._step = step
            self._before_bytes, self._size_bytes = self._size_bytes, 0
            self._tell(step, self._before_bytes)
        self._size_bytes += size_bytes

    def values_complete(self) -> None:
        """Takes note that no values are waited for now."""
        if self._size_bytes >= self._before_bytes:
            self._tell(self._step + 1, self._size_bytes)

    def push(self, server: int, step: int, *frame: Any) -> None:
        """Queues a frame, as a connection's writer does, as soon as the server is open for its
        step."""
        few = self._before_bytes < _LEAST_BYTES
        if few or server in self._local_servers or step <= self._open.get(server, step):
            if server in self._held:
                # There are few values of the step before. What is older goes first all the same.
                self._release(server, step)
            self._servers[server].writer.push(*frame)
            return
        held = self._held.setdefault(server, {})
        if step not in held:
            held[step] = []
            self._call_later(_LONGEST_S, partial(self.opened, server, step))
        held[step].append(frame)

    def opened(self, server: int, step: int) -> None:
        """Lets go what waits for a server and is of this step or an older one."""
        if step > self._open.get(server, 0):
            self._open[server] = step
            self._release(server, step)

    def _release(self, server: int, step: int) -> None:
        held = self._held.get(server, {})
        for old in sorted(old for old in held if old <= step):
            for frame in held.pop(old):
                self._servers[server].writer.push(*frame)
        if not held:
            self._held.pop(server, None)

    def _tell(self, step: int, old_bytes: int) -> None:
        """Tells that this worker waits for no values of the step before this one."""
        if step <= self._told or old_bytes < _LEAST_BYTES:
            return
        self._told = step
        header = pack_header(Kind.OPEN, self._rank, step=step)
        for server in self._local_servers:
            self._servers[server].writer.push(URGENT, header)
