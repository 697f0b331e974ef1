"""The consumer takes the most urgent of the frames that have been received, and handles it.

It adds a slice to its round's sum. When the round is complete, it updates the slice and queues the
value to every worker that wants it (P3 section 4.2).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Callable, List

from p3kv.checkpoints import Place
from p3kv.common.finite import ADVICE, NotFinite
from p3kv.common.tracing import Tracer
from p3kv.consistency import make_consistency
from p3kv.errors import ProtocolError, in_one_line
from p3kv.server.engine import Engine, Unit
from p3kv.server.engine.held_rounds import HeldRounds
from p3kv.server.engine.plan import Rules
from p3kv.server.lateness import Lateness
from p3kv.server.optimizer import Optimizer
from p3kv.server.received_frames import ReceivedFrame, ReceivedFrames
from p3kv.server.round_ends import RoundEnds
from p3kv.server.rows_consumer import RowsConsumer
from p3kv.server.saving.checkpoints import Checkpoints
from p3kv.server.slices_consumer import SlicesConsumer
from p3kv.server.state_service import StateService
from p3kv.server.values import Values
from p3kv.server.waiting import Waiting
from p3kv.server.workers import Workers
from p3kv.wire.fields import StepHeader
from p3kv.wire.header import HEADER_BYTES, Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import JobSettings, Squares, encode

_log = logging.getLogger(__name__)

_BATCH_BYTES = 16 * 1024
"""Bytes of frames handled before the loop looks at sockets again: one slice, or many tiny tensors
that arrived together, whose values leave together."""


class Consumer:
    """Sums, updates and sends back, the most urgent first.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        place: Place,
        job: JobSettings,
        workers: Workers,
        lateness: Lateness,
        loop: Loop,
        tracer: Tracer,
        fail: Callable[..., None],
    ) -> None:
        """`fail(reason, round, error)` ends the job; `error` names a class in p3kv.errors.

        Raises ConfigError if the job's consistency is not known here, and if checkpoints can't be
        written.
        """
        self.held_rounds: HeldRounds[Unit] = HeldRounds(
            partial(_send_squares, place.rank, workers), job.deterministic
        )
        num_workers = len(place.workers_hosts)
        rules = Rules(
            place.rank, make_consistency(job.consistency, num_workers), self.held_rounds,
            job.deterministic, job.check_finite, job.leave_zero_rows_out, loop.drain.link_s,
        )  # fmt: skip
        self.engine = Engine(rules)
        self.frames = ReceivedFrames(num_workers, workers)
        self.waiting = Waiting(self.engine, self.frames, workers, job.let_workers_leave)
        self.states = StateService(self.engine, workers, fail)
        self.checkpoints = Checkpoints(
            place, job.checkpoint_dir, self.engine.keys, rules.leavers.gone, workers, loop
        )
        values = Values(place.rank, workers, loop, tracer)
        self._ends = RoundEnds(
            self.engine, workers, values, self.states, self.checkpoints, self.waiting,
            tracer,
        )  # fmt: skip
        self.slices = SlicesConsumer(
            self.engine, self.frames, self._ends, values, self.waiting, lateness, tracer
        )
        self.rows = RowsConsumer(
            self.engine, workers, self.frames, self._ends, self.waiting, tracer
        )
        self._workers = workers
        self._num_workers = num_workers
        self._workers_may_leave = job.let_workers_leave
        self._fail = fail
        self._stopped = False

    def consume(self) -> bool:
        """Handles the most urgent frame, and more if frames are tiny or too many bytes wait.

        Returns whether frames are left. The loop calls it between two looks at the connections.
        """
        frames, queue = self.frames, self.frames.queue
        handled_bytes = 0
        while queue.heap and not self._stopped:
            frame = frames.pop()
            rank = frame.header.rank
            handled_bytes += HEADER_BYTES + frame.header.payload_bytes
            self._do(frame)
            frames.handled(frame)
            if frames.departed(rank):
                self.worker_left(rank)
            if handled_bytes >= _BATCH_BYTES and not frames.too_many:
                break
        return bool(queue.heap) and not self._stopped

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Has a store's optimizer make values from now on; ends the rounds that have waited for
        it."""
        for unit in self.engine.set_optimizer(store, optimizer):
            self._ends.settle(unit)

    def forget(self, store: int) -> None:
        """Forgets a store's keys, of which all rounds have ended for all workers."""
        for unit in [one for one in self.waiting.pulls if one.plan.declared.store == store]:
            del self.waiting.pulls[unit]
        self.engine.forget(store)

    def scaled(self, step: int, scale: float) -> None:
        """Has the rounds of a step end, by urgency: worker rank 0 has said how its gradients are
        scaled."""
        for unit in self.held_rounds.scaled(step, scale):
            priority = unit.ledger.open[unit.round + 1].priority
            self._queue_end(0, unit, step, priority)

    def worker_left(self, rank: int) -> None:
        """To be called when a worker may have left: it has, when all its frames are handled.

        Rounds then go on without it, if the job lets workers leave. Else, and where they can't, the
        job ends if a round waits for a worker that has left.
        """
        if self._workers_may_leave and self.frames.departed(rank):
            for unit, following in self.engine.leave(rank):
                self._queue_end(rank, unit, following.step, following.priority)
        if self.frames.departed(rank):
            self.engine.rules.leavers.gone.add(rank)
            for unit in self.checkpoints.worker_left():
                self._ends.settle(unit)
        self.waiting.check_all()

    def let_workers_leave(self) -> None:
        """Has rounds go on without workers that leave, whatever the settings say."""
        self._workers_may_leave = self.waiting.workers_may_leave = True
        for rank in range(self._num_workers):
            if self.frames.departed(rank):
                self.worker_left(rank)

    def stop(self) -> None:
        """Handles no frame any more: the job is about to fail, and values would be wrong."""
        self._stopped = True

    def _queue_end(self, rank: int, unit: Unit, step: int, priority: int) -> None:
        act = partial(self._ends.settle, unit)
        self.frames.push_end(rank, unit, step, priority, act)

    def _do(self, frame: ReceivedFrame) -> None:
        try:
            frame.act()
        except ProtocolError as error:
            self._workers.lose(frame.connection, str(error))
        except NotFinite as error:
            self._not_finite(error)
        except Exception as error:
            if frame.unit is None:
                raise
            self._optimizer_failed(frame.unit.name, frame.header.round, error)

    def _not_finite(self, error: NotFinite) -> None:
        self.stop()
        if error.rank is None:
            self._fail(str(error), error.round, "NotFiniteError")
        else:
            self._workers.suspect(error.rank, str(error), ADVICE, error="NotFiniteError")

    def _optimizer_failed(self, name: str, round_: int, error: Exception) -> None:
        _log.exception("the optimizer failed")
        self.stop()
        self._fail(f"the optimizer failed on {name}: {in_one_line(error)}", round_)


def _send_squares(rank: int, workers: Workers, step: int, squares: List[float]) -> None:
    words = memoryview(encode(Squares(squares)))
    workers.tell_rank_0(StepHeader(Kind.SQUARES, rank, step=step), words)
