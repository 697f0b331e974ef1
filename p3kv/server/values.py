"""Values of slices that leave: to workers that wait for a round, and to those that ask."""

from __future__ import annotations

from typing import Callable, Iterable

from p3kv.server.aggregation import Aggregator
from p3kv.server.buffers import BufferPool
from p3kv.server.keys import ServerKey
from p3kv.server.slice_states import Result, SliceState
from p3kv.server.waiting import Pull, Pulls
from p3kv.server.workers import Workers
from p3kv.trace import Tracer
from p3kv.wire.connection import Connection
from p3kv.wire.header import NO_GRADIENT, URGENT, Kind, clock_us, pack_header, with_time
from p3kv.wire.messages import UNKNOWN
from p3kv.wire.queue import urgency
from p3kv.wire.spans import traced_departure


class Values:
    """Queues values on the connections of the workers that want them.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        rank: Callable[[], int],
        workers: Workers,
        aggregator: Aggregator,
        pool: BufferPool,
        tracer: Callable[[], Tracer],
        worked_s: Callable[[], float],
    ) -> None:
        """`rank` and `tracer` are the server's, which it has once the job has begun. `worked_s()`:
        for how long it has worked so far."""
        self.pulls: Pulls = {}
        """Requests for values that are not new enough yet."""
        self._rank = rank
        self._workers = workers
        self._aggregator = aggregator
        self._pool = pool
        self._tracer = tracer
        self._worked_s = worked_s

    def send_result(self, result: Result) -> None:
        """Queues a value to the workers that want it; of a sum that nobody has added to, only that
        this is so."""
        connections = [self._workers.connections[rank] for rank in result.wanting]
        urgent = urgency(result.step, result.priority)
        flags = NO_GRADIENT if result.no_gradient else 0
        if flags and result.state.key.store not in self._aggregator.optimizers:
            header = pack_header(
                Kind.UPDATED, self._rank(), key=result.state.key.key_id, slice=result.state.index,
                round=result.round, step=result.step, priority=result.priority, flags=flags,
            )  # fmt: skip
            for connection in filter(self._workers.listens, connections):
                connection.writer.push(urgent, header)
            return
        self._send_value(
            connections, urgent, result.state, Kind.UPDATED, result.round, result.step,
            result.priority, flags,
        )  # fmt: skip

    def send_early_results(self, state: SliceState) -> None:
        """Queues the value that a slice has already to workers that may go on with it."""
        if state.early_rounds:
            for result in self._aggregator.early_results(state):
                self.send_result(result)

    def tell_ended(self, key: ServerKey, result: Result) -> None:
        """Tells workers that a round has ended, where no result does: their windows move on."""
        header = pack_header(
            Kind.ENDED, self._rank(), key=key.declared.key_id, round=result.round, step=result.step,
            flags=NO_GRADIENT if result.no_gradient else 0,
        )  # fmt: skip
        for rank in result.others:
            connection = self._workers.connections[rank]
            if self._workers.listens(connection):
                connection.writer.push(URGENT, header)

    def answer_pulls(self, state: SliceState) -> None:
        """Answers the pulls that wait for a slice's value and for which it is new enough now."""
        for pull in self.pulls.pop(state, ()):
            self.answer(state, pull)

    def answer(self, state: SliceState, pull: Pull) -> None:
        """Answers a pull with a slice's value, as soon as the value is new enough."""
        connection, header, _ = pull
        if not self._aggregator.is_new_enough(state, header.round, header.rank):
            self.pulls.setdefault(state, []).append(pull)
        else:
            # The worker finds where the slice belongs by a round of the slice's generation. A
            # value that was re-sliced is of the round before its generation's first. Where rounds
            # are each worker's own, all slices are of the first generation.
            round_ = header.round if state.own is not None else max(state.round, state.first_round)
            self._send_value(
                [connection], urgency(header.step, header.priority), state, Kind.PULLED, round_,
                header.slice, header.priority,
            )  # fmt: skip

    def _send_value(
        self,
        connections: Iterable[Connection],
        urgent: int,
        state: SliceState,
        kind: Kind,
        round: int,
        step: int,
        priority: int,
        flags: int = 0,
    ) -> None:
        """Queues a slice's value, as it travels, on each of the connections."""
        listening = [one for one in connections if self._workers.listens(one)]
        if not listening:
            return
        buffer, payload, encoded = state.wire(self._pool)
        header = pack_header(
            kind, self._rank(), key=state.key.key_id, slice=state.index, round=round, step=step,
            priority=priority, payload_bytes=len(payload), flags=flags | encoded,
            worked_us=clock_us(self._worked_s()),
        )  # fmt: skip
        ready_s = state.ready_s if round == state.round else {}
        last_s = max(ready_s.values(), default=0.0)
        for connection in listening:
            buffer.begin_send()
            peer = UNKNOWN if connection.peer is None else connection.peer
            late_us = clock_us(last_s - ready_s.get(peer, last_s))
            frame = traced_departure(
                self._tracer(), payload, None, state.key.key_id, peer, round,
                step if kind == Kind.UPDATED else UNKNOWN, state.index, priority,
            )  # fmt: skip
            connection.writer.push(urgent, with_time(header, late_us), *frame, buffer.end_send)
