"""Keys as a worker knows them, their transfers, and what carries these."""

from __future__ import annotations

import ctypes
import time
from abc import ABC, abstractmethod
from concurrent.futures import Future
from functools import partial
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from p3kv.codecs import GRADIENTS, VALUES, Encoder, Identity, codec_features, make_codecs
from p3kv.codecs.zero_rows import LEAST_BYTES, ZeroRows
from p3kv.common.combinations import Feature, has_effect
from p3kv.common.tracing import UNKNOWN, Span, now_ns
from p3kv.consistency import Consistency
from p3kv.errors import ProtocolError
from p3kv.slicing import Slice, make_layout
from p3kv.wire.fields import RoundHeader, UpdatedHeader
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, DeclareKey, called, sum_dtype
from p3kv.wire.rows import NUMBER
from p3kv.worker.saving.key_memory import KeyMemory

Done = Callable[[Optional[BaseException]], None]
"""Called once, from the worker's thread, when a transfer is complete (None) or has failed."""


OnSlice = Callable[[int, int], None]
"""Called from the worker's thread, with a slice's first element and its number of elements."""


def features_of(declared: Union[DeclareKey, DeclaredKey], consistency: Consistency) -> Set[Feature]:
    """A key's features that may not go together with others; `consistency` is its rule."""
    codecs, dtype = declared.codecs, np.dtype(declared.dtype)
    features = consistency.features | codec_features(codecs.gradients, codecs.values, dtype)
    if make_layout(declared.layout, declared.shape).touched_only:
        features.add(Feature.ROWS)
    return features


class WorkerKey:
    """A declared key: its runs on the servers, its codecs, and what the script has called.

    `round`, `own_step`, `exact_round`, `is_exact`, `is_next_exchanged`, `value_is_due`, `pulls` and
    `next_pull` belong to the thread that pushes and pulls.
    """

    def __init__(
        self,
        declared: DeclaredKey,
        consistency: Consistency,
        name: Optional[str] = None,
        job: Collection[Feature] = (),
    ) -> None:
        """`consistency` is the rule that the key was declared with, `name` what this worker's
        script calls the parameter, `job` the job's features.

        Raises ConfigError if the key's layout or a codec is not known here.
        """
        self.declared = declared
        self.consistency = consistency
        self.own_rounds = consistency.own_rounds
        self.key_id = declared.key_id
        self.store = declared.store
        self.key = declared.key
        self.name = name
        self.called = called(declared.key, declared.name)
        """The key's name in messages to users, the same on all workers."""
        self.shape = declared.shape
        self.members = declared.members
        self.dtype = declared.dtype
        self._layout = make_layout(declared.layout, declared.shape)
        self.numpy_dtype = np.dtype(declared.dtype)
        self.item_bytes = self.numpy_dtype.itemsize
        self.size_elems = self._layout.size_elems
        self.touched_only = self._layout.touched_only
        """Whether rows travel that are touched, and not slices."""
        self.row_elems = self._layout.grain_elems
        self.size_bytes = self.size_elems * self.item_bytes
        names = declared.codecs
        self.codecs = make_codecs(names.gradients, names.values, self.size_elems, self.numpy_dtype)
        """They belong to the worker's thread, like the encoder of gradients and the decoder of
        values."""
        self.encoder: Encoder = self.codecs.gradients.encoder(GRADIENTS)
        self.memory: Optional[KeyMemory] = None
        """The encoder, where checkpoints have what it remembers."""
        self.zero_rows: Optional[ZeroRows] = None
        """The encoder, where gradients may travel without rows of zeros."""
        self.filled: Tuple[int, Optional[int]] = (INITIAL_ROUND, None)
        """The last round whose value has come as the answer to a push, and where it was put."""
        self.by_changes = False
        """Whether only rows of it came that the round had changed."""
        self.decoder = self.codecs.values.decoder(VALUES)
        self.sum_dtype = sum_dtype(self.numpy_dtype)
        features = {Feature.LOCAL_AGGREGATION, *features_of(declared, consistency), *job}
        self.sums_on_hosts = has_effect(Feature.LOCAL_AGGREGATION, features)
        """Whether workers of one host may sum their gradients before they send them."""
        self.direct: SummedRoute
        """The route by which this worker sends for itself; chosen once the key is known to the
        worker's thread, as is the next."""
        self.route: Route
        self.runs = declared.runs
        self.round = INITIAL_ROUND
        """The last round that this worker has pushed."""
        self.own_step = 0
        """Which of its store's steps that was."""
        self.exact_round = INITIAL_ROUND
        """The last round whose value travels as it is, since a checkpoint may follow."""
        self.channel: Channel
        """Its rounds in the worker's thread, once that knows the key."""
        self.goes_on = False
        """Whether this worker trains by itself, and goes on after a push until the value is due."""
        self.due: Tuple[int, float] = (INITIAL_ROUND, 0.0)
        """The last round whose value is due then, and since when, on the monotonic clock."""
        self.pulls = 0
        """How many pulls the script has called."""
        self._pushes = 0
        self._slices: Dict[int, Tuple[Slice, ...]] = {}
        self.generation = -1
        self.pieces: Tuple[Slice, ...] = ()
        """The generation of slice sizes that was asked for last, and the key's slices in it."""
        self.trains_locally = consistency.local is not None
        """Whether workers train by themselves, and do not wait for the values of one step before
        they push in the next."""
        self.is_gated = not (self.own_rounds or self.trains_locally)
        """Whether gates hold pushes back; they count steps that workers share, and nobody waits for
        gradients of an own step."""

    def keep_memory(self) -> None:
        """Save the encoder's residuals in checkpoints, before the first push, or ConfigError."""
        self.encoder = self.memory = KeyMemory(self.encoder, self.called)

    def leave_zero_rows_out(self, link_s: Callable[[], float]) -> None:
        """Leave rows of zeros out where that pays; before the first push. `link_s`: `ZeroRows`."""
        codec = self.codecs.gradients
        fits = not self.touched_only and self.size_bytes >= LEAST_BYTES
        if fits and isinstance(codec, Identity):
            self.encoder = self.zero_rows = ZeroRows(
                codec, self.shape, link_s, f"gradients of {self.called}"
            )

    @property
    def travels(self) -> str:
        """How gradients travel at present, and why, for people."""
        if self.touched_only:
            return "by rows: declared sparse"
        gradients = "whole" if self.zero_rows is None else self.zero_rows.why
        return f"{gradients}. Values: {'those of changed rows' if self.by_changes else 'whole'}"

    def kept_bytes(self) -> Dict[int, int]:
        """By server, the bytes of what it keeps as it travels: with rows, their numbers, too."""
        grain_bytes = self.row_elems * self.item_bytes + self.touched_only * NUMBER.itemsize
        return {server: length // self.row_elems * grain_bytes for server, length in self.runs}

    def is_next_exchanged(self) -> bool:
        """Count a push that is called; return whether it has a round, or is added to a later
        one."""
        self._pushes += 1
        return self.consistency.exchanges(self._pushes)

    def value_is_due(self) -> None:
        """The worker, which trains by itself, goes on with its last push's value, or waits for
        it."""
        self.due = self.round, time.monotonic()

    def is_exact(self, round: int) -> bool:
        """Whether the value that a push or a pull for a round asks for now travels as it is."""
        return round == self.exact_round > INITIAL_ROUND

    def next_pull(self) -> int:
        """Counts a pull that is called, and returns its number."""
        self.pulls += 1
        return self.pulls

    def slices(self, slice_size: int) -> Tuple[Slice, ...]:
        """The key's slices of this size, by index. Belongs to the worker's thread."""
        slices = self._slices.get(slice_size)
        if slices is None:
            slices = self._layout.slices(self.runs, slice_size)
            self._slices[slice_size] = slices
        return slices

    def rows_in_slice(self, slice_size: int) -> int:
        """How many rows a frame has at most, of a key of rows."""
        return self._layout.full_slice_elems(slice_size) // self.row_elems


class Route(ABC):
    """How gradients of a key get to the servers, and values back. Belongs to the worker's thread. A
    route is chosen for each key, once; what it carries says so (`Transfer.route`)."""

    @abstractmethod
    def push(self, transfer: Push) -> None:
        """Sends a gradient, or says that this worker has none."""

    @abstractmethod
    def request(self, transfer: Pull) -> None:
        """Asks for a value."""

    @abstractmethod
    def missing(self, transfer: Transfer) -> Set[int]:
        """The servers from which some of a transfer's value is still to come."""

    def landed(  # noqa: B027
        self, transfer: Transfer, piece: Slice, header: UpdatedHeader
    ) -> None:
        """A server has sent a slice of the result of a push, with this header."""

    def ended(self, transfer: Push) -> None:  # noqa: B027
        """A push's round has ended on all servers."""


class SummedRoute(Route):
    """A route of gradients that the workers of a host may sum first: piece by piece, a slice or all
    rows that a server keeps."""

    @abstractmethod
    def pieces(self, key: WorkerKey, round: int) -> Sequence[Slice]:
        """What is summed by itself in a round, by index."""

    @abstractmethod
    def gradient(self, transfer: Push, piece: Slice) -> Any:
        """A push's elements of a piece, or its `Rows`."""

    @abstractmethod
    def send_empty(self, transfer: Push, piece: Slice, flags: int, workers: int = 0) -> None:
        """Queues a frame that has no elements; `workers` as in `send_sum`."""

    @abstractmethod
    def send_sum(
        self,
        transfer: Push,
        piece: Slice,
        parts: Sequence[Any],
        memory: Optional[np.ndarray],
        flags: int,
        workers: int,
        is_needed: bool,
    ) -> None:
        """Sends the sum of gradients of so many workers, to which the transfer belongs. It is made
        in the order of the parts when it begins to leave, of slices in `memory`. `is_needed`: the
        transfer's own gradient is needed until then."""


class Transfer:
    """Slices, or rows, of one key on their way.

    `target`, where a value goes, is an array of the key's dtype and size, given by address. It must
    stay where and as it is until `done` is called, and so must what a push sends.
    """

    priority = 0
    urgent = 0
    """Its urgency in queues, once it is under way."""
    exact = False
    """Whether the value travels as it is, whatever the codec."""
    on_slice: Optional[OnSlice] = None
    """Called for each slice of the value that is in the target."""
    has_gradient = False
    """Whether this worker sends a gradient, or the initial value, by it."""
    norm = 0.0
    """Norm of the gradient, where the key's codec needs it."""
    own_step = 0
    """Of a push: which of its store's steps it was called in, for codecs; 0: as `step`."""
    pieces: Sequence[Slice] = ()
    """What is sent, and comes back, by itself, once it is under way."""
    route: Route
    """What carries it, once it is under way."""
    _arrived: Optional[Set[int]] = None
    _target_bytes: memoryview
    """The target, once something has landed."""

    def __init__(
        self, key: WorkerKey, round: int, step: int, target: Optional[int], done: Done
    ) -> None:
        """`step` counts the steps of all stores; a key's round is never larger than it."""
        self.key = key
        self.round = round
        self.step = step
        self.target = target
        self.done = done
        self.size_bytes = key.size_bytes
        self.ready_s = time.monotonic()
        """When the arrays were ready: a transfer is made when they are."""
        self.missing_elems = key.size_elems
        """Elements that have not arrived; of a push without a target, elements that the servers
        have not confirmed."""

    def land(self, piece: Slice, server: Optional[int]) -> memoryview:
        """Where a server's slice goes in the target; ProtocolError if it comes twice, or from a
        server that does not keep it."""
        arrived, key = self._arrived, self.key
        if arrived is None:
            arrived = self._arrived = set()
            assert self.target is not None
            self._target_bytes = memory_at(self.target, key.size_bytes)
        if piece.server != server or piece.offset in arrived:
            raise ProtocolError(
                f"it sent slice {piece.index} of {key.called} twice in round {self.round}, or "
                f"in place of server {piece.server}"
            )
        arrived.add(piece.offset)
        start = piece.offset * key.item_bytes
        return self._target_bytes[start : start + piece.length * key.item_bytes]

    def misses(self, piece: Slice) -> bool:
        """Whether a slice has not begun to arrive in the target."""
        return self._arrived is None or piece.offset not in self._arrived

    def in_target(self, piece: Slice) -> memoryview:
        """The bytes of a slice that has landed."""
        item_bytes = self.key.item_bytes
        start = piece.offset * item_bytes
        return self._target_bytes[start : start + piece.length * item_bytes]

    @property
    def awaited_since_s(self) -> Optional[float]:
        """Since when the script may wait for the value, on the monotonic clock, or None."""
        return self.ready_s

    def check_lacking(self, header: RoundHeader) -> None:
        """Raise ProtocolError where a round ends without the gradient that this worker had."""
        if self.has_gradient:
            raise ProtocolError(
                f"it ended round {header.round} of {self.key.called} without a gradient, and this "
                "worker has sent one"
            )

    def span(self, kind: str) -> Span:
        """What a trace has of the transfer now."""
        at_ns = now_ns()
        return Span(
            kind, self.key.key_id, at_ns, at_ns, at_ns, UNKNOWN, self.round, self.step, UNKNOWN,
            self.priority, self.size_bytes,
        )  # fmt: skip

    def fail(self, error: BaseException) -> None:
        """Ends the transfer with an error."""
        self.done(error)


class Pull(Transfer):
    """Brings the value of a round that this worker has pushed, or of a later one."""

    def __init__(
        self, key: WorkerKey, round: int, step: int, number: int, target: Optional[int], done: Done
    ) -> None:
        """`number`: the key's when the script called it (`next_pull`); 0 for one that it has not
        called."""
        super().__init__(key, round, step, target, done)
        self.number = number


class Push(Transfer):
    """Takes part in a round, and brings its value where there is a target. A push of a worker that
    has no gradient has no source."""

    after_pulls = 0
    """How many pulls of the key were called before it."""
    changes: Optional[Future[bool]] = None
    """Of one without a gradient: told whether another worker had one when the round has ended, or
    the job's failure."""
    takes: Optional[int] = None
    """The earlier round whose value goes to the target, by a rule that lets workers go on."""
    has_value = False
    """Without a gradient: whether the target has the value that the servers sent last. With one:
    that nobody writes to the target between two values."""
    lacking = 0
    """Of a bucket: a bit for each tensor without a gradient, whose elements in the source are
    zeros."""
    weight = 1.0
    """By what the source, as it is, counts in the mean of all workers."""
    behind = 0
    """Where rounds are each worker's own: the most rounds that a slice of its value lacks of
    another worker."""
    ending: Collection[int] = ()
    """Without a target: the servers that have not said that its round has ended."""
    _kept: Optional[np.ndarray] = None

    def __init__(
        self,
        key: WorkerKey,
        round: int,
        step: int,
        source: Optional[int],
        target: Optional[int],
        done: Done,
    ) -> None:
        """`source`: the address of an array of the key's dtype and size."""
        super().__init__(key, round, step, target, done)
        self.source = source
        self.has_gradient = source is not None

    def gradient(self) -> np.ndarray:
        """All elements of the source."""
        assert self.source is not None
        return _elements_at(self.source, self.key)

    def replace_source(self, gradient: np.ndarray) -> None:
        """Pushes another gradient, which stays until this is done, in place of the source."""
        self._kept = gradient
        self.source = gradient.ctypes.data
        self.has_gradient = True

    @property
    def awaited_since_s(self) -> Optional[float]:
        if not self.key.goes_on:
            return self.ready_s
        due, since_s = self.key.due
        return max(since_s, self.ready_s) if self.round <= due else None

    @property
    def gate_step(self) -> int:
        """The step for which gates hold it back."""
        return self.step if self.key.is_gated else 0

    def fail(self, error: BaseException) -> None:
        self.done(error)
        self.round_failed(error)

    def round_failed(self, error: BaseException) -> None:
        """Its round will not end."""
        if self.changes is not None and not self.changes.done():
            self.changes.set_exception(error)


class DeferredPush(Transfer):
    """A gradient that is not exchanged: it is added on this worker to what the next push brings."""

    def __init__(self, key: WorkerKey, source: int, done: Done) -> None:
        super().__init__(key, key.round, 0, None, done)
        self.source = source

    def gradient(self) -> np.ndarray:
        """All elements of the gradient."""
        return _elements_at(self.source, self.key)


def nothing(error: Optional[BaseException]) -> None:
    """Ends a transfer for which only neighbours wait."""


class Channel:
    """A key's rounds in the worker's thread: which are in flight, and what waits. It sends nothing.

    A transfer of a round waits until the one `window` rounds before has ended on all servers. This
    is the back-pressure on a worker that is ahead: a transfer that waits is an operation of the
    framework that is not complete, so what depends on it waits, too, and servers keep few rounds.
    Rounds of a slice end in order, so one number says which have ended. Until a first one has, no
    more are open than the job's rule admits, though the key's own may have a wider window. Changing
    the slice size relies on this (`worker/tuning.py`), and so do pulls: a server that receives a
    pull for a round knows the slice size of that round.

    A push also waits for the pulls that were called before it. They may begin later, when their
    arrays are ready, and a server answers with the newest value that it has: without an optimizer,
    the sum of the push's round in place of an initial value.
    """

    def __init__(self, key: WorkerKey, window: int) -> None:
        """`window`: how many rounds of a key may be open by the job's rule."""
        self.key = key
        self.begun = INITIAL_ROUND
        """The last round whose push has begun; they begin in order."""
        self.sent = INITIAL_ROUND
        """The last of these whose push the window has admitted."""
        self.ended = INITIAL_ROUND
        """The last round that has ended on all servers."""
        self._window = key.consistency.window
        self.admitted = INITIAL_ROUND + min(window, self._window)
        """The last round that the window admits."""
        self.answered = 0
        """All pulls that the script has called up to this number are answered."""
        self._late_pulls: Set[int] = set()
        """Numbers of answered pulls that have an earlier one unanswered."""
        self.early: Dict[int, Push] = {}
        """Pushes by round that wait for an earlier one to begin."""
        self.waiting: List[Union[Push, Pull]] = []
        """What has begun and may not be sent yet."""
        self.in_flight: Dict[int, Push] = {}
        """Pushes that were sent, by round, until the round has ended on all servers."""
        self.relayed: Dict[int, Pull] = {}
        """By round, values that come for neighbours alone."""
        self.deferred: Optional[np.ndarray] = None
        """The sum of gradients that were not exchanged, which the next push brings along."""
        self.snapshots: Optional[Snapshots] = None
        """Values beside the weight, by a rule that lets workers go on with one of an earlier
        round."""

    def admits(self, transfer: Union[Push, Pull]) -> bool:
        """Whether a transfer may be sent now."""
        if transfer.round > self.admitted:
            return False
        return not isinstance(transfer, Push) or transfer.after_pulls <= self.answered

    def take_admitted(self) -> List[Union[Push, Pull]]:
        """What has waited and may be sent now, by round."""
        free = [one for one in self.waiting if self.admits(one)]
        if free:
            self.waiting = [one for one in self.waiting if one not in free]
            free.sort(key=lambda one: one.round)
        return free

    def answer(self, pull: Pull) -> None:
        """Takes note that a pull is answered."""
        if pull.number:
            self._late_pulls.add(pull.number)
            while self.answered + 1 in self._late_pulls:
                self.answered += 1
                self._late_pulls.remove(self.answered)

    def end(self, round: int) -> None:
        """A round has ended on all servers."""
        self.in_flight.pop(round, None)
        self.ended = max(round, self.ended)
        self.admitted = self.ended + self._window

    def defer(self, push: DeferredPush) -> None:
        """Adds up a gradient that is not exchanged, which is needed no more then."""
        if self.key.size_elems:
            if self.deferred is None:
                self.deferred = push.gradient().astype(self.key.sum_dtype)
            else:
                np.add(self.deferred, push.gradient(), out=self.deferred)
        push.done(None)

    def join_deferred(self, push: Push) -> None:
        """Has a push bring along what was added up, also where it has no gradient itself."""
        total, self.deferred = self.deferred, None
        assert total is not None
        if push.has_gradient:
            np.add(total, push.gradient(), out=total)
        with np.errstate(over="ignore"):
            push.replace_source(total.astype(self.key.numpy_dtype, copy=False))

    @property
    def is_idle(self) -> bool:
        """Whether nothing but pulls is under way, and all rounds have ended."""
        busy = self.waiting or self.early or self.in_flight or self.relayed
        return not busy and self.ended >= self.key.round

    def fail(self, error: BaseException) -> None:
        """Ends all of its transfers with an error."""
        in_flight = list(self.in_flight.values())
        ending = [*self.relayed.values(), *self.waiting, *self.early.values()]
        self.waiting.clear()
        for kept in (self.in_flight, self.relayed, self.early):
            kept.clear()
        for push in in_flight:
            if push.target is None and not push.missing_elems:
                push.round_failed(error)  # it is done
            else:
                push.fail(error)
        for transfer in ending:
            transfer.fail(error)


class Snapshots:
    """Values of a key with which the worker goes on, by a rule that lets it go ahead of them.

    In place of each push another one travels, with a copy of the gradient, and with memory beside
    the weight for the value. So the script's own arrays wait for nothing on the wire, not even for
    a gradient to leave. The weight gets the value of exactly the round that the rule names, as soon
    as it is there.
    """

    def __init__(self, channel: Channel, counts: Counts) -> None:
        self._channel = channel
        self._key = channel.key
        self._counts = counts
        self._values: Dict[int, Optional[np.ndarray]] = {}
        """By round; None where the value is still to come."""
        self._waiting: List[Push] = []
        """The script's pushes whose value is not there yet."""
        self.in_flight = 0
        """How many pushes travel in the place of others."""

    def split(self, push: Push) -> Push:
        """Returns the push that is to travel in the place of another, which may be done at once."""
        assert push.takes is not None
        push.takes = max(push.takes, INITIAL_ROUND)
        if push.takes != INITIAL_ROUND and push.takes not in self._values:
            push.takes = push.round  # the script has not asked for that round's value
        travels = self._copy(push)
        self._values[push.round] = None
        self._waiting.append(push)
        self._go_on()
        return travels

    def _copy(self, push: Push) -> Push:
        value = np.empty(self._key.size_bytes, np.uint8)
        done = partial(self._done, push.round, value)
        travels = Push(self._key, push.round, push.step, None, value.ctypes.data, done)
        if push.has_gradient:
            travels.replace_source(push.gradient().copy())
        travels.priority, travels.exact, travels.ready_s = push.priority, push.exact, push.ready_s
        travels.after_pulls, travels.changes = push.after_pulls, push.changes
        travels.lacking, travels.own_step = push.lacking, push.own_step
        travels.weight = push.weight
        self.in_flight += 1
        return travels

    def _done(self, round: int, value: np.ndarray, error: Optional[BaseException]) -> None:
        self.in_flight -= 1
        if error is None:
            self._values[round] = value
            self._go_on()
            return
        waiting, self._waiting = self._waiting, []
        for push in waiting:
            push.done(error)

    def _go_on(self) -> None:
        """Ends the pushes whose value is there, and forgets values that none needs any more."""
        going = [one for one in self._waiting if self._is_there(_taken(one))]
        self._waiting = [one for one in self._waiting if one not in going]
        for push in going:
            if _taken(push) != INITIAL_ROUND:
                value, target = self._values[_taken(push)], push.target
                assert value is not None and target is not None
                memory_at(target, self._key.size_bytes)[:] = value.data
        needed = self._key.consistency.needs(self._channel.begun + 1)
        needed = min([needed, *map(_taken, self._waiting)])
        self._values = {r: value for r, value in self._values.items() if r >= needed}
        for push in going:
            self._counts.note_staleness(push.round - _taken(push))
            push.done(None)

    def _is_there(self, round: int) -> bool:
        return round == INITIAL_ROUND or self._values[round] is not None


def _taken(push: Push) -> int:
    assert push.takes is not None
    return push.takes


class Counts(Dict[str, int]):
    """What a worker has sent and received; any thread may read it."""

    def __init__(self) -> None:
        super().__init__(
            bytes_sent=0, bytes_received=0, slices_sent=0, slices_received=0, stale_values=0,
            stale_rounds=0, most_stale_rounds=0,
        )  # fmt: skip

    def note_staleness(self, rounds: int) -> None:
        """Count a key's value that lacks so many rounds, by another rule than the default."""
        self["stale_values"] += 1
        self["stale_rounds"] += rounds
        self["most_stale_rounds"] = max(self["most_stale_rounds"], rounds)


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The memory at an address; it must stay there while the view is used."""
    view: memoryview = _memoryview(address, size_bytes, _WRITABLE)
    return view


def _elements_at(address: int, key: WorkerKey) -> np.ndarray:
    return np.frombuffer(memory_at(address, key.size_bytes), key.numpy_dtype)


_memoryview = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
_memoryview.restype = ctypes.py_object
_WRITABLE = 0x200  # PyBUF_WRITE
