"""The server process: connections, the priority queue, and the consumer behind it.

One thread does everything. Between the sockets' events it takes the most urgent frame from the
queue, adds it to its round's sum and, when the round is complete, updates the slice and queues
its value to every worker that wants it (P3 section 4.2).
"""

from __future__ import annotations

import logging
import socket
from typing import Dict, List, Optional, Tuple

from p3kv.config import Launch, Settings
from p3kv.errors import ConfigError, P3Error, ProtocolError
from p3kv.server.aggregation import Aggregator, Result, SliceState
from p3kv.server.broadcasts import Broadcasts
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.server.optimizer import MakeOptimizer
from p3kv.server.workers import Workers
from p3kv.slicing import LEAST_CREDIT_BYTES, credit_bytes, lead_bytes
from p3kv.trace import Tracer, now_ns
from p3kv.wire import messages
from p3kv.wire.address import own_address
from p3kv.wire.connection import Connection, listen
from p3kv.wire.control import ControlClient
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    UNKNOWN,
    Bye,
    Failure,
    Finished,
    Header,
    KeyLayout,
    Kind,
    Roster,
    decode,
    pack_header,
    urgency,
)
from p3kv.wire.queue import PriorityQueue

_log = logging.getLogger(__name__)

_STALL_S = 10.0
_MOST_WAITING_BYTES = 48 << 20
"""Pushes that have landed and wait: enough to choose from, little beside the weights."""


def run_server(launch: Launch, settings: Settings, make_optimizer: MakeOptimizer) -> None:
    """Serves one job to its end; raises the job's failure.

    Raises ConfigError when this host does not have the address that it is to listen on.
    """
    address = own_address(launch)
    try:
        listener = listen(address)
    except OSError as error:
        raise ConfigError(
            f"a server can't listen at {address}: {error.strerror or error}. DMLC_NODE_HOST must "
            "be an address of the server's own host; DMLC_INTERFACE chooses one by the "
            "interface's name."
        ) from error
    server = _Server(launch, settings, make_optimizer, listener)
    try:
        server.serve()
    finally:
        server.close()


class _Server:
    def __init__(
        self,
        launch: Launch,
        settings: Settings,
        make_optimizer: MakeOptimizer,
        listener: socket.socket,
    ) -> None:
        self._settings = settings
        self._make_optimizer = make_optimizer
        self._listener = listener
        self._loop = Loop()
        self._pool = BufferPool()
        self._aggregator = Aggregator(launch.num_workers, self._pool)
        self._queue: PriorityQueue[Tuple[Connection, Header, Optional[Buffer]]] = PriorityQueue()
        self._waiting_bytes = 0
        self._layouts: Dict[int, KeyLayout] = {}
        self._broadcasts = Broadcasts()
        self._slices: Dict[Tuple[int, int], SliceState] = {}
        self._pulls: Dict[Tuple[int, int], List[Tuple[Connection, Header]]] = {}
        self._landing: Dict[Connection, Buffer] = {}
        self._scratch = memoryview(bytearray(messages.MAX_PROBE_BYTES))
        self._order: Optional[memoryview] = None
        self._failure: Optional[P3Error] = None
        self._workers = Workers(
            launch.num_workers, self._loop, listener, self._connection,
            suspect=lambda failure: self._control.suspect(failure),
        )  # fmt: skip
        self._control = ControlClient(
            launch,
            listener.getsockname()[:2],
            {
                Roster: lambda message: self._loop.call_soon(self._join, message),
                Finished: lambda message: self._loop.call_soon(self._loop.stop),
            },
            on_failure=lambda error: self._loop.call_soon(self._fail, error),
            known_round=self._workers.known_round,
        )
        self._timeout_s = settings.rendezvous_timeout_s
        self._rank = UNKNOWN
        self._tracer = Tracer(None, "server")

    def serve(self) -> None:
        """Runs until the job is finished; raises its failure."""
        self._control.wait_until_welcome(self._timeout_s)
        self._loop.run(self._consume)
        self._tracer.write()
        inversions = self._loop.inversions
        _log.info(
            "%d values (%d bytes) left while a more urgent one waited for a full connection",
            inversions.frames, inversions.bytes,
        )  # fmt: skip
        if self._failure is not None:
            raise self._failure
        self._control.send(Bye())

    def close(self) -> None:
        """Ends the control thread and closes all sockets."""
        self._control.send(Bye())
        self._control.close()
        self._loop.close()
        self._listener.close()

    # Who is there.

    def _join(self, roster: Roster) -> None:
        self._rank = roster.rank
        self._tracer = Tracer(self._settings.trace, f"server {roster.rank}")
        self._loop.call_later(_STALL_S, self._report_stalls)
        self._workers.let_in(roster.token)

    def _connection(self, sock: socket.socket) -> Connection:
        return Connection(
            sock,
            self._place,
            self._on_frame,
            self._on_lost,
            self._settings.send_buffer_bytes or LEAST_CREDIT_BYTES,
        )

    def _welcome(self, connection: Connection, payload: memoryview) -> None:
        hello = self._workers.admit(connection, payload)
        self._aggregator.deterministic = hello.deterministic
        connection.writer.push(messages.URGENT, pack_header(Kind.WELCOME, self._rank))
        self._tell_order(connection)

    def _tell_order(self, connection: Connection) -> None:
        """Hands worker rank 0's forward order on, if it is known."""
        if self._order is not None:
            header = pack_header(Kind.ORDER, self._rank, payload_bytes=len(self._order))
            connection.writer.push(messages.URGENT, header, self._order)

    def _on_lost(self, connection: Connection, reason: str) -> None:
        self._workers.lose(connection, reason)
        self._broadcasts.forget(connection)

    def _fail(self, error: P3Error) -> None:
        if self._failure is None:
            self._failure = error
        self._loop.stop()

    def _fail_here(self, reason: str, round_: int) -> None:
        self._control.suspect(Failure(reason, "server", self._rank, round_, "P3Error"))

    # What arrives.

    def _place(self, connection: Connection, header: Header) -> Optional[memoryview]:
        """Where a frame's payload goes; ProtocolError for a frame that must not come."""
        if connection.peer is None:
            return self._workers.place_hello(connection, header)
        if header.rank != connection.peer:
            raise ProtocolError(f"worker {connection.peer} sent a frame of worker {header.rank}")
        if header.kind == Kind.PUSH:
            state = self._slice(header)
            if header.payload_bytes != state.length * state.dtype.itemsize:
                raise ProtocolError(
                    f"worker {header.rank} sent {header.payload_bytes} bytes for {state.name()} "
                    f"of {state.length} {state.dtype} elements"
                )
            buffer = self._pool.get(state.length, state.dtype)
            self._landing[connection] = buffer
            return buffer.bytes
        told_by_rank_0 = header.kind in (Kind.OPTIMIZER, Kind.ORDER) and header.rank == 0
        if header.kind == Kind.KEY or told_by_rank_0:
            if header.payload_bytes > messages.MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {header.payload_bytes} bytes is too long")
            return memoryview(bytearray(header.payload_bytes))
        if header.kind == Kind.PROBE and header.payload_bytes <= messages.MAX_PROBE_BYTES:
            return self._scratch[: header.payload_bytes]
        if header.kind in (Kind.PULL, Kind.BYE) and header.payload_bytes == 0:
            return None
        raise ProtocolError(
            f"worker {header.rank} sent a frame of kind {header.kind} with "
            f"{header.payload_bytes} bytes, which must not come"
        )

    def _slice(self, header: Header) -> SliceState:
        state = self._slices.get((header.key, header.slice))
        if state is None:
            layout = self._layouts.get(header.key)
            if layout is None:
                raise ProtocolError(f"worker {header.rank} pushed key {header.key}, unknown here")
            length = layout.slice_length(header.slice)
            state = SliceState(layout, header.slice, length)
            self._slices[header.key, header.slice] = state
        return state

    def _on_frame(
        self, connection: Connection, header: Header, payload: Optional[memoryview]
    ) -> None:
        if header.kind == Kind.PUSH:
            self._workers.pushed(header.rank, header.round)
            gradient = self._landing.pop(connection)
            self._waiting_bytes += len(gradient.bytes)
            self._queue.push(urgency(header.round, header.priority), (connection, header, gradient))
        elif header.kind == Kind.PULL:
            self._queue.push(urgency(header.round, header.priority), (connection, header, None))
        elif header.kind == Kind.KEY:
            assert payload is not None
            layout: KeyLayout = decode(payload, KeyLayout)
            if self._layouts.setdefault(layout.key_id, layout) != layout:
                raise ProtocolError(f"worker {header.rank} has another layout: {layout}")
            self._broadcasts.lead_bytes = lead_bytes(layout.slice_size)
            if self._settings.send_buffer_bytes is None:
                connection.hold_at_most(credit_bytes(layout.slice_size))
        elif header.kind == Kind.PROBE:
            assert payload is not None
            answer = pack_header(Kind.PROBE, self._rank, payload_bytes=len(payload))
            connection.writer.push(messages.URGENT, answer, payload)
        elif header.kind == Kind.OPTIMIZER:
            assert payload is not None
            self._configure_optimizer(header, bytes(payload))
        elif header.kind == Kind.ORDER:
            assert payload is not None
            self._order = payload
            for worker in self._workers.connections.values():
                self._tell_order(worker)
        elif header.kind == Kind.HELLO:
            assert payload is not None
            self._welcome(connection, payload)
        else:
            self._workers.end(header.rank)
            self._check_departed()

    def _configure_optimizer(self, header: Header, settings: bytes) -> None:
        try:
            if self._aggregator.optimizer is None:
                self._aggregator.optimizer = self._make_optimizer()
            self._aggregator.optimizer.configure(header.step, settings)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001  MXNet's or the optimizer's own
            _log.exception("the optimizer can't be set up")
            self._fail_here(f"the optimizer can't be set up: {error}", UNKNOWN)

    # What is done with it.

    def _consume(self) -> bool:
        """Handles the most urgent frame, and more if too much waits; returns whether some is left.

        All connections may have brought something since the last time.
        """
        while len(self._queue):
            connection, header, gradient = self._queue.pop()
            if gradient is None:
                self._pull(connection, header)
            else:
                self._waiting_bytes -= len(gradient.bytes)
                self._push(connection, header, gradient)
            if self._waiting_bytes <= _MOST_WAITING_BYTES:
                break
        return len(self._queue) > 0

    def _push(self, connection: Connection, header: Header, gradient: Buffer) -> None:
        state = self._slice(header)
        start_ns = now_ns() if self._tracer.enabled else 0
        try:
            results = self._aggregator.push(
                state,
                header.rank,
                header.round,
                gradient,
                bool(header.flags & messages.WANTS_RESULT),
                header.priority,
                header.step,
            )
        except ProtocolError as error:
            self._on_lost(connection, str(error))
            return
        except Exception as error:  # noqa: BLE001  the optimizer's own
            _log.exception("the optimizer failed")
            self._fail_here(f"the optimizer failed on {state.name()}: {error}", header.round)
            return
        for result in results:
            self._broadcast(state, header.key, result)
        if self._tracer.enabled:
            self._tracer.span(
                "consume", str(state.layout.key), start_ns, now_ns(),
                slice=state.index, round=header.round, worker=header.rank, ended=len(results),
            )  # fmt: skip
        if not results and self._workers.done:
            self._check_departed()

    def _broadcast(self, state: SliceState, key_id: int, result: Result) -> None:
        """Queues a new value to the workers that want it; none of them has to ask."""
        self._broadcasts.send(
            urgency(state.round, result.priority),
            self._value_header(Kind.UPDATED, state, key_id, result.priority),
            result.value,
            [self._workers.connections[rank] for rank in result.wanting],
        )
        waiting = self._pulls.pop((key_id, state.index), [])
        for connection, header in waiting:
            self._pull(connection, header)

    def _pull(self, connection: Connection, header: Header) -> None:
        place = (header.key, header.slice)
        state = self._slices.get(place)
        if state is None or state.value is None or state.round < header.round:
            self._pulls.setdefault(place, []).append((connection, header))
        else:
            state.value.begin_send()
            connection.writer.push(
                urgency(state.round, header.priority),
                self._value_header(Kind.PULLED, state, header.key, header.priority),
                state.value.bytes,
                state.value.end_send,
            )

    def _value_header(self, kind: Kind, state: SliceState, key_id: int, priority: int) -> bytes:
        assert state.value is not None
        return pack_header(
            kind,
            self._rank,
            key=key_id,
            slice=state.index,
            round=state.round,
            priority=priority,
            payload_bytes=len(state.value.bytes),
        )

    # What does not arrive.

    def _check_departed(self) -> None:
        """Ends the job when somebody waits for a worker that has left."""
        for state in self._slices.values():
            for round_ in state.open_rounds:
                for rank in self._aggregator.missing(state, round_):
                    if rank in self._workers.done:
                        self._workers.suspect(
                            rank,
                            f"it ended in order, but {_ranks(state.open_rounds[round_].arrived)} "
                            f"went on to round {round_} of {state.name()}. All workers must make "
                            "the same number of steps: give each the same number of batches.",
                        )
                        return

    def _report_stalls(self) -> None:
        for state in self._slices.values():
            for round_, current in state.open_rounds.items():
                missing = self._aggregator.missing(state, round_)
                if current.stalled and missing:
                    _log.warning(
                        "%s waits for %s in round %d; %s pushed it more than %g s ago",
                        state.name(), _ranks(missing), round_, _ranks(current.arrived), _STALL_S,
                    )  # fmt: skip
                    self._loop.call_later(_STALL_S, self._report_stalls)
                    return
        for state in self._slices.values():
            for current in state.open_rounds.values():
                current.stalled = True
        self._loop.call_later(_STALL_S, self._report_stalls)


def _ranks(ranks: object) -> str:
    numbers = sorted(ranks)  # type: ignore[call-overload]
    return ("worker " if len(numbers) == 1 else "workers ") + ", ".join(map(str, numbers))
