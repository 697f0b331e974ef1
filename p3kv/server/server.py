"""The server process: how it joins its job, serves and ends.

One thread does everything: between two events of the sockets the consumer handles a frame.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Optional

import numpy as np

from p3kv.checkpoints import Place
from p3kv.common.log import name_rank
from p3kv.common.tracing import Tracer
from p3kv.config import Launch, Settings
from p3kv.consistency import make_consistency
from p3kv.errors import ConfigError, P3Error, in_one_line
from p3kv.report.metrics import Metrics
from p3kv.server import outer  # noqa: F401  registers it
from p3kv.server.admission import Admission, Handshakes
from p3kv.server.consumer import Consumer
from p3kv.server.dispatcher import Dispatcher
from p3kv.server.optimizer import JobOptimizers
from p3kv.server.stragglers import LOOK_EVERY_S, Lateness
from p3kv.server.workers import Workers
from p3kv.slicing import CREDIT_BYTES
from p3kv.transport import Listener, make_transport
from p3kv.wire.address import own_address
from p3kv.wire.control import ControlClient, Node
from p3kv.wire.credentials import Credentials, Proofs
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    UNKNOWN,
    Bye,
    Failure,
    Finished,
    JobSettings,
    ReportFailure,
    Roster,
    ServerNumbers,
    TimeTold,
    ToScheduler,
    WorkersMayLeave,
)
from p3kv.wire.tracing import SchedulersClock

_log = logging.getLogger(__name__)


def run_server(launch: Launch, settings: Settings) -> None:
    """Serves one job to its end; raises the job's failure. Raises ConfigError when this host does
    not have the address that it is to listen on."""
    address = own_address(launch)
    credentials = Credentials(launch.common_secret)
    transport = make_transport(settings.transport, settings, credentials.transport_key())
    try:
        listener = transport.listen(address)
    except OSError as error:
        raise ConfigError(
            f"a server can't listen at {address}: {error.strerror or error}. DMLC_NODE_HOST must "
            "be an address of the server's own host; DMLC_INTERFACE chooses one by the "
            "interface's name."
        ) from error
    server = _Server(launch, settings, credentials, listener)
    try:
        server.serve()
    except BaseException as error:
        server.tell_why(error)
        raise
    finally:
        server.close()


class _Server(Node):
    hears = (Roster, WorkersMayLeave, Finished, TimeTold)

    def __init__(
        self, launch: Launch, settings: Settings, credentials: Credentials, listener: Listener
    ) -> None:
        self._settings = settings
        self._credentials = credentials
        self._optimizers = JobOptimizers()
        self._listener = listener
        self._loop = Loop()
        self._import_thread = ThreadPoolExecutor(1, "p3kv-import")
        self._failure: Optional[P3Error] = None
        self._lateness = Lateness(launch.num_workers)
        self._tracer: Optional[Tracer] = None  # from the roster on
        self._consumer: Optional[Consumer] = None  # from the first worker on
        self._timeout_s = settings.rendezvous_timeout_s
        self._rank = UNKNOWN
        self._began_s = time.monotonic()
        self._metrics: Optional[Metrics] = None
        self._clock = SchedulersClock()
        self._control = ControlClient(
            launch, settings, self._credentials, listener.address, settings.transport, self
        )
        self._workers = Workers(self._loop, self._control, settings.silence_timeout_s)
        self._control.start()

    def serve(self) -> None:
        """Runs until the job is finished; raises its failure."""
        self._control.wait_until_welcome(self._timeout_s)
        # As in frameworks, nan and infinity in gradients are no reason for a warning.
        with np.errstate(over="ignore", invalid="ignore"):
            self._loop.run(self._consume)
        inversions = self._loop.inversions
        _log.info(
            "%d values (%d bytes) left while a more urgent one waited for a full connection",
            inversions.frames, inversions.bytes,
        )  # fmt: skip
        if self._failure is not None:
            raise self._failure

    def tell_why(self, error: BaseException) -> None:
        """Tells all why this server ends early, unless the job's failure is the reason."""
        if error is not self._failure:
            interrupted = isinstance(error, KeyboardInterrupt)
            reason = "it was stopped by Ctrl-C"
            if not interrupted:
                reason = f"p3kv failed in the server: {in_one_line(error)}"
            failure = Failure(reason, "server", self._rank, self.known_round(), "P3Error")
            self._control.send(ReportFailure(failure))

    def close(self) -> None:
        """Ends the trace and the other threads, and closes all sockets."""
        if self._metrics is not None:
            self._metrics.close()
        if self._tracer is not None:
            self._tracer.close()
        self._control.send(Bye())
        self._control.close()
        if self._consumer is not None:
            self._consumer.checkpoints.close()
        self._loop.close()
        self._listener.close()
        self._import_thread.shutdown()  # an import that is cut short says so

    # What the session with the scheduler asks, in its thread.

    def hear(self, message: Any) -> Optional[ToScheduler]:
        if isinstance(message, TimeTold):
            return self._clock.take(message)
        if isinstance(message, Roster):
            self._loop.call_soon(self._join, message)
        elif isinstance(message, WorkersMayLeave):
            self._loop.call_soon(self._let_workers_leave)
        else:
            self._loop.call_soon(self._loop.stop)
        return None

    def fail_soon(self, error: P3Error) -> None:
        self._loop.call_soon(self._fail, error)

    def known_round(self) -> int:
        return self._workers.known_round()

    # Joining, and who is connected.

    def _join(self, roster: Roster) -> None:
        self._rank = self._workers.server = roster.rank
        name_rank(self._rank)
        try:
            self._metrics = Metrics(self._settings, "server", self._rank, self.numbers)
        except ConfigError as error:
            self._workers.fail(str(error), UNKNOWN, "ConfigError")
        hosts = [host for host, *_ in roster.servers]
        mark = partial(self._credentials.mark, roster.token)
        place = Place(roster.rank, hosts[roster.rank], hosts, roster.workers, mark)
        host, *_ = self._listener.address
        self._tracer = Tracer(self._settings.trace, f"server {roster.rank}", str(host))
        self._clock.watch(self._tracer, self._loop, self._control)
        proofs = Proofs(self._credentials.data_key(roster.token), roster.rank)
        admission = Admission(
            roster.rank, self._loop, self._listener,
            self._settings.send_buffer_bytes or CREDIT_BYTES,
            Handshakes(proofs, len(roster.workers)), self._workers,
            partial(self._begin, place, self._tracer),
        )  # fmt: skip
        # The framework of the optimizer is imported while the workers build their models. It takes
        # seconds, and the first step would wait for it. Meanwhile this thread handles connections.
        # Workers are welcome only after that: they measure the network then.
        needs_none = self._needs_no_framework(len(roster.workers))
        self._import_thread.submit(self._import, needs_none, admission)

    def _import(self, needs_none: bool, admission: Admission) -> None:
        try:
            if not needs_none:
                self._optimizers.get_ready()
        finally:
            self._loop.call_soon(admission.begin_to_serve)

    def _needs_no_framework(self, workers: int) -> bool:
        """Whether workers train by themselves, as far as this server knows: then the outer
        optimizer is p3kv's own."""
        with suppress(ConfigError):  # which the job's workers tell
            return make_consistency(self._settings.consistency, workers).local is not None
        return False

    def _begin(self, place: Place, tracer: Tracer, job: JobSettings) -> Optional[Dispatcher]:
        """Makes what serves a job with these settings; None if it can't be, and the job ends."""
        try:
            self._consumer = Consumer(place, job, self._workers, self._lateness, self._loop, tracer)
        except ConfigError as error:
            self._workers.fail(str(error), UNKNOWN, "ConfigError")
            return None
        dispatcher = Dispatcher(
            place.rank, self._settings, job.stall_timeout_s, self._workers, self._consumer,
            self._optimizers,
        )  # fmt: skip
        self._look_for_stalls(dispatcher)
        return dispatcher

    def _let_workers_leave(self) -> None:
        if self._consumer is not None:
            self._consumer.let_workers_leave()

    def _look_for_stalls(self, dispatcher: Dispatcher) -> None:
        dispatcher.look_for_stalls()
        self._loop.call_later(LOOK_EVERY_S, self._look_for_stalls, dispatcher)

    def _consume(self) -> bool:
        return self._consumer is not None and self._consumer.consume()

    def numbers(self) -> ServerNumbers:
        """Measurements of this server; from any thread."""
        connections = list(self._workers.connections.values())
        lateness, inversions = self._lateness, self._loop.inversions
        queued = 0 if self._consumer is None else len(self._consumer.queue)
        return ServerNumbers(
            uptime_s=time.monotonic() - self._began_s,
            wire_bytes_sent=sum(connection.sent_bytes for connection in connections),
            wire_bytes_received=sum(connection.received_bytes for connection in connections),
            inversions=inversions.frames,
            inversion_bytes=inversions.bytes,
            queued_frames=queued + sum(len(connection.writer) for connection in connections),
            rounds=lateness.rounds,
            last_rounds=tuple(lateness.last_rounds),
            last_s=tuple(lateness.last_s),
        )

    def _fail(self, error: P3Error) -> None:
        if self._failure is None:
            self._failure = error
        self._loop.stop()
