"""A worker's part in the job, in terms of keys, bytes and rounds; it knows no framework.

Its thread owns the connections to the servers; `exchange` says what it does with each gradient.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Set, Union

from p3kv.checkpoints import Place
from p3kv.common.combinations import Feature, has_effect
from p3kv.common.finite import ADVICE, NotFinite
from p3kv.common.log import name_rank
from p3kv.common.tracing import FORWARD_BEGIN, FORWARD_END, READY, Span, Tracer, now_ns
from p3kv.config import Launch, Settings, apply_verbosity
from p3kv.consistency import consistency_of_key
from p3kv.errors import (
    CheckpointError,
    ClosedError,
    ConfigError,
    NotFiniteError,
    NotSupportedError,
    P3Error,
    in_one_line,
)
from p3kv.wire.address import own_address
from p3kv.wire.breaks import Breaks
from p3kv.wire.control import ControlClient, Node
from p3kv.wire.credentials import Credentials
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import (
    MAX_PLACE_CHARS,
    UNKNOWN,
    AskWhereabouts,
    BarrierPassed,
    BarrierReached,
    Bye,
    Failure,
    JobSettings,
    NewSliceSizes,
    ReportFailure,
    Roster,
    SliceSizes,
    TimeTold,
    ToScheduler,
    WorkerNumbers,
)
from p3kv.wire.tracing import SchedulersClock
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.job import JobMember
from p3kv.worker.joining import Handshakes, Joining, Reconnecting
from p3kv.worker.measures import Measures
from p3kv.worker.neighbours import Neighbours, neighbourhood
from p3kv.worker.script import Script, SwitchInterval
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Push, Transfer

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0


class Worker(JobMember, Node):
    """This process's part in the job.

    Creating it registers the process with the scheduler; `start` joins the job. Transfers
    may be begun from any thread; the other methods belong to the thread that uses the store.
    All raise the job's failure once there is one.
    """

    hears = (NewSliceSizes, TimeTold, AskWhereabouts)

    def __init__(self, launch: Launch, settings: Settings, libraries: Collection[str]) -> None:
        """`settings` hold until `start`. `libraries`: packages whose lines are not the script's."""
        self.rank = UNKNOWN
        self.num_workers = launch.num_workers
        self.on_this_host: Sequence[int] = ()
        """Ranks of the workers of this host, this one too; none before `start`."""
        self.pids: Sequence[int] = ()
        """Their process ids, where they can share memory."""
        self.settings = settings
        self.tracer = Tracer(None, "worker")
        self.address = own_address(launch)
        """Of this host, by which it reaches the scheduler's."""
        self._data_plane: Optional[DataPlane] = None
        self._reconnecting: Optional[Reconnecting] = None
        self._neighbours: Optional[Neighbours] = None
        self._num_stores = 0
        self.script = Script(libraries)
        self.started = False
        """Whether this process has a store that has joined the job."""
        self.slice_elems = 0
        """Elements of the first slices, the same for all workers; once it has joined."""
        self._switch_interval = SwitchInterval()
        self._credentials = Credentials(launch.common_secret)
        self._clock = SchedulersClock()
        super().__init__()  # after all that may fail: nobody would close its sockets
        self._measures = Measures(self, self.num_workers)
        self._thread = threading.Thread(target=self._run, name="p3kv-worker", daemon=True)
        self.control = ControlClient(
            launch, settings, self._credentials, (self.address, 0), "", self, neighbourhood()
        )
        self.control.start()
        os.register_at_fork(after_in_child=self._close_in_child)

    # Joining and leaving.

    def start(self, settings: Settings) -> None:
        """Joins the job: waits for all workers' stores, then connects to the servers.

        Raises RendezvousError when some process does not come, ConfigError when workers have
        different settings, or one that this worker can't follow.
        """
        self.settings = settings
        apply_verbosity(settings)
        self.control.wait_until_welcome(settings.rendezvous_timeout_s)
        roster = self.control.wait_for(Roster, "all processes to start")
        self.rank = roster.rank
        self.on_this_host = roster.neighbours or (self.rank,)
        self.pids = roster.pids
        name_rank(self.rank)
        self.tracer = Tracer(settings.trace, f"worker {self.rank}", self.address)
        key = self._credentials.data_key(roster.token)
        job = JobSettings.of(settings)
        handshakes = Handshakes(key, self.rank, job)
        transport_key = self._credentials.transport_key()
        joining = Joining(self, settings, roster, handshakes, transport_key)
        local_servers = self._local_servers(roster)
        self._features = self._job_features(roster, job)
        sums = has_effect(Feature.LOCAL_AGGREGATION, self._features)
        neighbours = self._neighbours = Neighbours(
            self.rank, roster.neighbours if sums else (), key, self
        )
        breaks = Breaks("server", settings.silence_timeout_s, self.loop, self.control)
        reconnecting = self._reconnecting = Reconnecting(self.loop, handshakes, joining, breaks)
        hosts, mark = [host for host, *_ in roster.servers], self._credentials.mark
        place = Place(self.rank, self.address, hosts, roster.workers, partial(mark, roster.token))
        try:
            data_plane = self._data_plane = DataPlane(
                place, settings, local_servers, self.tracer, self.script, self, joining,
                reconnecting, neighbours.connections,
            )  # fmt: skip
            data_plane.checkpoints.find(data_plane.consistency)
            for server, link in joining.links(self.script.place()):
                joining.greet(server, data_plane.connect(server, link))
            neighbours.connect(data_plane.host_sums, data_plane.exchange)
        except (CheckpointError, ConfigError, NotSupportedError) as error:
            self._tell_why(error)
            raise
        self._switch_interval.lower(settings.switch_interval_s)
        self._thread.start()
        self.started = True
        joining.wait_for_welcome()
        try:
            self._data_plane.checkpoints.check_folder()
        except ConfigError as error:
            self._tell_why(error)
            raise
        slice_size = self.slice_elems = joining.slice_size()
        with_rule = self._features | self._data_plane.consistency.features
        sums = has_effect(Feature.LOCAL_AGGREGATION, with_rule)
        summing = 1 + len(neighbours.connections) if sums else 1
        self._measures.begin(
            self._data_plane, settings, local_servers, summing, joining.rate_bytes_s
        )
        self.loop.call_soon(self._data_plane.tuning.announce, INITIAL_ROUND, SliceSizes(slice_size))
        self.loop.call_soon(self._data_plane.look_for_silences)
        self.loop.call_soon(self._clock.watch, self.tracer, self.loop, self.control)
        self.loop.call_soon(self._data_plane.checkpoints.announce)

    def _tell_why(self, error: P3Error) -> None:
        """Tell all processes why this one can't join, and raise the error as they see it; nothing
        if it is the job's failure, which all know."""
        if error.role is None:
            failure = Failure(str(error), "worker", self.rank, error=type(error).__name__)
            self.control.send(ReportFailure(failure))
            raise failure.to_error() from error

    def abort(self, reason: str, follows: bool = False) -> None:
        """End the job for a reason, which all processes hear; transfers under way, and those that
        begin until `close`, end with an error. `follows`: the reason is perhaps only that another
        process has ended."""
        if self.failure is None and not self.has_left:
            failure = Failure(reason, "worker", self.rank, self.known_round(), "P3Error")
            self.control.send(ReportFailure(failure, second_hand=follows))
            # Sent first, so that no process sees these connections end before it knows the reason.
            self.control.close()
            self.loop.call_soon(self._fail, failure.to_error())

    def script_ends(self) -> None:
        """The script has ended in order, and what it has trained is as it was: there may be a last
        checkpoint, and a step that is open is not made. From its thread; may be called twice."""
        if not self.started or not self.usable:
            return
        self.loop.call_soon(self._joined.global_norms.drop_unmade)
        if self.settings.checkpoint_dir is None:
            return
        joined = self._joined
        with suppress(P3Error):  # which is told when the process ends
            due = joined.cuts.due_at_end()
            if due is not None and (self.rank == 0 or joined.cuts.of_all_workers):
                cut = joined.cuts.cut(joined.steps.newest, due)
                self.loop.call_soon(joined.checkpoints.add_last, cut)

    def close(self) -> Optional[P3Error]:
        """Leaves the job, in order unless it has failed; all transfers must be done. Returns the
        failure that has left something of this worker's undone. May be called twice."""
        if self.has_left:
            return None
        if self.started and self.usable:
            self.script_ends()
            with suppress(P3Error):
                self.ask(self._joined.finish).result()
                if self.settings.checkpoint_dir is not None:
                    self.ask(self._joined.checkpoints.finish).result()
            self._measures.end(self.rank)
        failure = self.failure
        self.has_left = True
        if self.started and self.failure is None:
            assert self._neighbours is not None
            self.byes_left = len(self._joined.servers) + len(self._neighbours.connections)
            self.loop.call_soon(self._say_goodbye)
            self.wait_for_goodbyes(_CLOSE_S)
        self._shut_down()
        return failure

    @property
    def not_let_in(self) -> bool:
        """Whether the job has refused this process, or was not found."""
        return self.control.not_let_in

    def _job_features(self, roster: Roster, job: JobSettings) -> Set[Feature]:
        """The job's features; workers of a host sum nothing if that saves no link anything."""
        all_here = all(host == self.address for host, *_ in roster.servers)
        alone = all_here or len(roster.neighbours) < 2
        return job.features - ({Feature.LOCAL_AGGREGATION} if alone else set())

    def _local_servers(self, roster: Roster) -> List[int]:
        """Ranks of the servers on this host; none if all are here, since no link matters then."""
        here = [rank for rank, (host, *_) in enumerate(roster.servers) if host == self.address]
        return here if len(here) < len(roster.servers) else []

    # What scripts ask for.

    def new_store(self, consistency: Optional[str] = None, stays: bool = False) -> WorkerStore:
        """One more store, which has keys and an optimizer of its own. `stays`: checkpoints have it
        until the job ends, though nobody has it any more.

        All workers create their stores in the same order. `consistency` chooses the rule of its
        keys if it is not the job's; ConfigError for one that there is not.
        """
        if consistency == self.settings.consistency:
            consistency = None  # as on a worker that says nothing
        rule = consistency_of_key(consistency, self._joined.consistency)
        self.loop.call_soon(self._joined.tuning.widen, rule.window)
        number, self._num_stores = self._num_stores, self._num_stores + 1
        if number > 0:
            self._joined.steps.new_store()
        if rule.own_rounds:
            self._joined.steps.make_own(number)
        return WorkerStore(
            number, consistency, rule, stays, self.rank, self.rank == min(self.on_this_host),
            self._features, self.settings, self._joined, self,
        )  # fmt: skip

    def forget_store(self, number: int, done: Callable[[], object]) -> None:
        """Forget a store, here and on servers when all workers have said so; `done()` is called in
        the worker's thread when its values are there. From any thread, also while objects are
        collected."""
        if self._data_plane is not None and self.usable:
            self.loop.call_soon(self._data_plane.forget, number, done)

    def barrier(self, purpose: str = "", why: str = "") -> None:
        """Waits until every worker has reached this barrier. The job fails if workers are there for
        different purposes. A purpose goes on "worker 0 waits": "to load states". `why` is this
        worker's own, and is told with the script's place."""
        self.check()
        place = "; ".join(filter(None, (why, self.script.place())))[:MAX_PLACE_CHARS]
        self.control.request(BarrierReached(purpose, place), BarrierPassed)

    def sums(
        self, numbers: Sequence[Union[int, float]], purpose: str = "to sum a number"
    ) -> Sequence[Union[int, float]]:
        """The sums of all workers' numbers, the same bits on all: a barrier to which each brings as
        many. Workers that have left add nothing. An int has 64 bits with its sign."""
        self.check()
        reached = BarrierReached(purpose, self.script.place(), tuple(numbers))
        totals: Sequence[Union[int, float]] = self.control.request(reached, BarrierPassed).totals
        return totals

    def begin(self, transfer: Transfer) -> None:
        """Has the worker's thread begin a transfer; from any thread.

        A transfer that the script's thread begins was ready when it was pushed. Then more such
        transfers follow at once, and until they have, the script needs the GIL first.
        """
        call = self.loop.call_soon_batched if self.script.is_current else self.loop.call_soon
        call(self._begin, transfer)
        if self.tracer.enabled and isinstance(transfer, Push) and transfer.round > INITIAL_ROUND:
            self.tracer.span(transfer.span(READY))

    def forward_begins(self) -> None:
        """Says that the script begins a forward pass of training; from its thread."""
        if self._data_plane is not None:
            joined = self._data_plane
            begins = joined.times.script.forward_begins(joined.steps.latest, time.monotonic())
            if begins and self.tracer.enabled:
                self._trace(FORWARD_BEGIN)

    def forward_ends(self) -> None:
        """Says that a forward pass has computed the loss."""
        self._trace(FORWARD_END)

    def _trace(self, kind: str) -> None:
        """Records what the script does now."""
        at_ns = now_ns()
        self.tracer.span(Span(kind, UNKNOWN, at_ns, at_ns, at_ns))

    def waits(self) -> None:
        """The script begins to wait for arrays, so nothing more of its pushes follows. From any
        thread, of which only the script's counts."""
        if self.script.is_current:
            self.script.begin_wait()
            self.loop.end_batch()

    def waits_for_all(self) -> None:
        """The same, for all arrays: also for values without which it could go on."""
        if self.script.is_current and self._data_plane is not None:
            for key in list(self._data_plane.keys.values()):
                key.value_is_due()
        self.waits()

    def waited(self, since_s: float) -> None:
        """The script has waited for arrays since then, on the monotonic clock; as `waits`."""
        if not self.script.is_current:
            return
        self.script.end_wait()
        if self._data_plane is not None:
            joined = self._data_plane
            joined.times.script.blocked(joined.steps.latest, since_s, time.monotonic())

    def stats(self) -> Dict[str, Any]:
        """Measurements of this worker so far (`WorkerNumbers`), and what it has been told."""
        return self._measures.stats()

    # What the session with the scheduler asks, in its thread.

    def hear(self, message: Any) -> Optional[ToScheduler]:
        if isinstance(message, TimeTold):
            return self._clock.take(message)
        if isinstance(message, NewSliceSizes):
            self.loop.call_soon(self._joined.tuning.want, message.sizes)
        elif self.started:
            self.loop.call_soon(self._joined.tell_whereabouts, message.asks)
        else:
            return self.script.whereabouts(message.asks)
        return None

    def fail_soon(self, error: P3Error) -> None:
        self.loop.call_soon(self._fail, error)

    def known_round(self) -> int:
        return UNKNOWN if self._data_plane is None else self._data_plane.known_round

    def numbers(self) -> Optional[WorkerNumbers]:
        return self._measures.told()

    # The worker's thread.

    def _run(self) -> None:
        ended = False
        while not ended:
            try:
                self.loop.run(self._joined.work)
                ended = True
            except Exception as error:  # noqa: BLE001  what begins later has to end, too
                self._fail(self._give_up(error))

    def _give_up(self, error: Exception) -> P3Error:
        """Tells all processes why. The job's failure then ends the transfers under way here."""
        if isinstance(error, ConfigError):
            failure = Failure(str(error), "worker", self.rank, error="ConfigError")
        elif isinstance(error, NotFinite):
            failure = Failure(
                str(error), "worker", self.rank, error.round, NotFiniteError.__name__, ADVICE
            )
        else:
            _log.error("the worker's thread failed", exc_info=error)
            reason = f"p3kv failed in the worker: {in_one_line(error)}"
            failure = Failure(reason, "worker", self.rank)
        self.control.suspect(failure)
        return failure.to_error()

    def _begin(self, transfer: Transfer) -> None:
        if self.failure is not None:
            transfer.fail(self.failure)
        else:
            assert self._data_plane is not None
            self._data_plane.exchange.begin(transfer)

    def _fail(self, error: P3Error) -> None:
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()
        if self._data_plane is not None:
            if self._reconnecting is not None:
                self._reconnecting.close()
            if self._neighbours is not None:
                self._neighbours.close()
            self._data_plane.fail(error)

    def _say_goodbye(self) -> None:
        assert self._neighbours is not None
        self._joined.say_goodbye()
        self._neighbours.say_goodbye(self._joined.host_sums.goodbye())

    @property
    def _joined(self) -> DataPlane:
        """This worker's data plane, since it has joined the job."""
        assert self._data_plane is not None
        return self._data_plane

    def _shut_down(self) -> None:
        self.control.send(Bye())
        self.control.close()
        self.loop.call_soon(self.loop.stop)
        if self.started:
            self._thread.join(timeout=_CLOSE_S)
        if self._data_plane is not None:
            self._data_plane.checkpoints.close()
        self.loop.close()
        if self._neighbours is not None:
            self._neighbours.close()
        if self._data_plane is not None:
            self._data_plane.host_sums.close()
        self._measures.close()
        self._switch_interval.restore()
        self.tracer.close()

    def _close_in_child(self) -> None:
        """In a forked child: closes its copies of the connections; the parent's end ends them."""
        if self._data_plane is not None:
            self._data_plane.checkpoints.let_go()
        self.has_left = True
        self.failure = ClosedError(
            f"this process was forked from {_name(self.rank)}, which goes on training with "
            "p3kv; a child can't"
        )
        self._measures.close_in_child()
        if self._data_plane is not None:
            for connection in self._data_plane.servers.values():
                connection.close()
        if self._neighbours is not None:
            self._neighbours.close_in_child()


def _name(rank: int) -> str:
    return "a worker" if rank == UNKNOWN else f"worker {rank}"
