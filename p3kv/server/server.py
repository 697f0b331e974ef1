"""The server process: its connections, and which object handles which frame.

One thread does everything: between two events of the sockets the consumer handles a frame.
"""

from __future__ import annotations

import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Dict, Optional

from p3kv.config import Launch, Settings
from p3kv.errors import ConfigError, P3Error, ProtocolError, in_one_line
from p3kv.server.buffers import Buffer
from p3kv.server.consumer import Consumer
from p3kv.server.optimizer import MakeOptimizer
from p3kv.server.stalls import LOOK_EVERY_S, Stalls
from p3kv.server.workers import Workers
from p3kv.slicing import CREDIT_BYTES, value_credit_bytes
from p3kv.trace import Tracer
from p3kv.wire import messages
from p3kv.wire.address import own_address
from p3kv.wire.connection import Connection, listen
from p3kv.wire.control import ControlClient
from p3kv.wire.header import INITIAL_ROUND, MAX_PROBE_BYTES, URGENT, Header, Kind, pack_header
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    UNKNOWN,
    Bye,
    Failure,
    Finished,
    ForwardOrder,
    KeyLayout,
    ReportFailure,
    Roster,
    Stalled,
    decode,
    encode,
)

_log = logging.getLogger(__name__)

_WITHOUT_PAYLOAD = (Kind.PULL, Kind.SLICES, Kind.OPEN, Kind.BYE)


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
    except BaseException as error:
        server.tell_why(error)
        raise
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
        self._num_workers = launch.num_workers
        self._make_optimizer = make_optimizer
        self._listener = listener
        self._loop = Loop()
        self._landing: Dict[Connection, Buffer] = {}
        self._scratch = memoryview(bytearray(MAX_PROBE_BYTES))
        self._order: Optional[memoryview] = None
        self._import_thread = ThreadPoolExecutor(1, "p3kv-import")
        self._serving = False
        self._open_step = UNKNOWN
        self._failure: Optional[P3Error] = None
        self._workers = Workers(
            launch.num_workers, self._loop, listener, self._connection,
            suspect=lambda failure, second_hand: self._control.suspect(failure, second_hand),
        )  # fmt: skip
        self._stalls = Stalls(self._tell_stall, self._workers.suspect)
        self._consumer = Consumer(launch, self._workers, self._on_lost, self._fail_here)
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

    def serve(self) -> None:
        """Runs until the job is finished; raises its failure."""
        self._control.wait_until_welcome(self._timeout_s)
        self._loop.run(self._consumer.consume)
        inversions = self._loop.inversions
        _log.info(
            "%d values (%d bytes) left while a more urgent one waited for a full connection",
            inversions.frames, inversions.bytes,
        )  # fmt: skip
        if self._failure is not None:
            raise self._failure
        self._control.send(Bye())

    def tell_why(self, error: BaseException) -> None:
        """Tells all why this server ends early, unless the job's failure is the reason."""
        if error is not self._failure:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "it was stopped by Ctrl-C"
            if not interrupted:
                reason = f"p3kv failed in the server: {in_one_line(error)}"
            known_round = self._workers.known_round()
            failure = Failure(reason, "server", self._rank, known_round, "P3Error")
            self._control.send(ReportFailure(failure))

    def close(self) -> None:
        """Ends the trace and the control thread, and closes all sockets."""
        self._consumer.tracer.close()
        self._control.send(Bye())
        self._control.close()
        self._loop.close()
        self._listener.close()
        self._import_thread.shutdown()  # an import that is cut short says so

    # Joining, and who is connected.

    def _join(self, roster: Roster) -> None:
        self._rank = roster.rank
        self._consumer.rank = roster.rank
        self._consumer.tracer = Tracer(self._settings.trace, f"server {roster.rank}")
        self._workers.accept_workers(roster.token)
        self._get_optimizer_ready()

    def _get_optimizer_ready(self) -> None:
        """Imports the optimizer's framework while the workers build their models. The import takes
        seconds, and the first step would wait for it.

        It runs in a thread of its own, because this thread handles connections meanwhile.
        """
        imported = self._import_thread.submit(self._make_optimizer.get_ready)
        imported.add_done_callback(lambda _: self._loop.call_soon(self._begin_to_serve))

    def _begin_to_serve(self) -> None:
        """Welcomes workers, but only after the import: they measure the network once welcome."""
        self._serving = True
        self._look_for_stalls()
        for connection in self._workers.connections.values():
            self._send_welcome(connection)

    def _look_for_stalls(self) -> None:
        now_s, first_s = time.monotonic(), self._stalls.first_s
        self._stalls.look(self._consumer.waits(first_s, now_s), now_s)
        self._loop.call_later(LOOK_EVERY_S, self._look_for_stalls)

    def _tell_stall(self, stalled: Stalled) -> None:
        words = memoryview(encode(stalled))
        header = pack_header(Kind.STALLED, self._rank, payload_bytes=len(words))
        for worker in self._workers.connections.values():
            if not worker.closed:
                worker.writer.push(URGENT, header, words)

    def _connection(self, sock: socket.socket) -> Connection:
        return Connection(
            sock,
            self._place,
            self._on_frame,
            self._on_lost,
            self._settings.send_buffer_bytes or CREDIT_BYTES,
        )

    def _welcome(self, connection: Connection, payload: memoryview) -> None:
        hello = self._workers.admit(connection, payload)
        self._consumer.aggregator.deterministic = hello.deterministic
        self._stalls.timeout_s = hello.stall_timeout_s
        if self._serving:
            self._send_welcome(connection)

    def _send_welcome(self, connection: Connection) -> None:
        connection.writer.push(URGENT, pack_header(Kind.WELCOME, self._rank))
        self._tell_order(connection)

    def _tell_order(self, connection: Connection) -> None:
        """Passes worker rank 0's forward order on, if it is known."""
        if self._order is not None:
            header = pack_header(Kind.ORDER, self._rank, payload_bytes=len(self._order))
            connection.writer.push(URGENT, header, self._order)

    def _on_lost(self, connection: Connection, reason: str) -> None:
        self._workers.lose(connection, reason)

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
            buffer = self._consumer.buffer(header)
            self._landing[connection] = buffer
            return buffer.bytes
        told_by_rank_0 = header.kind in (Kind.OPTIMIZER, Kind.ORDER) and header.rank == 0
        if header.kind == Kind.KEY or told_by_rank_0:
            if header.payload_bytes > messages.MAX_MESSAGE_BYTES:
                raise ProtocolError(f"a message of {header.payload_bytes} bytes is too long")
            return memoryview(bytearray(header.payload_bytes))
        if header.kind == Kind.PROBE and header.payload_bytes <= MAX_PROBE_BYTES:
            return self._scratch[: header.payload_bytes]
        if header.payload_bytes == 0 and header.kind in _WITHOUT_PAYLOAD:
            return None
        raise ProtocolError(
            f"worker {header.rank} sent a frame of kind {header.kind} with "
            f"{header.payload_bytes} bytes, which must not come"
        )

    def _on_frame(
        self, connection: Connection, header: Header, payload: Optional[memoryview]
    ) -> None:
        if header.kind == Kind.PUSH:
            self._consumer.add(connection, header, self._landing.pop(connection))
        elif header.kind == Kind.PULL:
            self._consumer.add(connection, header, None)
        elif header.kind == Kind.KEY:
            assert payload is not None
            self._consumer.declare(decode(payload, KeyLayout))
        elif header.kind == Kind.SLICES:
            self._set_slice_size(header)
        elif header.kind == Kind.OPEN:
            self._workers.needs_no_values_before(header.rank, header.step)
            self._announce_open_step()
        elif header.kind == Kind.PROBE:
            assert payload is not None
            answer = pack_header(Kind.PROBE, self._rank, payload_bytes=len(payload))
            connection.writer.push(URGENT, answer, payload)
        elif header.kind == Kind.OPTIMIZER:
            assert payload is not None
            self._configure_optimizer(header, bytes(payload))
        elif header.kind == Kind.ORDER:
            assert payload is not None
            decode(payload, ForwardOrder)  # or all workers would blame this server for it
            self._order = payload
            for worker in self._workers.connections.values():
                self._tell_order(worker)
        elif header.kind == Kind.HELLO:
            assert payload is not None
            self._welcome(connection, payload)
        else:
            self._workers.end(header.rank)
            self._announce_open_step()
            self._consumer.check_departed()
            connection.writer.push(URGENT, pack_header(Kind.BYE, self._rank))

    def _set_slice_size(self, header: Header) -> None:
        messages.check_slice_size(header.slice)
        if header.round > INITIAL_ROUND and header.rank != 0:
            raise ProtocolError(f"worker {header.rank} wants slices of {header.slice} elements")
        is_new = self._consumer.set_slice_size(header.round, header.slice)
        for worker in self._workers.connections.values():
            if self._settings.send_buffer_bytes is None:
                worker.hold_at_most(value_credit_bytes(header.slice, self._num_workers))
            if is_new and header.round > INITIAL_ROUND:
                news = pack_header(Kind.SLICES, self._rank, slice=header.slice, round=header.round)
                worker.writer.push(URGENT, news)

    def _announce_open_step(self) -> None:
        """Tells all workers from which step on this server's gate is open: no older values are on
        this host's link then."""
        if self._workers.open_step > self._open_step:
            self._open_step = self._workers.open_step
            news = pack_header(Kind.OPEN, self._rank, step=self._open_step)
            for worker in self._workers.connections.values():
                worker.writer.push(URGENT, news)

    def _configure_optimizer(self, header: Header, settings: bytes) -> None:
        try:
            aggregator = self._consumer.aggregator
            if aggregator.optimizer is None:
                aggregator.optimizer = self._make_optimizer()
            aggregator.optimizer.configure(header.step, settings, header.round)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001  MXNet's or the optimizer's own
            _log.exception("the optimizer can't be set up")
            self._fail_here(f"the optimizer can't be set up: {in_one_line(error)}", UNKNOWN)
