"""Takes what workers send of slices, and has it summed and answered."""

from __future__ import annotations

from functools import partial
from typing import Optional

import numpy as np

from p3kv.common.tracing import Tracer, now_ns
from p3kv.errors import ProtocolError
from p3kv.server.engine import Engine, ServerSlice
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.rounds import Round
from p3kv.server.lateness import Lateness, Readiness
from p3kv.server.received_frames import ReceivedFrame, ReceivedFrames
from p3kv.server.round_ends import RoundEnds
from p3kv.server.spans import trace_sum
from p3kv.server.values import Values
from p3kv.server.waiting import Waiting
from p3kv.wire.connection import Connection
from p3kv.wire.fields import PullHeader, PushHeader
from p3kv.wire.framing import Landing
from p3kv.wire.header import (
    CARRIES,
    ENCODED,
    EXACT,
    HAS_VALUE,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    WANTS_RESULT,
)
from p3kv.wire.spans import traced_arrival


class SlicesConsumer:
    """Workers' pushes and pulls of keys of slices. Belongs to the server's thread."""

    def __init__(
        self,
        engine: Engine,
        frames: ReceivedFrames,
        ends: RoundEnds,
        values: Values,
        waiting: Waiting,
        lateness: Lateness,
        tracer: Tracer,
    ) -> None:
        self._engine = engine
        self._pool = engine.rules.pool
        self._frames = frames
        self._ends = ends
        self._values = values
        self._waiting = waiting
        self._lateness = lateness
        self._readiness = Readiness(engine.rules.consistency.num_workers)
        self._tracer = tracer

    def land_push(self, connection: Connection, header: PushHeader) -> Landing:
        """Where a push is received; ProtocolError for a push that can't be right."""
        key = self._engine.key_of_slices(header.key, header.rank)
        state, plan = key.slice_at(header.round, header.slice, header.rank), key.plan
        flags, in_sum = header.flags, IN_HOST_SUM | NO_GRADIENT
        if flags & in_sum and flags & (CARRIES | NO_GRADIENT) != CARRIES:
            if header.payload_bytes:
                instead = (
                    "without a gradient"
                    if flags & NO_GRADIENT
                    else "besides those in its host's sum"
                )
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name} {instead}"
                )
            return Landing(None, partial(self._arrived, connection, header, state, None))
        if flags & ENCODED:
            gradient = self._buffer_of_encoded(state, header)
            memory = gradient.bytes[: header.payload_bytes]
        else:
            dtype = plan.dtype
            if header.payload_bytes != state.length * dtype.itemsize:
                dtype = plan.sum_dtype  # a host's sum may be wider than a gradient
            if header.payload_bytes != state.length * dtype.itemsize:
                raise ProtocolError(
                    f"it sent {header.payload_bytes} bytes for {state.name} of {state.length} "
                    f"{plan.dtype} elements"
                )
            gradient = self._pool.get(state.length, dtype)
            memory = gradient.bytes
        arrived = partial(self._arrived, connection, header, state, gradient)
        return Landing(memory, traced_arrival(self._tracer, header, arrived))

    def land_pull(self, connection: Connection, header: PullHeader) -> Landing:
        """Queues a request for a key's value."""
        act = partial(self._pull, connection, header)
        frame = ReceivedFrame(connection, header, act, None)
        return Landing(None, partial(self._frames.add, frame))

    def _buffer_of_encoded(self, state: ServerSlice, header: PushHeader) -> Buffer:
        codec = state.plan.codecs.gradients
        most_bytes = codec.most_bytes(state.length)
        if header.payload_bytes > most_bytes or header.round == INITIAL_ROUND:
            raise ProtocolError(
                f"it sent {header.payload_bytes} encoded bytes for {state.name} in round "
                f"{header.round}, for which at most {most_bytes} are right"
            )
        return self._pool.get(most_bytes, np.dtype(np.uint8))

    def _arrived(
        self,
        connection: Connection,
        header: PushHeader,
        state: ServerSlice,
        gradient: Optional[Buffer],
    ) -> None:
        ready_s = self._readiness.ready_s(header.rank, header.ready_us)
        act = partial(self._push, header, state, gradient, ready_s)
        self._frames.push(connection, header, act, state)

    def _push(
        self,
        header: PushHeader,
        state: ServerSlice,
        gradient: Optional[Buffer],
        ready_s: float,
    ) -> None:
        start_ns = now_ns()
        current = self._counted(header, state, gradient)
        if header.flags & HAS_VALUE:
            counted = current or state.ledger.open.get(header.round)  # before, of a host's sum
            if counted is not None:
                bare = header.flags & NO_GRADIENT
                (counted.have_value if bare else counted.have_last).add(header.rank)
        if current is not None:
            current.exact |= bool(header.flags & EXACT)
            self._lateness.note_push(current, header.rank, ready_s)
        if gradient is not None:
            trace_sum(self._tracer, header, start_ns)
        self._ends.settle(state)

    def _counted(
        self, header: PushHeader, state: ServerSlice, gradient: Optional[Buffer]
    ) -> Optional[Round]:
        """Counts a worker's push, and adds what it brings; None where the worker was counted
        before."""
        rank, round_, flags = header.rank, header.round, header.flags
        wants_result = bool(flags & WANTS_RESULT)
        engine = self._engine
        current = None
        if flags & IN_HOST_SUM:
            current = engine.push_in_host_sum(state, rank, round_, wants_result, header.step)
            if not flags & CARRIES:
                return current
        encoded = None
        if gradient is not None and flags & ENCODED:
            encoded = gradient.bytes[: header.payload_bytes]
        if flags & CARRIES:
            engine.push_host_sum(
                state, rank, round_, gradient, wants_result, header.priority, header.workers,
                encoded,
            )  # fmt: skip
            return current
        if gradient is None:
            return engine.push_no_gradient(
                state, rank, round_, wants_result, header.priority, header.step
            )
        return engine.push(
            state, rank, round_, gradient, wants_result, header.priority, header.step, encoded
        )

    def _pull(self, connection: Connection, header: PullHeader) -> None:
        key = self._engine.key_of_slices(header.key, header.rank)
        key.check_ahead(header.round, header.rank)
        for state in key.slices(header.round):
            answer = partial(self._values.answer, connection, header, state)
            self._waiting.pull(state, header, answer)
        self._waiting.check_initial_values()
