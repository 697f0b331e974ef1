"""The paper's second queue: received frames wait by urgency (P3 section 4.2)."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

from p3kv.server.engine import Unit
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import PushHeader, QueuedHeader
from p3kv.wire.header import Kind
from p3kv.wire.queue import PriorityQueue, urgency

_MOST_WAITING_BYTES = 48 << 20
"""Received pushes that may wait: enough to choose from, few compared with the weights."""


class ReceivedFrame(NamedTuple):
    """Frame that waits in the queue."""

    connection: Connection
    header: QueuedHeader
    act: Callable[[], None]
    """Function to call when its turn comes."""
    unit: Optional[Unit]
    """Unit that it changes, if any."""
    waiting_bytes: int = 0
    """Memory that it takes while it waits."""


class ReceivedFrames:
    """Frames that wait for the consumer. Belongs to the server's thread."""

    def __init__(self, num_workers: int, workers: Workers) -> None:
        self._workers = workers
        self.queue: PriorityQueue[ReceivedFrame] = PriorityQueue()
        self._waiting_bytes = 0
        self._of_worker = [0] * num_workers
        """By rank, how many of the worker's frames wait or are being handled."""

    @property
    def too_many(self) -> bool:
        """Whether so many bytes wait that they are to be handled first."""
        return self._waiting_bytes > _MOST_WAITING_BYTES

    def push(
        self, connection: Connection, header: QueuedHeader, act: Callable[[], None], unit: Unit
    ) -> None:
        """Queues a frame of a push, or of a request for rows."""
        self._workers.note_round(header.rank, header.round)
        self._waiting_bytes += header.payload_bytes
        self.add(ReceivedFrame(connection, header, act, unit, header.payload_bytes))

    def push_end(
        self, rank: int, unit: Unit, step: int, priority: int, act: Callable[[], None]
    ) -> None:
        """Queues what ends the complete rounds of a unit, as if a worker's push had come."""
        header = PushHeader(
            Kind.PUSH, rank, payload_bytes=unit.size_elems * unit.plan.dtype.itemsize,
            key=unit.plan.key_id, round=unit.round + 1, step=step, priority=priority,
        )  # fmt: skip
        self.add(ReceivedFrame(self._workers.connections[rank], header, act, unit))

    def add(self, frame: ReceivedFrame) -> None:
        """Queues any other frame."""
        self._of_worker[frame.header.rank] += 1
        self.queue.push(urgency(frame.header.step, frame.header.priority), frame)

    def pop(self) -> ReceivedFrame:
        """Takes the most urgent frame; call `handled` when it has been handled."""
        frame = self.queue.pop()
        self._waiting_bytes -= frame.waiting_bytes
        return frame

    def handled(self, frame: ReceivedFrame) -> None:
        """Takes note that a worker's frame has had its effect."""
        self._of_worker[frame.header.rank] -= 1

    def departed(self, rank: int) -> bool:
        """Whether no more push of a worker comes. Its BYE overtakes its pushes in the queue."""
        return rank in self._workers.done and not self._of_worker[rank]
