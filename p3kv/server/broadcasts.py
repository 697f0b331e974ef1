"""New values on their way to the workers, to all of them at one pace."""

from __future__ import annotations

from functools import partial
from typing import Iterable, Set

from p3kv.server.buffers import Buffer
from p3kv.wire.connection import Connection
from p3kv.wire.queue import PriorityQueue

_LEAD_OF_WAITING = 0.25


class _Broadcast:
    __slots__ = ("header", "urgency", "value", "waiting")

    def __init__(
        self, urgency: int, header: bytes, value: Buffer, connections: Iterable[Connection]
    ) -> None:
        self.urgency = urgency
        self.header = header
        self.value = value
        self.waiting = set(connections)


class Broadcasts:
    """Hands new values to the connections of the workers, the most urgent first.

    A value goes to all its workers or waits here: it goes when the worker that is furthest behind
    has taken all but the lead of what went before. A worker that had its weights sooner would push
    its next gradients sooner, over the links that still bring the last weights to another one.
    That one falls behind further, and everybody waits for it in the next round.

    Where much waits, the lead is longer: else this server's link is idle for the sake of one
    worker's, and at the end of the round everybody waits for this server. By then nothing waits
    here any more, so that all workers have the last value at about the same time. It has an end,
    since much waits at every server when one worker has fallen behind.
    """

    def __init__(self) -> None:
        self._least_lead_bytes = 0
        self._most_lead_bytes = 0
        self._queue: PriorityQueue[_Broadcast] = PriorityQueue()
        self._queued_bytes = 0
        self._under_way: Set[_Broadcast] = set()
        self._under_way_bytes = 0

    def set_lead(self, least_bytes: int, most_bytes: int) -> None:
        """How far one worker may be ahead of another: the least when nothing waits here."""
        self._least_lead_bytes = least_bytes
        self._most_lead_bytes = most_bytes

    def send(
        self, urgency: int, header: bytes, value: Buffer, connections: Iterable[Connection]
    ) -> None:
        """Queues `value` to `connections`; it is `sending` until the last of them has it."""
        broadcast = _Broadcast(urgency, header, value, connections)
        if broadcast.waiting:
            for _ in broadcast.waiting:
                value.begin_send()
            self._queue.push(urgency, broadcast)
            self._queued_bytes += len(value.bytes)
            self._hand_over()

    def forget(self, connection: Connection) -> None:
        """Waits no more for a connection that has been closed."""
        for broadcast in list(self._under_way):
            if connection in broadcast.waiting:
                self._taken(broadcast, connection)
        self._hand_over()

    def _hand_over(self) -> None:
        while len(self._queue) and self._under_way_bytes <= self._lead_bytes():
            broadcast = self._queue.pop()
            self._queued_bytes -= len(broadcast.value.bytes)
            self._under_way.add(broadcast)
            self._under_way_bytes += len(broadcast.value.bytes)
            for connection in list(broadcast.waiting):
                if connection.closed:
                    self._taken(broadcast, connection)
                else:
                    connection.writer.push(
                        broadcast.urgency,
                        broadcast.header,
                        broadcast.value.bytes,
                        partial(self._sent, broadcast, connection),
                    )

    def _lead_bytes(self) -> float:
        wanted_bytes = self._least_lead_bytes + _LEAD_OF_WAITING * self._queued_bytes
        return min(wanted_bytes, self._most_lead_bytes)

    def _sent(self, broadcast: _Broadcast, connection: Connection) -> None:
        self._taken(broadcast, connection)
        self._hand_over()

    def _taken(self, broadcast: _Broadcast, connection: Connection) -> None:
        broadcast.waiting.remove(connection)
        broadcast.value.end_send()
        if not broadcast.waiting:
            self._under_way.remove(broadcast)
            self._under_way_bytes -= len(broadcast.value.bytes)
