"""A job's workers and servers in one thread, with bytes that go when the test says so.

All that a worker and a server do with frames is the real thing, from the handshake on. Only
sockets, the scheduler and MXNet are missing. So any order of events can be had, and had again.
"""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple, Type, Union

import numpy as np

from p3kv.checkpoints import Place
from p3kv.common.registry import Choice
from p3kv.common.tracing import Tracer
from p3kv.config import Launch, Settings
from p3kv.consistency import (
    ASYNCHRONOUS,
    CONSISTENCIES,
    BulkSynchronous,
    Consistency,
    consistency_of_key,
)
from p3kv.errors import P3Error, ProtocolError
from p3kv.server.admission import Admission
from p3kv.server.admission import Handshakes as ServersHandshakes
from p3kv.server.consumer import Consumer
from p3kv.server.dispatcher import Dispatcher
from p3kv.server.engine import Record, ServerSlice
from p3kv.server.optimizer import JobOptimizers, Optimizer
from p3kv.server.stragglers import Lateness
from p3kv.server.workers import Workers
from p3kv.slicing import balanced_runs, loads_with, make_layout
from p3kv.transport import Link
from p3kv.wire.breaks import Breaks
from p3kv.wire.connection import Connection, Handler, Landing
from p3kv.wire.credentials import Proofs
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, LAST, Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import (
    CodecChoices,
    DataWelcome,
    DeclaredKey,
    Failure,
    JobSettings,
    SliceSizes,
)
from p3kv.wire.protocol import FROM_NEIGHBOURS, Conversation
from p3kv.worker.data_plane import DataPlane
from p3kv.worker.job import JobMember
from p3kv.worker.joining import Handshakes, Reconnecting
from p3kv.worker.routes import HostSums
from p3kv.worker.script import Script
from p3kv.worker.transfers import DeferredPush, Pull, Push, Transfer, WorkerKey
from tests.adding import Adding
from tests.memory_transport import MemoryLink, MemoryListener

Event = Tuple[Any, ...]
"""A method and its arguments."""

KEY = bytes(range(32))
"""That of proofs on the job's connections."""
OWN_STORE = 1
"""The number of a store whose rounds are each worker's own."""


class _Loop(Loop):
    """Has a test say when what threads have asked for happens."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Deque[Event] = deque()

    def call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        self.calls.append((function, *arguments))

    def make_calls(self) -> None:
        """Does what threads have asked for."""
        while self.calls:
            function, *arguments = self.calls.popleft()
            function(*arguments)


class _Scheduler:
    """Hears what processes tell the scheduler; raises it where a peer has broken the protocol."""

    def __init__(self) -> None:
        self.suspected: List[Failure] = []

    def send(self, message: Any) -> None:
        pass

    def suspect(self, failure: Failure, second_hand: bool = False) -> None:
        assert not second_hand
        self.suspected.append(failure)


class _StrictScheduler(_Scheduler):
    def suspect(self, failure: Failure, second_hand: bool = False) -> None:
        raise P3Error(failure.reason)


class _Member(JobMember):
    """A worker's tie to its job, without a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.loop.close()
        self.loop = _Loop()
        self.control = _StrictScheduler()  # type: ignore[assignment]

    def server_says_goodbye(self) -> None:
        pass


class _Joining:
    """Takes the frames with which a connection to a server begins."""

    link: Callable[[int], Link]

    def __init__(self, handshakes: Handshakes) -> None:
        self.arrivals = {Kind.CHALLENGE: handshakes.answer, Kind.WELCOME: _welcome}
        self.landings = {Kind.CHALLENGE: handshakes.land_challenge, Kind.PROBE: _no_probe}

    def welcomed(self, server: int) -> None:
        pass


class _Neighbours(Handler):
    def __init__(self, sums: HostSums) -> None:
        self.arrivals, self.landings = sums.arrivals, sums.landings

    def lost(self, connection: Connection, reason: str) -> None:
        _lost(connection, reason)


class Worker:
    """A worker's data plane, and a script's calls."""

    def __init__(
        self,
        rank: int,
        num_workers: int,
        num_servers: int,
        settings: Settings,
        slice_size: int,
        job_loop: Loop,
    ) -> None:
        self.handshakes = Handshakes(KEY, rank, JobSettings.of(settings))
        self.neighbours: Dict[int, Connection] = {}
        member = _Member()
        self.loop = member.loop
        self.joining = _Joining(self.handshakes)
        breaks = Breaks("server", 60.0, job_loop, member.control)
        self.reconnecting = Reconnecting(
            job_loop,
            self.handshakes,
            self.joining,
            breaks,  # type: ignore[arg-type]
        )
        self.data_plane = DataPlane(
            _place(rank, num_workers, num_servers), settings, [], Tracer(None, "worker"),
            Script(()), member, self.joining,  # type: ignore[arg-type]
            self.reconnecting, self.neighbours,
        )  # fmt: skip
        self.servers = self.data_plane.servers
        self.tuning = self.data_plane.tuning
        self.exchange = self.data_plane.exchange
        self.sizes = self.tuning._sizes
        self.settings: List[Tuple[int, int]] = []
        """Optimizer settings that were sent: from which step on, and the oldest that needs any."""
        self.steps = self.data_plane.steps
        self.steps._send = lambda *sent: self.settings.append(sent[:2])  # type: ignore[assignment]
        self.calls: Deque[Transfer] = deque()
        """What the script has called, and is not ready yet."""
        self.failures: List[BaseException] = []
        self.complete: List[Tuple[Any, int]] = []
        """Keys and rounds in the order in which they were."""
        self.under_way = 0
        self.left = False
        self._slice_size = slice_size
        self._step = 0

    def connect(self, server: int, link: Link) -> None:
        """Says hello to a server, and how large slices are."""
        self.handshakes.begin(self.data_plane.connect(server, link), server)

    def meet(self, rank: int, link: Link) -> Connection:
        """Makes a link the connection to another worker of the host."""
        conversation = Conversation(FROM_NEIGHBOURS, "worker")
        conversation.peer = rank
        handler = _Neighbours(self.data_plane.host_sums)
        connection = self.neighbours[rank] = Connection(link, conversation, handler, 1 << 20)
        connection.begin()
        return connection

    def start(self) -> None:
        """Says how large slices are."""
        self.tuning.announce(INITIAL_ROUND, SliceSizes(self._slice_size))

    def call(
        self,
        key: WorkerKey,
        round: int,
        source: Optional[np.ndarray],
        target: Optional[np.ndarray],
        exact: bool = False,
        changes: Optional[Future[bool]] = None,
    ) -> None:
        """Calls push, pull or pushpull; `exact`: the value is to travel as it is; `changes`: of a
        push without a gradient, as in `Transfer`."""
        arrays = (source, target)

        def done(error: Optional[BaseException]) -> None:
            assert arrays  # which are kept until now
            self.under_way -= 1
            if error is not None:
                self.failures.append(error)
            self.complete.append((key.key, round))

        step = self._step
        if key.own_rounds:
            pushes = source is not None and round > INITIAL_ROUND
            step = self.steps.new_step(key.store) if pushes else 0
            if pushes:
                self.steps.of_store(key.store).count_push(step)
        elif source is not None:
            step = self._step = max(self._step, round)
            if round > INITIAL_ROUND:
                self.steps.of_store(0).count_push(step)
        source_at, target_at = (None if one is None else one.ctypes.data for one in arrays)
        self.under_way += 1
        if source is None and changes is None:
            transfer: Transfer = Pull(key, round, step, key.next_pull(), target_at, done)
        else:
            push = Push(key, round, step, source_at if changes is None else None, target_at, done)
            push.after_pulls, push.changes = key.pulls, changes
            push.takes = key.consistency.goes_on_with(round) if target is not None else None
            transfer = push
        transfer.exact = exact
        self.calls.append(transfer)

    def add(self, key: WorkerKey, source: np.ndarray) -> None:
        """Calls push, of a gradient that is not exchanged."""

        def done(error: Optional[BaseException]) -> None:
            assert error is None and source is not None  # which is kept until now

        self.calls.append(DeferredPush(key, source.ctypes.data, done))

    @property
    def may_leave(self) -> bool:
        """Whether all that the script has called is done."""
        waits = self.calls or self.under_way or self.data_plane.is_needed
        return not waits and not self.left

    def leave(self) -> None:
        """Says goodbye."""
        self.left = True
        self.data_plane.say_goodbye()
        words = self.data_plane.host_sums.goodbye()
        header = Header(Kind.BYE, self.data_plane.rank)
        for connection in self.neighbours.values():
            connection.writer.push(Frame(LAST, header, memoryview(words)))

    def begin(self, position: int = 0) -> None:
        """Has one of the calls begin whose arrays are ready now."""
        transfer = self.calls[position]
        del self.calls[position]
        self.exchange.begin(transfer)


class _Admission(Admission):
    """Remembers the connections that it has accepted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.connections: List[Connection] = []

    def _connection(self, link: Link) -> Connection:
        self.connections.append(super()._connection(link))
        return self.connections[-1]


class _Workers(Workers):
    """Raises it where a worker has broken the protocol, or the server has failed."""

    def fail(self, reason: str, round: int, error: str = "P3Error") -> None:
        self.on_failure(reason, round, error)

    on_failure: Callable[..., None]

    def lose(self, connection: Connection, reason: str) -> None:
        if not connection.ended:
            _lost(connection, reason)
        super().lose(connection, reason)


class Server:
    """A server without sockets, for workers in this process."""

    consumer: Consumer
    """From the first worker on."""

    def __init__(self, rank: int, launch: Launch, settings: Settings, optimizer: Optimizer) -> None:
        scheduler = _Scheduler()
        self.failures = scheduler.suspected
        self.listener = MemoryListener()
        self.loop = _Loop()
        self.workers = _Workers(
            self.loop,
            scheduler,
            settings.silence_timeout_s,  # type: ignore[arg-type]
        )
        self.workers.on_failure = _unused
        self._place = _place(rank, launch.num_workers, launch.num_servers)
        self._settings = settings
        self._optimizer = optimizer
        handshakes = ServersHandshakes(Proofs(KEY, rank), launch.num_workers)
        self.admission = _Admission(
            rank, self.loop, self.listener, 1 << 20, handshakes, self.workers, self._begin
        )
        self.admission.begin_to_serve()

    @property
    def connections(self) -> List[Connection]:
        """All that have been accepted."""
        return self.admission.connections

    def close(self) -> None:
        self.loop.close()
        self.listener.close()
        self.consumer.checkpoints.close()

    def _begin(self, job: JobSettings) -> Dispatcher:
        self.consumer = Consumer(
            self._place, job, self.workers, Lateness(len(self._place.workers_hosts)), self.loop,
            Tracer(None, "server"),
        )  # fmt: skip
        self.set_optimizer(0, self._optimizer)
        return Dispatcher(
            self._place.rank, self._settings, job.stall_timeout_s, self.workers, self.consumer,
            JobOptimizers(),
        )  # fmt: skip

    def most_open(self) -> int:
        """The most rounds that are open of one slice."""
        return max(
            (sum(one.owner < 0 for one in record.rounds.open.values()) for record in self.records),
            default=0,
        )

    def most_own(self) -> int:
        """The most rounds of one worker that wait for one slice."""
        counts = [
            Counter(one.owner for one in record.rounds.open.values() if not one.ended)
            for record in self.records
            if record.plan.own_rounds
        ]
        return max((max(count.values(), default=0) for count in counts), default=0)

    @property
    def records(self) -> Iterator[Record[Any]]:
        """Everything that ends rounds by itself."""
        return self.consumer.engine.records()

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """As when worker rank 0's settings come."""
        self.consumer.set_optimizer(store, optimizer)


def _name_of(rule: Type[Consistency]) -> str:
    return next(name for name in CONSISTENCIES.names() if CONSISTENCIES.find(name) is rule)


class MemoryJob:
    """Workers, servers and the connections between them."""

    def __init__(
        self,
        workers: int,
        servers: int,
        slice_size: int,
        rule: Union[str, Type[Consistency]] = BulkSynchronous,
        codec: str = "identity",
        optimizer: Type[Optimizer] = Adding,
        lets_leave: bool = False,
        per_host: int = 1,
        dtype: str = "float32",
        codecs: Optional[CodecChoices] = None,
        checkpoints: Optional[str] = None,
        resumes: bool = False,
        **more: Any,
    ) -> None:
        """`codec` is that of both directions, where `codecs` does not say otherwise; `lets_leave`:
        workers leave when they are done; `per_host`: so many workers of a host sum their gradients
        first; `dtype` is that of keys. `checkpoints`: the folder where they are, if there are any;
        `resumes`: the job goes on from the newest one. `more` are settings."""
        self.dtype = dtype
        launch = Launch("server", "127.0.0.1", 9000, workers, servers, "in memory")
        consistency = rule if isinstance(rule, str) else _name_of(rule)
        settings = Settings(
            consistency=consistency, let_workers_leave=lets_leave, checkpoint_dir=checkpoints,
            resume=resumes, **more,
        )  # fmt: skip
        self._features = JobSettings.of(settings).features
        self._loop = Loop()
        self._slice_size = slice_size
        self._codecs = codecs or CodecChoices(Choice(codec), Choice(codec))
        self._loads = [0] * servers
        self._num_keys = 0
        self._has_checkpoints, self._resumes = checkpoints is not None, resumes
        self._whole = optimizer.whole_tensors
        self.servers = [Server(rank, launch, settings, optimizer()) for rank in range(servers)]
        self.workers = [
            Worker(rank, workers, servers, settings, slice_size, self._loop)
            for rank in range(workers)
        ]
        self._connections: Dict[Link, Connection] = {}
        for worker in self.workers:
            worker.data_plane.checkpoints.find(worker.data_plane.consistency)
            worker.joining.link = self._new_link
            for rank, server in enumerate(self.servers):
                worker.connect(rank, server.listener.connect())
                server.admission._accept()
                near, far = worker.servers[rank], server.connections[-1]
                self._connections.update({near._link: near, far._link: far})
        for rank, worker in enumerate(self.workers):
            for other in range(rank - rank % per_host, rank):
                near, far = MemoryLink(), MemoryLink()
                near.other, far.other = far, near
                self._connections[near] = worker.meet(other, near)
                self._connections[far] = self.workers[other].meet(rank, far)
        self.finish()
        for worker in self.workers:
            worker.data_plane.checkpoints.check_folder()
            worker.data_plane.checkpoints.announce()
            worker.start()
            worker.steps.new_store()
            worker.steps.make_own(OWN_STORE)
        self.finish()

    def close(self) -> None:
        self._loop.close()
        for connection in self._connections.values():
            connection.close()
        for server in self.servers:
            server.close()
        for worker in self.workers:
            worker.data_plane.host_sums.close()
            worker.data_plane.checkpoints.close()
            worker.loop.close()

    def declare(
        self,
        name: str,
        *shape: int,
        layout: str = "dense",
        own: bool = False,
        consistency: Optional[str] = None,
    ) -> List[WorkerKey]:
        """A key, as each worker knows it; of a store whose rounds are each worker's own, if `own`,
        to whose optimizer the test gives effect. `consistency`: its rule, if not the job's."""
        key_id, self._num_keys = self._num_keys, self._num_keys + 1
        made = make_layout(layout, shape)
        full = made.size_elems if self._whole else made.full_slice_elems(self._slice_size)
        runs = balanced_runs(made.size_elems, full, self._loads, grain_elems=made.grain_elems)
        self._loads = loads_with(self._loads, runs)
        declared = DeclaredKey(
            key_id, name, shape, self.dtype, runs, layout=layout, codecs=self._codecs,
            store=OWN_STORE if own else 0, consistency=ASYNCHRONOUS if own else consistency,
        )  # fmt: skip
        keys = [
            WorkerKey(
                declared,
                consistency_of_key(declared.consistency, one.data_plane.consistency),
                job=self._features,
            )
            for one in self.workers
        ]
        for worker, key in zip(self.workers, keys):
            if self._has_checkpoints:
                worker.data_plane.checkpoints.remember(key, self._resumes)
            worker.data_plane.declare(key)
        self.finish()
        return keys

    def break_link(self, connection: Connection) -> None:
        """Ends a connection's link at one end or both; what is on its way is lost."""
        for link in (connection._link, connection._link.other):
            end = self._connections.pop(link, None)
            if end is not None:
                end._end("its connection was reset")

    def half_break_link(self, connection: Connection) -> None:
        """The same, and the other end does not hear of it."""
        del self._connections[connection._link]
        connection._end("its connection was reset")

    def mend_link(self, worker: Worker, server: int) -> None:
        """Begins a new link for a connection that has none."""
        worker.reconnecting._made(worker.servers[server], self._new_link(server), 0.0)

    def _new_link(self, server: int) -> Link:
        """A link to a server, whose other end it has accepted."""
        near = self.servers[server].listener.connect()
        self.servers[server].admission._accept()
        assert isinstance(near, MemoryLink)
        self._connections[near.other] = self.servers[server].connections[-1]
        return near

    def follow_links(self) -> None:
        """To be called after each event: finds out which connection has which link now."""
        for attempt in [a for one in self.workers for a in one.reconnecting._attempts]:
            self._connections[attempt._link] = attempt
        connections = [c for one in self.workers for c in one.servers.values()]
        for server in self.servers:
            connections += server.workers.connections.values()
        for connection in connections:
            if not connection.ended and not connection.closed:
                self._connections[connection._link] = connection
        for link, connection in list(self._connections.items()):
            if connection._link is not link:
                del self._connections[link]

    def events(self, ahead: int = 1) -> Iterator[Event]:
        """All that can happen next; of each script's calls, one of the first `ahead` begins."""
        for worker in self.workers:
            for position in range(min(ahead, len(worker.calls))):
                yield worker.begin, position
        for link, connection in self._connections.items():
            assert isinstance(link, MemoryLink)
            if connection.writer and link.has_room:
                yield (connection.send,)
            if link.incoming:
                yield (connection.receive,)
        for worker in self.workers:
            plane = worker.data_plane
            if len(plane.host_sums._queue) or (plane._finished and not plane.is_needed):
                yield (plane.work,)
            if worker.loop.calls:
                yield (worker.loop.make_calls,)
        for server in self.servers:
            if len(server.consumer.queue) and not server.consumer._stopped:
                yield (server.consumer.consume,)
            if server.loop.calls:
                yield (server.loop.make_calls,)

    def carry_all(self, connection: Connection) -> None:
        """Brings everything that one side of a connection has to say to the other."""
        assert isinstance(connection._link, MemoryLink)
        while connection.writer:
            connection.send()
            self._connections[connection._link.other].receive()

    def kept(self, key: WorkerKey) -> np.ndarray:
        """A key's value on the servers."""
        found = np.full(key.size_elems, np.nan, np.float32)
        for server in self.servers:
            of_server = server.consumer.engine.keys.get(key.key_id)
            if of_server is None:
                continue
            size = of_server._sizes.of(of_server.generation).slice_size
            for slice_ in of_server._records[of_server.generation].values():
                assert isinstance(slice_, ServerSlice)
                piece = key.slices(size)[slice_.index]
                value = slice_.known_value().array
                found[piece.offset : piece.offset + piece.length] = value
        return found

    def finish(self) -> None:
        """Has everything happen that can."""
        while event := next(self.events(), None):
            function, *arguments = event
            function(*arguments)
        assert not any(worker.failures for worker in self.workers)


def _welcome(connection: Connection, header: Header, welcome: DataWelcome) -> None:
    connection.begin()


def _no_probe(connection: Connection, header: Header) -> Landing:
    raise ProtocolError("nobody measures the network here")


def _place(rank: int, num_workers: int, num_servers: int) -> Place:
    return Place(rank, "here", ["here"] * num_servers, ["here"] * num_workers, _mark)


def _mark(who: str) -> bytes:
    return who.encode()


def _unused(*_: object) -> Any:
    raise AssertionError("nobody fails")


def _lost(_: object, reason: str) -> None:
    raise P3Error(reason)
