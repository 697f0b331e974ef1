"""Which gradients may leave now, and in which order: gates, and turns."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, List, Mapping, Optional

from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header, StepHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import LAST, URGENT, Kind
from p3kv.wire.loop import Loop

_LONGEST_S = 1.0
_LEAST_BYTES = 1 << 20
"""After a step with fewer bytes of values gates stay open: the announcement that the values have
arrived makes two hops and takes about as long as the values."""


class Egress:
    """Queues gradients for the servers as soon as they may leave. Belongs to the worker's thread.

    Gates: gradients of a step for a server wait while the worker on the server's host waits for
    values of older steps. Both arrive over one link, and no gradient of the step can be used before
    that worker, the straggler, has pushed its own. A worker tells the servers of its host from
    which step on it waits for no older values (OPEN), and these tell all workers. The gate of a
    server without a worker on its host is open, and one that stays closed for a second opens.

    Turns: where that pays, gradients leave in the order in which they become ready until the
    backward pass is over, which is the same order on all workers; what is left then goes by
    urgency. Connections are kept in step meanwhile (`wire/loop.py`).
    """

    def __init__(
        self,
        rank: int,
        servers: Mapping[int, Connection],
        local_servers: Collection[int],
        loop: Loop,
    ) -> None:
        """`local_servers`: ranks of the servers on this host, which this worker reaches without a
        link."""
        self._rank = rank
        self._servers = servers
        self._local_servers = local_servers
        self._loop = loop
        self._step = self._told = 0
        self._size_bytes = 0
        self._before_bytes = 0
        """Bytes of the transfers that began in this step, and in the step before."""
        self._open: Dict[int, int] = {}
        """By server, the last step for which its gate is open, as far as it has said so."""
        self._held: Dict[int, Dict[int, List[Frame]]] = {}
        """Frames by server and step."""
        self._turns_pay = loop.pacing.keeps
        self._in_turn = False
        self._has_left = False

    @property
    def turns_pay(self) -> bool:
        """Whether gradients should leave in turn, from the next transfer on, and connections be
        kept in step."""
        return self._turns_pay

    @turns_pay.setter
    def turns_pay(self, pay: bool) -> None:
        self._turns_pay = self._loop.pacing.keeps = pay

    def begin(self, step: int, size_bytes: int) -> None:
        """Counts a transfer of a step, before it is sent. The step's last transfer has begun when
        as many bytes have as in the step before."""
        if step > self._step:
            self._step = step
            self._before_bytes, self._size_bytes = self._size_bytes, 0
            self._tell(step, self._before_bytes)
        self._size_bytes += size_bytes
        in_turn = self._turns_pay and self._size_bytes < self._before_bytes
        if in_turn != self._in_turn:
            self._in_turn = in_turn
            for connection in self._servers.values():
                connection.writer.take_turns(in_turn)

    def tell(
        self, header: Header, words: bytes = b"", servers: Optional[Iterable[int]] = None
    ) -> None:
        """Sends a frame that carries no slice to `servers`, by default to all; it passes gates.
        After the goodbye they need to know nothing."""
        if self._has_left:
            return
        for server in self._servers if servers is None else servers:
            self._servers[server].writer.push(Frame(URGENT, header, memoryview(words)))

    def values_complete(self) -> None:
        """Announces that this worker waits for no values now, if all of the step have begun."""
        if self._size_bytes >= self._before_bytes:
            self._tell(self._step + 1, self._size_bytes)

    def push(self, server: int, step: int, frame: Frame) -> None:
        """Queues a frame on the connection's writer, as soon as the gate is open for its step."""
        few = self._before_bytes < _LEAST_BYTES
        if few or server in self._local_servers or step <= self._open.get(server, step):
            if server in self._held:
                # The gate is open: the step before had few values. Older frames still go first.
                self._release(server, step)
            self._servers[server].writer.push(frame)
            return
        held = self._held.setdefault(server, {})
        if step not in held:
            held[step] = []
            self._loop.call_later(_LONGEST_S, self.open, server, step)
        held[step].append(frame)

    def say_goodbye(self) -> None:
        """Tells all servers that nothing more comes, behind all frames that wait for the gates."""
        self._has_left = True
        header = Header(Kind.BYE, self._rank)
        for server in self._servers:
            newest = max(self._held.get(server, {}), default=0)
            self.push(server, newest, Frame(LAST, header, in_turn=True))

    def open(self, server: int, step: int) -> None:
        """Opens the gate of a server for this step and older ones, and queues what was held."""
        if step > self._open.get(server, 0):
            self._open[server] = step
            self._release(server, step)

    def _release(self, server: int, step: int) -> None:
        held = self._held.get(server, {})
        for old in sorted(old for old in held if old <= step):
            for frame in held.pop(old):
                self._servers[server].writer.push(frame)
        if not held:
            self._held.pop(server, None)

    def _tell(self, step: int, old_bytes: int) -> None:
        """Tells the local servers that this worker waits for no values of steps before `step`."""
        if step <= self._told or old_bytes < _LEAST_BYTES:
            return
        self._told = step
        header = StepHeader(Kind.OPEN, self._rank, step=step)
        self.tell(header, servers=self._local_servers)
