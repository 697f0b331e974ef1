"""A job's workers and servers in one thread, with bytes that go when the test says so.

Exchange, gates, tuning, consumer and framing are the real ones; only sockets, the scheduler and
MXNet are missing. So any order of events can be had, and had again.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Tuple, Type

import numpy as np

from p3kv.config import Launch, Settings
from p3kv.consistency import BulkSynchronous, Consistency
from p3kv.errors import P3Error
from p3kv.server.buffers import Buffer
from p3kv.server.consumer import Consumer
from p3kv.server.optimizer import Optimizer, State
from p3kv.server.workers import Workers
from p3kv.slicing import SliceSizes, balanced_runs
from p3kv.trace import Tracer
from p3kv.wire.framing import FrameReader, FrameWriter
from p3kv.wire.header import INITIAL_ROUND, URGENT, Header, Kind, pack_header
from p3kv.wire.loop import Drain, Loop
from p3kv.wire.messages import Failure, KeyLayout
from p3kv.worker.exchange import Exchange
from p3kv.worker.gates import Gates
from p3kv.worker.steps import Steps
from p3kv.worker.transfers import Transfer, WorkerKey
from p3kv.worker.tuning import Tuning

Event = Tuple[Any, ...]
"""A method and its arguments."""


class Adding(Optimizer):
    """weight += total: exact for whole numbers, and without states."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        raise AssertionError("there is nothing to configure")

    def update(
        self, layout: KeyLayout, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        weight += total

    def export(self, layout: KeyLayout, index: int) -> None:
        return None

    def load(self, layout: KeyLayout, index: int, state: State) -> None:
        raise AssertionError("there are no states")


class End:
    """One end of a connection, as far as workers and servers use it."""

    def __init__(
        self,
        place: Callable[[End, Header], Optional[memoryview]],
        on_frame: Callable[[End, Header, Optional[memoryview]], None],
    ) -> None:
        self.writer = FrameWriter()
        self.closed = False
        self.other: End
        self._reader = FrameReader(lambda header: place(self, header))
        self._on_frame = on_frame

    def hold_at_most(self, size_bytes: int) -> None:
        """There is no kernel that holds anything."""

    def carry(self) -> None:
        """Brings the next bytes to the other end."""
        sent = self.writer.buffers()[0]
        into = next(part for part in self.other._reader.buffers() if len(part))
        count = min(len(sent), len(into))
        into[:count] = sent[:count]
        self.writer.sent(count)
        for header, payload in self.other._reader.received(count):
            self.other._on_frame(self.other, header, payload)


class Worker:
    """What `p3kv.worker.worker` does with frames, and a script's calls."""

    def __init__(self, rank: int, slice_size: int, consistency: Consistency) -> None:
        self.servers: Dict[int, Any] = {}
        self.sizes = SliceSizes()
        self.tuning = Tuning(
            rank, self.servers, self.sizes, Settings(), consistency.window, Drain(),
            lambda rate_bytes_s: None,
        )  # fmt: skip
        gates = Gates(rank, self.servers, [], lambda delay_s, function: None)
        self.settings: List[Tuple[int, int]] = []
        """Optimizer settings that were sent: from which step on, and the oldest that needs any."""
        self.steps = Steps(lambda from_step, oldest, _: self.settings.append((from_step, oldest)))
        self.exchange = Exchange(
            rank, self.servers, gates, self.sizes, self.steps, consistency,
            Tracer(None, "worker"), True, self._begin_step,
        )  # fmt: skip
        self.calls: Deque[Transfer] = deque()
        """What the script has called, and is not ready yet."""
        self.failures: List[BaseException] = []
        self.complete: List[Tuple[Any, int]] = []
        """Keys and rounds in the order in which they were."""
        self.under_way = 0
        self._slice_size = slice_size
        self._step = 0

    def start(self) -> None:
        self.tuning.announce(INITIAL_ROUND, self._slice_size)

    def call(
        self,
        key: WorkerKey,
        round: int,
        source: Optional[np.ndarray],
        target: Optional[np.ndarray],
    ) -> None:
        """Calls push, pull or pushpull."""

        def done(error: Optional[BaseException]) -> None:
            self.under_way -= 1
            if error is not None:
                self.failures.append(error)
            self.complete.append((key.key, round))

        if source is not None:
            self._step = max(self._step, round)
            if round > INITIAL_ROUND:
                self.steps.pushed(self._step)
        views = [None if array is None else array.data.cast("B") for array in (source, target)]
        self.under_way += 1
        self.calls.append(Transfer(key, round, 0, views[0], views[1], done, self._step))

    def begin(self, position: int = 0) -> None:
        """Has one of the calls begin whose arrays are ready now."""
        transfer = self.calls[position]
        del self.calls[position]
        self.exchange.begin(transfer)

    def _begin_step(self, step: int) -> None:
        self.steps.begin(step)
        self.tuning.begin_step(step)

    def place(self, end: End, header: Header) -> Optional[memoryview]:
        return None if header.kind == Kind.SLICES else self.exchange.place(header)

    def on_frame(self, end: End, header: Header, payload: Optional[memoryview]) -> None:
        if header.kind == Kind.SLICES:
            self.tuning.announced(header.round, header.slice)
        else:
            self.exchange.received(header)


class Server:
    """What `p3kv.server.server` does with frames."""

    def __init__(
        self,
        rank: int,
        launch: Launch,
        loop: Loop,
        listener: socket.socket,
        consistency: Consistency,
    ) -> None:
        self.failures: List[Failure] = []
        self.workers = Workers(launch.num_workers, loop, listener, _unused, self._failed)
        self.consumer = Consumer(launch, self.workers, _lost, _unused)
        self.consumer.rank = rank
        self.consumer.aggregator.optimizer = Adding()
        self.consumer.aggregator.consistency = consistency
        self._landing: Dict[End, Buffer] = {}

    def _failed(self, failure: Failure, second_hand: bool) -> None:
        assert not second_hand
        self.failures.append(failure)

    def place(self, end: End, header: Header) -> Optional[memoryview]:
        if header.kind != Kind.PUSH:
            return None
        self._landing[end] = self.consumer.buffer(header)
        return self._landing[end].bytes

    def on_frame(self, end: Any, header: Header, payload: Optional[memoryview]) -> None:
        if header.kind == Kind.PUSH:
            self.consumer.add(end, header, self._landing.pop(end))
        elif header.kind == Kind.PULL:
            self.consumer.add(end, header, None)
        elif header.kind == Kind.SLICES:
            is_new = self.consumer.set_slice_size(header.round, header.slice)
            if is_new and header.round > INITIAL_ROUND:
                news = pack_header(
                    Kind.SLICES, self.consumer.rank, slice=header.slice, round=header.round
                )
                for worker in self.workers.connections.values():
                    worker.writer.push(URGENT, news)
        elif header.kind == Kind.BYE:
            self.workers.end(header.rank)
            self.consumer.check_departed()

    def most_open(self) -> int:
        """The most rounds that are open of one slice."""
        return max((len(state.open_rounds) for state in self.consumer._states()), default=0)


class Job:
    """Workers, servers and the connections between them."""

    def __init__(
        self,
        workers: int,
        servers: int,
        slice_size: int,
        rule: Type[Consistency] = BulkSynchronous,
    ) -> None:
        launch = Launch.from_environment(
            {
                "DMLC_ROLE": "server",
                "DMLC_PS_ROOT_URI": "127.0.0.1",
                "DMLC_PS_ROOT_PORT": "9000",
                "DMLC_NUM_WORKER": str(workers),
                "DMLC_NUM_SERVER": str(servers),
            }
        )
        assert launch is not None
        self._loop, self._listener = Loop(), socket.socket()
        self._slice_size = slice_size
        self._loads = [0] * servers
        self.servers = [
            Server(rank, launch, self._loop, self._listener, rule(workers))
            for rank in range(servers)
        ]
        self.workers = [Worker(rank, slice_size, rule(workers)) for rank in range(workers)]
        self.ends: List[End] = []
        for rank, worker in enumerate(self.workers):
            for number, server in enumerate(self.servers):
                near = End(worker.place, worker.on_frame)
                far = End(server.place, server.on_frame)
                near.other, far.other = far, near
                worker.servers[number] = near
                server.workers.connections[rank] = far  # type: ignore[assignment]
                self.ends += [near, far]
            worker.start()
        self.finish()

    def close(self) -> None:
        self._loop.close()
        self._listener.close()

    def declare(self, name: str, size_elems: int) -> List[WorkerKey]:
        """A key, as each worker knows it."""
        key_id = len(self.servers[0].consumer._keys)
        runs = balanced_runs(size_elems, self._slice_size, self._loads)
        for server in self.servers:
            server.consumer.declare(KeyLayout(key_id, name, "float32", runs))
        return [WorkerKey(key_id, name, (size_elems,), "float32", runs) for _ in self.workers]

    def events(self, ahead: int = 1) -> Iterator[Event]:
        """All that can happen next; of each script's calls, one of the first `ahead` begins."""
        for worker in self.workers:
            for position in range(min(ahead, len(worker.calls))):
                yield worker.begin, position
        for end in self.ends:
            if end.writer:
                yield (end.carry,)
        for server in self.servers:
            if len(server.consumer._queue):
                yield (server.consumer.consume,)

    def kept(self, key: WorkerKey) -> np.ndarray:
        """A key's value on the servers."""
        found = np.full(key.size_elems, np.nan, np.float32)
        for server in self.servers:
            of_server = server.consumer._keys[key.key_id]
            size = self.workers[0].sizes.size(of_server._generation)
            for state in of_server._states[of_server._generation].values():
                piece = key.slices(size)[state.index]
                assert state.value is not None
                found[piece.offset : piece.offset + piece.length] = state.value.array
        return found

    def finish(self) -> None:
        """Has everything happen that can."""
        while event := next(self.events(), None):
            function, *arguments = event
            function(*arguments)
        assert not any(worker.failures for worker in self.workers)


def _unused(*_: object) -> Any:
    raise AssertionError("nobody connects, and nobody is lost")


def _lost(_: object, reason: str) -> None:
    raise P3Error(reason)
