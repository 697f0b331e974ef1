"""Dispatches frames from workers: each kind of frame, and what handles it on a server."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from typing import DefaultDict, Dict, Set, Tuple

from p3kv.common.terminal import outlive_parent
from p3kv.config import Settings
from p3kv.errors import ConfigError, ProtocolError, in_one_line
from p3kv.server.consumer import Consumer
from p3kv.server.optimizer import JobOptimizers
from p3kv.server.saving.checkpoints import PartsOfWorkers
from p3kv.server.stragglers import Stalls
from p3kv.server.workers import Workers
from p3kv.slicing import value_credit_bytes
from p3kv.wire.connection import Connection, Handler, Landing
from p3kv.wire.fields import (
    Header,
    NormHeader,
    OptimizerHeader,
    ScaleHeader,
    SliceSizesHeader,
    StepHeader,
    StoreHeader,
)
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, LAST, MAX_PROBE_BYTES, URGENT, Kind
from p3kv.wire.messages import (
    UNKNOWN,
    Checkpoint,
    CutReached,
    DeclaredKey,
    Message,
    Norm,
    Scale,
    SliceSizes,
    Stalled,
    StepPushed,
    Vote,
    encode,
)

_log = logging.getLogger(__name__)


class Dispatcher(Handler):
    """Takes what welcomed workers send, and tells them what all must know; in the server's
    thread."""

    def __init__(
        self,
        rank: int,
        settings: Settings,
        stall_timeout_s: float,
        workers: Workers,
        consumer: Consumer,
        optimizers: JobOptimizers,
    ) -> None:
        self._rank = rank
        self._settings = settings
        self._workers = workers
        self._consumer = consumer
        self._engine = consumer.engine
        self._optimizers = optimizers
        self._stalls = Stalls(settings.warn_after_s, stall_timeout_s)
        self._parts_of_workers = PartsOfWorkers(workers)
        rows = consumer.rows
        self._scratch = memoryview(bytearray(MAX_PROBE_BYTES))
        self._news: Dict[Tuple[int, int], Tuple[Header, memoryview]] = {}
        """By kind and round, what worker rank 0 has said last for all workers."""
        self._open_step = UNKNOWN
        self._forgotten: DefaultDict[int, Set[int]] = defaultdict(set)
        """By store: ranks of the workers that need its keys no more."""
        self.arrivals = {
            Kind.PUSH: consumer.take_push,
            Kind.PULL: consumer.take_pull,
            Kind.PUSH_ROWS: rows.take_push,
            Kind.PULL_ROWS: rows.take_pull,
            Kind.KEY: self._declare,
            Kind.SLICE_SIZES: self._set_slice_sizes,
            Kind.OPEN: self._needs_no_values_before,
            Kind.PROBE: self._echo,
            Kind.OPTIMIZER: self._configure_optimizer,
            Kind.ORDER: self._pass_on,
            Kind.CLIPPED: self._begin_clipped,
            Kind.STEP_PUSHED: self._end_pushes,
            Kind.SCALE: self._take_scale,
            Kind.VOTE: self._take_vote,
            Kind.NORM: self._pass_norm_on,
            Kind.STATES: consumer.states.ask,
            Kind.STATE: consumer.states.take,
            Kind.STATE_BYTES: consumer.states.take_bytes,
            Kind.CHECKPOINT: self._begin_checkpoint,
            Kind.CUT: self._reach_cut,
            Kind.WRITTEN: self._parts_of_workers.take_written,
            Kind.RESUMED: self._pass_on,
            Kind.FORGET: self._forget,
            Kind.BYE: self._let_go,
        }
        self.landings = {
            Kind.PUSH: consumer.land_push,
            Kind.PUSH_ROWS: rows.land_push,
            Kind.PULL_ROWS: rows.land_pull,
            Kind.PROBE: self._land_probe,
            Kind.STATE_BYTES: consumer.states.land_bytes,
        }

    def look_for_stalls(self) -> None:
        """Reports a round that has waited long."""
        now_s = time.monotonic()
        waits = self._engine.longest_waits(self._stalls.first_s, now_s)
        done = self._workers.done  # for whom nobody need push: they wait for nothing
        waits = (one for one in waits if not one.arrived or not done.issuperset(one.arrived))
        found = self._stalls.look(waits, now_s)
        if isinstance(found, Stalled):
            self._workers.tell(Header(Kind.STALLED, self._rank), memoryview(encode(found)))
        elif found is not None:
            self._workers.suspect(*found)

    # Coming and going.

    def lost(self, connection: Connection, reason: str) -> None:
        self._workers.lose(connection, reason)

    def welcomed(self, rank: int, connection: Connection) -> None:
        """Tells a worker that takes frames now what the others have been told."""
        for header, words in self._news.values():
            connection.writer.push(Frame(URGENT, header, words))
        self._parts_of_workers.welcomed(rank)

    def _let_go(self, connection: Connection, header: Header, _: None) -> None:
        rank = header.rank
        outlive_parent()  # which may be the worker; others may go on
        self._workers.end(rank)
        self._announce_open_step()
        self._consumer.worker_left(rank)
        self._parts_of_workers.left(rank)
        connection.writer.push(Frame(LAST, Header(Kind.BYE, self._rank)))

    # What a worker says of its keys, and what rank 0 says for all.

    def _declare(self, connection: Connection, header: Header, declared: DeclaredKey) -> None:
        try:
            self._engine.declare(declared)
        except ConfigError as error:
            self._workers.fail(str(error), UNKNOWN, "ConfigError")

    def _set_slice_sizes(
        self, connection: Connection, header: SliceSizesHeader, sizes: SliceSizes
    ) -> None:
        from_round = header.from_round
        if from_round > INITIAL_ROUND and header.rank != 0:
            raise ProtocolError(f"worker {header.rank} wants {sizes} from round {from_round} on")
        is_new = self._engine.set_slice_sizes(from_round, sizes)
        if self._settings.send_buffer_bytes is None:
            num_workers = self._engine.state.num_workers
            credit_bytes = value_credit_bytes(sizes.size_for_credit, num_workers)
            for worker in self._workers.connections.values():
                worker.hold_at_most(credit_bytes)
        if is_new and from_round > INITIAL_ROUND:
            news = SliceSizesHeader(Kind.SLICE_SIZES, self._rank, from_round=from_round)
            self._tell_all(news, memoryview(encode(sizes)), from_round)

    def _pass_on(self, connection: Connection, header: Header, news: Message) -> None:
        self._tell_all(Header(header.kind, self._rank), memoryview(encode(news)))

    def _tell_all(self, news: Header, words: memoryview, round: int = UNKNOWN) -> None:
        """Tells all workers, and those that are welcomed later, too."""
        self._news[news.kind, round] = news, words
        self._workers.tell(news, words)

    def _forget(self, connection: Connection, header: StoreHeader, _: None) -> None:
        store = header.store
        self._forgotten[store].add(header.rank)
        state = self._engine.state
        there = {*range(state.num_workers)} - state.gone
        if self._forgotten[store] >= there:
            self._engine.forget(store)
            self._optimizers.forget(store)

    def _configure_optimizer(
        self, connection: Connection, header: OptimizerHeader, settings: memoryview
    ) -> None:
        try:
            optimizer = self._optimizers.configure(
                header.store, header.from_step, settings, header.oldest_step
            )
            self._consumer.set_optimizer(header.store, optimizer)
        except ProtocolError:
            raise
        except Exception as error:  # noqa: BLE001  the framework's or the optimizer's own
            # Without its optimizer this server would send sums for weights.
            self._consumer.stop()
            if isinstance(error, ConfigError):
                self._workers.fail(str(error), UNKNOWN, "ConfigError")
            else:
                _log.exception("the optimizer can't be set up")
                self._workers.fail(f"the optimizer can't be set up: {in_one_line(error)}", UNKNOWN)

    # Steps whose gradients are clipped by the norm of all.

    def _begin_clipped(self, connection: Connection, header: StepHeader, _: None) -> None:
        self._engine.begin_clipped(header.step)

    def _end_pushes(self, connection: Connection, header: StepHeader, pushed: StepPushed) -> None:
        self._consumer.end_pushes(header.step, pushed.elems)

    def _take_scale(self, connection: Connection, header: ScaleHeader, scale: Scale) -> None:
        self._consumer.scaled(header.step, scale.scale, scale.is_dropped)
        if scale.pass_on:
            self._pass_norm_on(connection, header, Norm(scale.norm, scale.is_dropped))

    def _take_vote(self, connection: Connection, header: NormHeader, vote: Vote) -> None:
        engine = self._engine
        self._consumer.carry_out(engine.vote(header.store, header.number, header.rank, vote))

    def _pass_norm_on(self, connection: Connection, header: NormHeader, norm: Norm) -> None:
        news = NormHeader(Kind.NORM, self._rank, store=header.store, number=header.number)
        self._workers.tell(news, memoryview(encode(norm)))

    # Checkpoints.

    def _begin_checkpoint(
        self, connection: Connection, header: Header, checkpoint: Checkpoint
    ) -> None:
        if not checkpoint.stores:
            self._parts_of_workers.leave_out(checkpoint)
            return
        self._consumer.checkpoints.begin(checkpoint)
        if self._rank == 0:
            self._parts_of_workers.ask(checkpoint)

    def _reach_cut(self, connection: Connection, header: Header, reached: CutReached) -> None:
        self._consumer.checkpoints.reach(header.rank, reached)

    # The network.

    def _needs_no_values_before(self, connection: Connection, header: StepHeader, _: None) -> None:
        self._workers.needs_no_values_before(header.rank, header.step)
        self._announce_open_step()

    def _announce_open_step(self) -> None:
        """Tell all workers from which step on this gate is open: no older values use the link."""
        if self._workers.open_step > self._open_step:
            self._open_step = self._workers.open_step
            self._workers.tell(StepHeader(Kind.OPEN, self._rank, step=self._open_step))

    def _land_probe(self, connection: Connection, header: Header) -> Landing:
        echo = self._scratch[: header.payload_bytes]
        return echo, echo

    def _echo(self, connection: Connection, header: Header, echo: memoryview) -> None:
        connection.writer.push(Frame(URGENT, Header(Kind.PROBE, self._rank), echo))
