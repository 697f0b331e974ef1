"""Parameters whose values are under way: whoever reads one waits for it."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Callable, Dict, Optional, Protocol, Tuple

import torch

from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.tensors import bits
from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.early import EarlyWrites
from p3kv.frontends.torch.values.leaving import Leaving
from p3kv.frontends.torch.values.staging import BY_SLICE_BYTES, Staging
from p3kv.frontends.torch.values.watched import Waits, gives_memory, have_back, have_wait, name_of
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import OnSlice, WorkerKey

_NOTHING_CHANGES: Future[bool] = Future()
"""Of the initial round, whose value a parameter has."""
_NOTHING_CHANGES.set_result(False)


class Joined(Protocol):
    """What `Late` needs of the bucket that it is in."""

    there: threading.Event
    taking: threading.Lock

    def memory_of(self, member: int) -> torch.Tensor: ...


class Late(Waits):
    """A parameter, its key, and the value that is under way to it. One that is in no bucket
    travels by itself, and is what `Bucket` is to others.

    `arrived` and what `on_slice` gives are called in the worker's thread, `take_if_there` in that
    of `early`, and all else in threads of the script.
    """

    def __init__(
        self,
        key: WorkerKey,
        parameter: torch.nn.Parameter,
        name: str,
        early: EarlyWrites,
        copies: Copies,
        bucket: Optional[Joined] = None,
        member: int = 0,
    ) -> None:
        """`member`: its number in a bucket, from 1."""
        self.key = key
        """That of its bucket, if it is in one."""
        self.member = member
        self.tensor = key.members[member - 1].key if member else key.key
        """The key that it has, or would have, by itself."""
        self.parameter = parameter
        self.name = name
        self.device = parameter.device
        self.copies = copies
        memory = self._memory() if bucket is None else bucket.memory_of(member)
        self._staged = Staging(parameter, memory)
        self.staging = self._staged.value
        """Where the next value lands."""
        self.value_version = parameter._version
        """torch's count of writes into the parameter, when it was last known to be the servers'."""
        self._alias: Optional[Tuple[torch.Tensor, int]] = None
        """The last one that the script has got from `data`, and torch's count of writes into it;
        writes through it are not counted with the parameter's."""
        self._gave_memory = False
        self._changes: Optional[Future[bool]] = None
        """Of a frozen parameter: whether another worker has trained it in the round whose value is
        under way. If none has, its value is the script's."""
        self._recent: Dict[int, Optional[Future[bool]]] = {}
        """The same by round, where workers go on with values of earlier rounds than their own."""
        self._unchanged: Optional[torch.Tensor] = None
        """Of a frozen parameter whose value a codec rounds, or that is in a bucket: what was in the
        staging memory before the value that is under way, which may be rounded otherwise, though
        nobody trains it."""
        self.as_sent: Optional[torch.Tensor] = None
        """Of a worker that trains by itself: the weight when its difference left. What the weight
        has learned since is added to the value that comes."""
        self.leaving: Optional[Leaving] = None
        """The gradient that `backward` has computed in this step."""
        self._sent: Optional[Leaving] = None
        """The gradient that is under way to the servers, until the value is there."""
        self.pushed = False
        """Whether this step's push has been called."""
        self.asleep = False
        """Whether nobody trains it, and nothing travels for it."""
        self.is_first = False
        """Whether the forward pass reads it first. Then it stays late until it is read, though its
        value is written early, since by that read the pass shows that it begins."""
        self.is_seen = False
        """Whether a function of torch has been seen to read it. Until then it stays late, too, and
        modules that have it wait when they are called."""
        self.was_entered = self.was_awaited = False
        """Whether such a module, or the script, has waited since it became late."""
        self._is_late = False
        self.is_written = False
        """Whether the value is in the parameter, which may be late still."""
        self._there = threading.Event() if bucket is None else bucket.there
        self._there.set()
        self.error: Optional[BaseException] = None
        self._taking = threading.Lock() if bucket is None else bucket.taking
        self._early = early
        self.size_bytes = parameter.numel() * parameter.element_size()

    def _memory(self) -> torch.Tensor:
        return self.copies.empty(self.parameter.shape, self.parameter.dtype)

    is_table = False
    """Whether this worker has no value of it, but rows that it asks for."""
    newest: Optional[torch.Tensor] = None
    """Numbers of the rows that came last, where only some travel."""

    def note_changes(
        self, round_: int, takes: Optional[int], changes: Optional[Future[bool]]
    ) -> None:
        """The value of a round is to be under way after a push, or that of round `takes`;
        `changes`: of a push without a gradient, whether another worker has one."""
        if self.member:
            # Another one of the bucket may have changed. Worker 0's initial value holds for all.
            is_own = round_ > INITIAL_ROUND and not self.parameter.requires_grad
            self._unchanged = self.staging.clone() if is_own else None
            return
        changes = None if self.parameter.requires_grad else changes
        if takes is not None:
            self._recent[round_] = changes
            self._recent = {one: its for one, its in self._recent.items() if one >= takes}
            changes = self._recent.get(takes, _NOTHING_CHANGES)
        self._changes = changes
        rounds = changes is not None and not self.key.codecs.values.in_place
        self._unchanged = self.staging.clone() if rounds else None

    @property
    def value_changes(self) -> bool:
        """Whether the value that is under way is to be written, and not that of a weight which was
        frozen here and which no other worker has changed either; waits until that is known."""
        if self.member:
            return self._unchanged is None or not torch.equal(
                bits(self._unchanged), bits(self.staging)
            )
        return self._changes is None or self._changes.result()

    def begin(self) -> None:
        """A value is under way to the staging memory; the last one must have been written."""
        with self._taking:
            self._there.clear()
            self._staged.begin()
            self.is_written = False

    @property
    def on_slice(self) -> Optional[OnSlice]:
        """Takes a slice of the next value that is in the staging memory; None where all of it is
        written at once."""
        return self._slice_arrived if self.size_bytes >= BY_SLICE_BYTES else None

    def _slice_arrived(self, start: int, length: int) -> None:
        self._staged.arrived(start, length)
        if self._is_late:  # else `arm` sees that it is there
            self._early.soon(self)

    @property
    def members(self) -> Tuple[Late, ...]:
        """As a bucket has them."""
        return (self,)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient has been computed in this step."""
        return self.leaving is not None

    is_complete = True
    lacking = 0

    def source(self) -> torch.Tensor:
        """The gradient, which is under way to the servers from now on."""
        assert self.leaving is not None
        self._sent, self.pushed = self.leaving, True
        gradient = self.leaving.gradient.detach()
        return gradient.coalesce() if gradient.is_sparse else gradient

    def leaves_itself(self) -> None:
        """The network reads the memory of `source`; to be called before the transfer begins."""
        assert self._sent is not None
        gradient = self._sent.gradient
        self._sent.travels = not gradient.is_sparse or gradient.is_coalesced()

    def lack_gradients(self) -> None:
        """This worker has none in this step."""
        self.pushed = True

    def arrived(self, error: Optional[BaseException]) -> None:
        """The value is in the staging memory, or does not come; a gradient has left before."""
        sent, self._sent = self._sent, None
        self.error = error or (None if sent is None else sent.has_left())
        self._there.set()
        if self._is_late:  # else `arm` sees that it is there
            self._early.soon(self)

    def arm(self) -> None:
        """From now on, whoever reads the parameter waits for the value that is under way."""
        self.copies.arm()
        self.was_entered = self.was_awaited = False
        with self._taking:  # or a value that comes now would be written, and still be waited for
            if not self._is_late:
                have_wait(self.parameter, self)
                self._is_late = True
        if self._there.is_set() or self._staged.holds_slices:
            self._early.soon(self)

    def take_if_there(self) -> None:
        """Writes a value, or those of its slices, that are there into a parameter that is armed."""
        with self._taking:
            if not self._is_late:
                return
            if self._there.is_set():
                self._end(self.copies.finish, stays_late=self._stays_late)
            elif not self.is_written:
                self.copies.write(self._staged.write_slices)

    @property
    def _stays_late(self) -> bool:
        return self.is_first or not self.is_seen

    def wait(self) -> None:
        """As `take`, but whoever reads the forward pass's first parameter is still noticed."""
        self.was_awaited = True
        self._take(self.copies.finish, stays_late=self.is_first)

    def take(self) -> None:
        """Waits for the value, if one is under way to a parameter that is armed, and writes it into
        the parameter. Raises the job's failure."""
        self.was_awaited = True
        self._take(self.copies.finish)

    def read(self, function: Any) -> None:
        """As `take`. On an accelerator only what this thread computes next waits until the value is
        written, and the parameter stays late until then: other threads and streams may read it."""
        may_begin_forward()
        self.is_seen = True
        self._take(self.copies.reach_reader)

    def gave(self, function: Any, result: Any) -> None:
        if name_of(function) == "data" and isinstance(result, torch.Tensor):
            self._alias = result, result._version
        self._gave_memory = self._gave_memory or gives_memory(function)

    def may_be_written(self) -> bool:
        """Whether the script may have written into the parameter since the last call, as far as
        that shows without a comparison."""
        if self._alias is None and not self._gave_memory:
            return False
        gave, self._gave_memory = self._gave_memory, False
        if self._alias is None:
            return gave
        alias, version = self._alias
        self._alias = alias, alias._version
        return gave or alias._version != version

    def enter(self) -> None:
        may_begin_forward()
        self.was_entered = True
        self._take(self.copies.reach_reader, stays_late=self._stays_late)

    def _take(self, is_seen_by_all: Callable[[], bool], stays_late: bool = False) -> None:
        while self._is_late:
            if not self._there.is_set():
                waited(self._there.wait)
            with self._taking:
                # Before this thread had the lock, another may have taken the value and begun to
                # wait for the next one.
                if self._there.is_set():
                    self._end(is_seen_by_all, stays_late)
                    return

    def _end(self, is_seen_by_all: Callable[[], bool], stays_late: bool) -> None:
        """Writes the value, which is there, into a parameter that is armed."""
        if not self._is_late:
            return
        self._write()
        if is_seen_by_all() and not stays_late:
            have_back(self.parameter, self)
            self.as_sent = None
            self._is_late = False

    def _write(self) -> None:
        if self.is_written:
            return
        if self.error is not None:
            raise self.error
        if self.value_changes:
            with torch._C.DisableTorchFunctionSubclass():
                self.copies.write(self._copy)
        elif self._unchanged is not None:
            self.staging.copy_(self._unchanged)
        self._unchanged = None
        self.is_written = True

    def _copy(self) -> None:
        """Writes the value that is there into the parameter."""
        if self.as_sent is None:
            self._staged.write()
        else:  # in this order a weight that has learned nothing is exactly the value
            value = self.copies.to_device(self.staging)
            self.parameter.data.sub_(self.as_sent).add_(value)
