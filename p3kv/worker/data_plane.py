"""The data plane: frames between a worker and the servers, and what handles each kind."""

from __future__ import annotations

import logging
import time
from concurrent.futures import Future
from typing import (
    Any,
    Callable,
    Collection,
    Dict,
    Iterable,
    List,
    Mapping,
    Optional,
    Sequence,
    Set,
    Tuple,
)

from p3kv.checkpoints import Place
from p3kv.codecs import GRADIENTS, VALUES, codec_of
from p3kv.common.tracing import KeyName, Tracer
from p3kv.config import Settings
from p3kv.consistency import make_consistency
from p3kv.errors import P3Error
from p3kv.slicing import CREDIT_BYTES
from p3kv.transport import Link
from p3kv.wire import messages
from p3kv.wire.connection import Connection, Handler
from p3kv.wire.fields import Header, SliceSizesHeader, StepHeader, StoreHeader
from p3kv.wire.header import Kind
from p3kv.wire.messages import ForwardOrder, SliceSizes, Stalled, encode
from p3kv.wire.protocol import FROM_SERVERS, Conversation
from p3kv.wire.slice_sizes import SliceSizesByRound
from p3kv.worker.egress import Egress
from p3kv.worker.exchange import Exchange
from p3kv.worker.global_norms import GlobalNorms
from p3kv.worker.job import JobMember
from p3kv.worker.joining import Joining, Reconnecting
from p3kv.worker.routes import HostSums, RowsRoute, SliceRoute
from p3kv.worker.saving.checkpoints import Checkpoints
from p3kv.worker.saving.cuts import Cuts
from p3kv.worker.script import Script
from p3kv.worker.stalls import LOOK_EVERY_S, Silences, StallWarnings
from p3kv.worker.state_requests import StateRequests
from p3kv.worker.step_times import ProcessorDelay, StepTimes
from p3kv.worker.steps import WorkerSteps
from p3kv.worker.transfers import Channel, WorkerKey
from p3kv.worker.tuning import Tuning

_log = logging.getLogger(__name__)


class DataPlane(Handler):
    """Takes servers' frames and sends this worker's; in its thread, except what says otherwise."""

    def __init__(
        self,
        place: Place,
        settings: Settings,
        local_servers: Collection[int],
        tracer: Tracer,
        script: Script,
        job: JobMember,
        joining: Joining,
        reconnecting: Reconnecting,
        neighbours: Mapping[int, Connection],
    ) -> None:
        """`local_servers`: ranks of the servers on this host. `neighbours`: the workers of this
        host with which this one sums, once connected. ConfigError for an unknown rule or codec."""
        codec_of(settings, GRADIENTS)
        codec_of(settings, VALUES)
        self.rank = rank = place.rank
        self.servers: Dict[int, Connection] = {}
        self._settings = settings
        self._job = job
        self._reconnecting = reconnecting
        self.keys: Dict[int, WorkerKey] = {}
        self._tracer = tracer
        self._script = script
        loop = job.loop
        self._orders: Dict[int, List[int]] = {}
        self._forgotten: Set[int] = set()
        """Numbers of stores that are forgotten completely."""
        self._leaving: Dict[int, Callable[[], object]] = {}
        """Stores to forget, as soon as nothing of them is under way, and what to call then."""
        self._finished: Optional[Future[Any]] = None
        sizes = SliceSizesByRound()
        self.consistency = make_consistency(settings.consistency, len(place.workers_hosts))
        self.times = StepTimes(ProcessorDelay(), loop)
        self._egress = Egress(rank, self.servers, local_servers, loop)
        self.tuning = Tuning(
            rank, self.servers, sizes, settings, self.consistency.window, loop.drain, self.times,
            self._egress, job.control,
        )  # fmt: skip
        self.checkpoints = Checkpoints(place, settings, self.keys, self._egress, job)
        self.steps = WorkerSteps(rank, self.servers, self.checkpoints, self.tuning)
        self.exchange = Exchange(
            self.keys, self._egress, self.steps, self.times, tracer, settings.priorities
        )
        self.slices = SliceRoute(rank, self.servers, self._egress, self.exchange, sizes, tracer)
        self.rows = RowsRoute(rank, self.servers, self._egress, self.exchange, sizes, tracer)
        self.host_sums = HostSums(
            rank, neighbours, settings, sizes, self.tuning, self.rows, self.exchange,
        )  # fmt: skip
        self.states = StateRequests(rank, self.servers)
        self._link_s = loop.drain.link_s
        self._first_s = min(settings.warn_after_s, settings.stall_timeout_s / 2)
        self._stalls = StallWarnings(rank, self.keys, self.exchange, self._first_s)
        self._silences = Silences(settings, self.servers, self.exchange)
        self.global_norms = GlobalNorms(rank, self._egress, self.servers)
        self.cuts = Cuts(settings.checkpoint_every)
        """Belongs to the thread that uses the stores."""
        self.arrivals = {
            **joining.arrivals,
            Kind.UPDATED: self.slices.take,
            Kind.PULLED: self.slices.take,
            Kind.ENDED: self.exchange.take_ended,
            Kind.ROWS: self.rows.take,
            Kind.SLICE_SIZES: self._take_slice_sizes,
            Kind.OPEN: self._open,
            Kind.ORDER: self._set_order,
            Kind.STALLED: self._note_stall,
            Kind.STATE: self.states.take,
            Kind.STATE_BYTES: self.states.take_bytes,
            Kind.LOADED: self.states.take_loaded,
            Kind.SQUARES: self.global_norms.take_squares,
            Kind.NORM: self.global_norms.take_norm,
            Kind.VOTE: self.global_norms.take_votes,
            Kind.CHECKPOINT: self.checkpoints.take_asked,
            Kind.WRITTEN: self.checkpoints.take_written,
            Kind.RESUMED: self.checkpoints.take_resumed,
            Kind.BYE: self._take_bye,
        }
        self.landings = {
            **joining.landings,
            Kind.UPDATED: self.slices.land,
            Kind.PULLED: self.slices.land,
            Kind.ROWS: self.rows.land,
            Kind.STATE_BYTES: self.states.land_bytes,
            Kind.CHECKPOINT: self.checkpoints.land_asked,
        }

    def look_for_silences(self) -> None:
        """Warn of silent servers, stragglers and a waiting script, and forget idle stores, from now
        on."""
        now_s = time.monotonic()
        self._silences.look(now_s)
        self._stalls.look(now_s)
        if self._script.has_waited_for(self._first_s, now_s):
            self.tell_whereabouts()
        self._forget_idle()
        self._job.loop.call_later(LOOK_EVERY_S, self.look_for_silences)

    def tell_whereabouts(self, asked: Sequence[Tuple[int, int]] = ()) -> None:
        """Tell the scheduler where the script is, and for which of these rounds of keys it has not
        pushed."""
        self._job.control.send(self._script.whereabouts(asked, self.keys, self.exchange))

    def connect(self, server: int, link: Link) -> Connection:
        """Makes a link the connection to a server."""
        conversation = Conversation(FROM_SERVERS, "server")
        conversation.peer = server
        credit_bytes = self._settings.send_buffer_bytes or CREDIT_BYTES
        connection = Connection(link, conversation, self, credit_bytes)
        self.servers[server] = connection
        return connection

    def declare(self, key: WorkerKey) -> None:
        """Declare a key to its servers; every worker does, since its slices may come first."""
        key.channel = Channel(key, self.consistency.window)
        self.keys[key.key_id] = key
        key.direct = self.rows if key.touched_only else self.slices
        key.route = self.host_sums if self.host_sums.takes(key) else key.direct
        if key.memory is not None:
            self.checkpoints.own.declare(key)
        if self._settings.leave_zero_rows_out:
            key.leave_zero_rows_out(self._link_s)
        self.tuning.note_kept(key.kept_bytes())
        self._tracer.name_key(KeyName(key.key_id, key.key, key.declared.name, key.size_bytes))
        header = Header(Kind.KEY, self.rank)
        self.tell(header, encode(key.declared), [server for server, _ in key.runs])

    def forget(self, store: int, done: Callable[[], object] = lambda: None) -> None:
        """Forget a store's keys, here and in the job, when their rounds have ended; then call
        `done`."""
        if store in self._forgotten:
            done()
            return
        self._leaving[store] = done
        self.global_norms.drop_unmade(store)
        self._forget_idle()

    def _forget_idle(self) -> None:
        for store in sorted(self._leaving):
            keys = [key for key in self.keys.values() if key.store == store]
            # Checkpoints may have these keys.
            busy = bool(self.checkpoints.cuts) or self.cuts.holds(store)
            if busy or not all(self.exchange.is_idle(key) for key in keys):
                continue
            done = self._leaving.pop(store)
            self._forgotten.add(store)
            for key in keys:
                del self.keys[key.key_id]
                self.exchange.forget(key.key_id)
                self.tuning.note_forgotten(key.kept_bytes())
                self.checkpoints.own.forget(key.key_id)
                self._stalls.forget(key.key_id)
            self._orders.pop(store, None)
            for its_keys in (store, messages.MAX_STORE - store):  # and those beside
                self.tell(StoreHeader(Kind.FORGET, self.rank, store=its_keys))
                self._job.control.send(messages.StoreForgotten(its_keys))
            done()

    @property
    def counts(self) -> Mapping[str, int]:
        """Slices and bytes that this worker has sent and received; from any thread."""
        return self.exchange.counts

    def tell(
        self, header: Header, words: bytes = b"", servers: Optional[Iterable[int]] = None
    ) -> None:
        """Sends a frame that carries no slice to `servers`, by default to all."""
        self._egress.tell(header, words, servers)

    def work(self) -> bool:
        """Sum some gradients of this host; return whether there are more. Call it between two looks
        at the sockets. NotFinite as `HostSums.work`."""
        more = self.host_sums.work()
        if self._finished is not None and not self.is_needed:
            done, self._finished = self._finished, None
            self.host_sums.leave()
            done.set_result(None)
        return more

    @property
    def is_needed(self) -> bool:
        """Whether a transfer waits for its turn, a push or its value is on its way in the place of
        one that is done, servers wait to know how to scale a step, or neighbours for what this
        worker carries."""
        return self.exchange.travels or self.global_norms.waits or self.host_sums.needed

    def finish(self, done: Future[Any]) -> None:
        """Complete `done` when this worker is not needed any more."""
        self._finished = done

    def fail(self, error: P3Error) -> None:
        """End all that is under way with the job's failure."""
        # First: no array may be read or written once its operation is completed.
        for connection in self.servers.values():
            self._job.loop.remove_connection(connection)
        self.host_sums.clear()
        self.exchange.fail(error)
        self.states.fail(error)
        self.global_norms.fail(error)
        self.checkpoints.fail(error)
        if self._finished is not None:
            self._finished.set_exception(error)
            self._finished = None

    def say_goodbye(self) -> None:
        """Tells all servers that nothing more comes, after all that is queued for them."""
        self.checkpoints.leave()
        self._egress.say_goodbye()

    @property
    def known_round(self) -> int:
        """The newest round for which a transfer was sent, or UNKNOWN; from any thread."""
        return self.exchange.known_round

    def forward_order(self, store: int) -> List[messages.Key]:
        """A store's keys in the order in which the forward pass needs them; from any thread."""
        known = [self.keys.get(key_id) for key_id in self.exchange.order]
        return [key.key for key in known if key is not None and key.store == store]

    def publish_order(self, key_ids: List[int], store: int) -> None:
        """Announce a store's forward order, with those of all others: it replaces the last
        announcement. In a step only one store's keys meet."""
        self._orders[store] = key_ids
        order = ForwardOrder([key_id for ids in self._orders.values() for key_id in ids])
        self.tell(Header(Kind.ORDER, self.rank), encode(order))

    def lost(self, connection: Connection, reason: str) -> None:
        if connection.ended and not connection.conversation.over:
            self._reconnecting.begin(connection, reason, self.known_round)
            return
        self._job.loop.remove_connection(connection)
        if not connection.ended and connection.peer is not None:
            reason = f"it broke the protocol: {reason}"
            failure = messages.Failure(reason, "server", connection.peer, self.known_round)
            self._job.control.suspect(failure)

    def _take_slice_sizes(
        self, connection: Connection, header: SliceSizesHeader, sizes: SliceSizes
    ) -> None:
        self.tuning.adopt(header.from_round, sizes)

    def _open(self, connection: Connection, header: StepHeader, _: None) -> None:
        self._egress.open(header.rank, header.step)

    def _set_order(self, connection: Connection, header: Header, order: ForwardOrder) -> None:
        self.exchange.set_order(order.key_ids)
        _log.info("the forward order is known: %d keys", len(order.key_ids))

    def _note_stall(self, connection: Connection, header: Header, stalled: Stalled) -> None:
        self._stalls.note(stalled, time.monotonic())

    def _take_bye(self, connection: Connection, header: Header, _: None) -> None:
        self._job.server_says_goodbye()
