"""Values of slices that leave: to workers that wait for a round, and to those that ask."""

from __future__ import annotations

from typing import Collection, Iterable

from msgspec.structs import replace

from p3kv.common.tracing import Tracer
from p3kv.server.engine import Ended, ServerSlice
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import EndedHeader, PulledHeader, PullHeader, SliceValueHeader, UpdatedHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import EXACT, NO_GRADIENT, URGENT, Kind, clock_us
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN
from p3kv.wire.queue import urgency
from p3kv.wire.spans import trace_departure


class Values:
    """Queues values on the connections of the workers that want them.

    Belongs to the server's thread.
    """

    def __init__(self, rank: int, workers: Workers, loop: Loop, tracer: Tracer) -> None:
        """`rank` is this server's."""
        self._rank = rank
        self._workers = workers
        self._tracer = tracer
        self._loop = loop

    def send_result(self, slice_: ServerSlice, ended: Ended) -> None:
        """Queues a slice's value to the workers that want it; to those that have it, or of a sum
        that nobody has added to, only that it has not changed."""
        urgent = urgency(ended.step, ended.priority)
        header = UpdatedHeader(
            Kind.UPDATED, self._rank, NO_GRADIENT if ended.no_gradient else 0,
            key=slice_.plan.key_id, slice=slice_.index, round=ended.round, step=ended.step,
            priority=ended.priority, behind=slice_.ledger.behind(ended.round),
        )  # fmt: skip
        have_it: Collection[int] = ()
        if ended.no_gradient and slice_.plan.optimizer is None:
            have_it = ended.wanting
        elif ended.no_gradient and slice_.travels_as_it_is:
            have_it = ended.have_value
        for rank in have_it:
            if self._workers.listens(self._workers.connections[rank]):
                self._workers.connections[rank].writer.push(Frame(urgent, header))
        lacking = [rank for rank in ended.wanting if rank not in have_it]
        connections = [self._workers.connections[rank] for rank in lacking]
        self._send_value(connections, urgent, slice_, header, ended.exact, ended.have_last)

    def tell_ended(self, ended: Ended) -> None:
        """Tells workers that a round has ended, where no result does: their windows move on."""
        header = EndedHeader(
            Kind.ENDED, self._rank, NO_GRADIENT if ended.no_gradient else 0,
            key=ended.unit.plan.key_id, round=ended.round, step=ended.step,
        )  # fmt: skip
        for rank in ended.others:
            connection = self._workers.connections[rank]
            if self._workers.listens(connection):
                connection.writer.push(Frame(URGENT, header))

    def answer(self, connection: Connection, header: PullHeader, slice_: ServerSlice) -> None:
        """Answers a pull with a slice's value, which is new enough."""
        # The worker finds where the slice belongs by a round of the slice's generation. A value
        # that was re-sliced is of the round before its generation's first. Where rounds are each
        # worker's own, all slices are of the first generation.
        own = slice_.plan.consistency.own_rounds
        round_ = header.round if own else max(slice_.round, slice_.first_round)
        answer = PulledHeader(
            Kind.PULLED, self._rank, key=slice_.plan.key_id, slice=slice_.index, round=round_,
            request=header.request, priority=header.priority,
        )  # fmt: skip
        urgent = urgency(header.step, header.priority)
        self._send_value([connection], urgent, slice_, answer, bool(header.flags & EXACT))

    def _send_value(
        self,
        connections: Iterable[Connection],
        urgent: int,
        slice_: ServerSlice,
        header: SliceValueHeader,
        exact: bool = False,
        have_last: Collection[int] = (),
    ) -> None:
        """Queues a slice's value, as it travels, on each of the connections."""
        ready_s = slice_.ready_s if header.round == slice_.round else {}
        last_s = max(ready_s.values(), default=0.0)
        worked_us = clock_us(self._loop.worked_s)
        answers_push = isinstance(header, UpdatedHeader)
        for connection in filter(self._workers.listens, connections):
            peer = UNKNOWN if connection.peer is None else connection.peer
            has_last = peer in have_last
            buffer, payload, encoded = slice_.wire(peer, answers_push, exact, has_last)
            buffer.begin_send()
            to_peer = replace(
                header, flags=header.flags | encoded, worked_us=worked_us,
                late_us=clock_us(last_s - ready_s.get(peer, last_s)),
            )  # fmt: skip
            frame = Frame(urgent, to_peer, payload, None, buffer.end_send)
            trace_departure(self._tracer, frame, peer)
            connection.writer.push(frame)
