"""Buckets: parameters that travel as one key, and wait for its next value together. Most have one
parameter; small ones that are neighbours in the model share one."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import (
    Any,
    Collection,
    Deque,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.tensors import bits
from p3kv.frontends.torch.values.copies import Copies
from p3kv.frontends.torch.values.early import EARLY
from p3kv.frontends.torch.values.leaving import Leaving
from p3kv.frontends.torch.values.watched import Watcher, gives_memory, name_of, unwatch, watch
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import MAX_MEMBERS
from p3kv.worker.transfers import OnSlice, WorkerKey

_SMALL_ELEMS = 250_000
"""Larger parameters travel by themselves: what a frame costs is little beside what their copies
would. Links on which slices are as large as this are fast."""
_SAMPLED = 32
"""So many elements of a weight are compared in each step."""
BY_SLICE_BYTES = 1 << 20
"""A parameter of so many bytes is written slice by slice: a reader then waits for the copy of the
last slices, and not of all."""
_NOTHING_CHANGES: Future[bool] = Future()
"""Of the initial round, whose value a parameter has."""
_NOTHING_CHANGES.set_result(False)


class Arriving(Watcher):
    """A key's next value: it lands in memory beside the tensors that are to have it, since these
    may be read until then. `arrived` is called in the worker's thread."""

    def __init__(self, key: WorkerKey, copies: Copies, staging: torch.Tensor) -> None:
        """`staging`: where values land, contiguous, since they travel so."""
        self.key = key
        self.copies = copies
        self.staging = staging
        self.error: Optional[BaseException] = None
        self.is_written = False
        """Whether the value is in the tensors, which may be watched still."""
        self._there = threading.Event()
        self._there.set()
        self._taking = threading.Lock()
        """Held while a value is written, and while tensors begin or end to wait."""

    def begin(self) -> None:
        """A value is under way; the last one must have been written."""
        with self._taking:
            self._there.clear()
            self.is_written = False

    def arrived(self, error: Optional[BaseException]) -> None:
        """The value is in the staging memory, or does not come."""
        self.error = error
        self._there.set()

    def await_value(self) -> None:
        """Waits until the value is there, or does not come."""
        if not self._there.is_set():
            waited(self._there.wait)

    def write(self) -> None:
        """Writes the value, which is there, once. Raises the job's failure."""
        if self.is_written:
            return
        if self.error is not None:
            raise self.error
        with torch._C.DisableTorchFunctionSubclass():
            self.copies.write(self._copy)
        self.is_written = True

    @abstractmethod
    def _copy(self) -> None:
        """Copies the value into the tensors."""


class Weight:
    """A parameter of a bucket, and what the script does with it."""

    def __init__(
        self,
        key: WorkerKey,
        member: int,
        name: str,
        parameter: torch.nn.Parameter,
        copies: Copies,
        staging: torch.Tensor,
        by_rows: bool,
        is_table: bool,
    ) -> None:
        """`by_rows` and `is_table` as in `Bucket`."""
        self.by_rows = by_rows
        self.is_table = is_table
        self.newest: Optional[torch.Tensor] = None
        """Numbers of the rows that came last, where only some travel."""
        self.key = key
        """The bucket's."""
        self.member = member
        """Its number in a bucket of several, from 1."""
        self.tensor = key.members[member - 1].key if member else key.key
        """The key that it has, or would have, by itself."""
        self.name = name
        self.parameter = parameter
        self.device, self.dtype, self.shape = parameter.device, parameter.dtype, parameter.shape
        """As they were when it was declared."""
        self.copies = copies
        self.staging = staging
        """Its part of the memory in which the bucket's value lands."""
        self.value_version = parameter._version
        """torch's count of writes into the parameter, when it was last known to be the servers'."""
        self._memory_at = self._address
        """Where it was when `may_be_written` was called: `parameter.data = ...` counts no write."""
        self._sampled: Optional[Tuple[np.ndarray, np.ndarray]] = None
        """Some elements of the parameter and of `staging`, where they are."""
        self.leaving: Optional[Leaving] = None
        """The gradient that `backward` has computed in this step."""
        self.as_sent: Optional[torch.Tensor] = None
        """Of a worker that trains by itself: the weight when its difference left. What the weight
        has learned since is added to the value that comes."""
        self.unchanged: Optional[torch.Tensor] = None
        """Of a frozen parameter whose value a codec rounds, or that is not alone: what was in the
        staging memory before the value that is under way, which may be rounded otherwise, though
        nobody trains it."""
        self.is_late = False
        """Whether it is watched, since its value is under way."""
        self.is_first = False
        """Whether the forward pass reads it first. Then it stays late until it is read, though its
        value is written early, since by that read the pass shows that it begins."""
        self.is_seen = False
        """Whether a function of torch has been seen to read it. Until then it stays late, too, and
        modules that have it wait when they are called."""
        self.was_entered = self.was_awaited = False
        """Whether such a module, or the script, has waited since it became late."""
        self._alias: Optional[Tuple[torch.Tensor, int]] = None
        """The last one that the script has got from `data`, and torch's count of writes into it;
        writes through it are not counted with the parameter's."""
        self._gave_memory = self._was_written = False
        """Whether the script may write to it by other ways since `may_be_written` was called, and
        whether it has written by an earlier one from `data`."""
        self.is_open = False
        """Whether it is watched, since its gradient is complete and the step has not ended: the
        script may write to it."""

    @property
    def _address(self) -> int:
        """Where it is in memory; 0 for a table, which is not."""
        return 0 if self.is_table else self.parameter.data_ptr()

    @property
    def is_frozen(self) -> bool:
        """Whether it is the script's own; not if the script has it be frozen between its passes."""
        return not self.parameter.requires_grad and self.parameter.grad is None

    def gave(self, function: Any, result: Any) -> None:
        """A function of torch has read it."""
        if name_of(function) == "data" and isinstance(result, torch.Tensor):
            self._was_written = self.is_written_by_data
            self._alias = result, result._version
        self._gave_memory = self._gave_memory or gives_memory(function)

    def may_be_written(self) -> bool:
        """Whether the script may have written into the parameter since the last call, as far as
        that shows without a comparison. To be called as `is_written_by_data`."""
        memory_at = self._address
        if self._alias is None and not self._gave_memory and memory_at == self._memory_at:
            return False
        gave = self._gave_memory or self._was_written or memory_at != self._memory_at
        self._memory_at, self._sampled = memory_at, None
        self._gave_memory = self._was_written = False
        if self._alias is None:
            return gave
        alias, version = self._alias
        self._alias = alias, alias._version
        return gave or alias._version != version

    @property
    def is_written_by_data(self) -> bool:
        """Whether the script has written by what it has got from `data`, or has set that, since
        that was asked last by `may_be_written`. Without functions of the weight's own class."""
        if self._address != self._memory_at:
            return True
        if self._alias is None:
            return False
        alias, version = self._alias
        return self._was_written or alias._version != version

    @property
    def differs_by_sample(self) -> bool:
        """Whether some elements are others than the servers', on the CPU: what writes to a weight
        without being seen mostly changes all of it. No other value may be under way."""
        value = self.parameter
        if self.is_late or self.by_rows or self.is_table or value.device.type != "cpu":
            return False
        if self._sampled is None:
            if not value.is_contiguous():
                return False
            every = self.staging.numel() // _SAMPLED + 1
            both = (bits(one.detach()).reshape(-1) for one in (value, self.staging))
            mine, known = (one[every // 2 :: every].numpy() for one in both)
            self._sampled = mine, known
        mine, known = self._sampled
        return mine.tobytes() != known.tobytes()

    def check_gradient(self, gradient: torch.Tensor) -> None:
        """Raises NotSupportedError for a gradient that can't travel."""
        if self.by_rows:
            if gradient.layout is not torch.sparse_coo or gradient.sparse_dim() != 1:
                raise NotSupportedError(
                    f"the gradient of '{self.name}' is not sparse by rows, though its embedding "
                    "has sparse=True, or its optimizer is SparseAdam: something reads all of the "
                    "weight, such as a layer that is tied to it. Make the embedding with "
                    "sparse=False, and train it by an optimizer that takes dense gradients"
                )
        elif gradient.layout is not torch.strided:
            raise NotSupportedError(
                f"the gradient of '{self.name}' is sparse, and nothing said so when "
                "p3kv.torch.Optimizer was made: make the model with Embedding(sparse=True) or "
                "EmbeddingBag(sparse=True) before, or use SparseAdam"
            )
        if (
            gradient.shape != self.shape
            or gradient.dtype is not self.dtype
            or gradient.device != self.device
        ):
            raise NotSupportedError(
                f"the gradient of '{self.name}' is "
                f"{_kind(gradient.dtype, gradient.shape, gradient.device)}; p3kv.torch takes one "
                "like the parameter when p3kv.torch.Optimizer was made, which was "
                f"{_kind(self.dtype, self.shape, self.device)}"
            )


class Bucket(Arriving):
    """Parameters of one dtype, device and group: their gradients leave together as soon as the last
    one is there, and one value comes for all, which is written when one of them is read.

    A step may have gradients of some only: those that lack one push zeros and say so, and servers
    update the others. `arrived` and what `on_slice` gives are called in the worker's thread,
    `take_if_there` in that of `EARLY`, and all else in threads of the script.
    """

    by_rows = False
    """Whether only rows travel."""
    is_table = False
    """Whether this worker has no value, but rows that it asks for."""

    def __init__(
        self,
        key: WorkerKey,
        parameters: Sequence[Tuple[str, torch.nn.Parameter]],
        copies: Copies,
    ) -> None:
        """The parameters with their names, in the order in which they travel."""
        joined, first = len(parameters) > 1, parameters[0][1]
        shape = (key.size_elems,) if joined else first.shape
        super().__init__(key, copies, self._memory(shape, first.dtype, copies))
        parts = self._parts(self.staging) if joined else [self.staging]
        self.weights = [
            Weight(
                key, number if joined else 0, name, parameter, copies, part, self.by_rows,
                self.is_table,
            )
            for number, ((name, parameter), part) in enumerate(zip(parameters, parts), 1)
        ]  # fmt: skip
        self.is_alone = not joined
        """Whether it has one parameter."""
        self._weight_of = {id(weight.parameter): weight for weight in self.weights}
        self.size_bytes = key.size_bytes
        self.pushed = False
        """Whether this step's push has been called."""
        self.asleep = False
        """Whether nobody trains any of them, and nothing travels."""
        self.woken_by: Any = None
        """The `Asleep` by which this worker has said that it has woken it. Others may wait for this
        worker to hear what they have woken, before they push."""
        self.is_lean = False
        """Whether torch tells of the gradient only that comes last, by a hook."""
        self.alike = 0
        """In how many steps, one after the other, the same gradient was `last`, and all new."""
        self.last: Optional[Weight] = None
        self._was_complete = False
        """Whether all gradients of this step have come in `backward`."""
        self._sent: Optional[Leaving] = None
        """The gradient whose own memory is under way to the servers, until the value is there."""
        self._spare: List[Gathered] = []
        """Memory for the gradients of several parameters, which is not in use."""
        self._changes: Optional[Future[bool]] = None
        """Of a frozen parameter: whether another worker has trained it in the round whose value is
        under way. If none has, its value is the script's."""
        self._recent: Dict[int, Optional[Future[bool]]] = {}
        """The same by round, where workers go on with values of earlier rounds than their own."""
        self._slices: Deque[Tuple[int, int]] = deque()
        """Those that are in the staging memory and not in the parameter: where each begins, and how
        many elements it has."""
        self._written_elems = 0

    def _memory(self, shape: Tuple[int, ...], dtype: torch.dtype, copies: Copies) -> torch.Tensor:
        return copies.empty(shape, dtype)

    def _parts(self, flat: torch.Tensor) -> List[torch.Tensor]:
        """Each parameter's part of memory for all of them."""
        members = self.key.members
        parts = flat.split([member.size_elems for member in members])
        return [part.view(member.shape) for part, member in zip(parts, members)]

    # Gradients leave.

    @property
    def has_gradient(self) -> bool:
        """Whether any gradient has been computed in this step."""
        return any(weight.leaving is not None for weight in self.weights)

    @property
    def is_complete(self) -> bool:
        """Whether all gradients are there that this step will bring, as far as is known."""
        for weight in self.weights:  # the first one's usually comes last
            if weight.leaving is None and (
                weight.parameter.requires_grad or weight.parameter.grad is not None
            ):
                return False  # a frozen one's, which is zeroed in place, leaves in step
        return True

    def complete_with(self, last: Weight) -> None:
        """All gradients are there, and this one came last."""
        self._was_complete = True
        if self.is_lean:
            return
        same, self.last = last is self.last, last
        is_alike = same and all(
            one.is_seen and one.leaving is not None and one.leaving.is_new for one in self.weights
        )
        self.alike = self.alike + 1 if is_alike else 0

    def new(self) -> List[Weight]:
        """Those whose gradients `backward` has just made, as far as shows without a hook: torch has
        counted no write into these. Not noted yet."""
        return [
            one
            for one in self.weights
            if one.leaving is None
            and one.parameter.grad is not None
            and not one.parameter.grad._version
        ]

    @property
    def lacking(self) -> int:
        """Those of which there is no gradient in this step, a bit for each."""
        return sum(1 << at for at, one in enumerate(self.weights) if one.leaving is None)

    def gathered(self) -> Gathered:
        """The gradients, which are under way to the servers from now on: one as it is, several in
        memory of their own, with zeros where there is none."""
        self.pushed = True
        if self.is_alone:
            self._sent = self.weights[0].leaving
            assert self._sent is not None
            gradient = self._sent.gradient.detach()
            return Gathered(gradient.coalesce() if gradient.is_sparse else gradient)
        return self.joined(
            [None if one.leaving is None else one.leaving.gradient for one in self.weights]
        )

    def joined(self, gradients: Sequence[Optional[torch.Tensor]]) -> Gathered:
        """A copy of the gradients of several parameters, with zeros where there is none, in memory
        that is given back by `spare`."""
        memory = self._spare.pop() if self._spare else None
        if memory is None:
            first = self.weights[0]
            flat = torch.empty((self.key.size_elems,), dtype=first.dtype, device=first.device)
            memory = Gathered(flat, self._parts(flat))
        parts, sources = [], []
        for gradient, part in zip(gradients, memory.parts):
            if gradient is None:
                part.zero_()
            else:
                parts.append(part)
                sources.append(gradient)
        with torch.no_grad():  # they may have a graph of their own
            torch._foreach_copy_(parts, sources)
        return memory

    def leaves_itself(self) -> None:
        """The network reads the memory of the gradient; to be called before the transfer begins."""
        if self._sent is not None:
            gradient = self._sent.gradient
            self._sent.travels = not gradient.is_sparse or gradient.is_coalesced()

    def step_ends(self) -> None:
        """The gradients of this step may be changed, once they have left."""
        self.pushed = False
        if not self._was_complete:
            self.alike = 0
        self._was_complete = False
        leaving = []
        for weight in self.weights:
            if weight.leaving is not None:
                leaving.append(weight.leaving)
                weight.leaving = None
            weight.is_open = False
            if weight.parameter.requires_grad:
                weight.value_version = weight.parameter._version
        for one in leaving:
            one.step_ends()

    def await_dropped(self) -> None:
        """Ends a step that servers drop: the value that comes is the one before. Raises the job's
        failure."""
        self.await_value()
        if self.error is not None:
            raise self.error
        self.is_written = True
        self._close(self.weights)
        self.step_ends()

    def note_changes(
        self, round_: int, takes: Optional[int], changes: Optional[Future[bool]]
    ) -> None:
        """The value of a round is to be under way after a push, or that of round `takes`;
        `changes`: of a push without a gradient, whether another worker has one."""
        if not self.is_alone:
            # Another one of the bucket may have changed. Worker 0's initial value holds for all.
            for weight in self.weights:
                is_own = round_ > INITIAL_ROUND and not weight.parameter.requires_grad
                weight.unchanged = weight.staging.clone() if is_own else None
            return
        (weight,) = self.weights
        changes = None if weight.parameter.requires_grad else changes
        if takes is not None:
            self._recent[round_] = changes
            self._recent = {one: its for one, its in self._recent.items() if one >= takes}
            changes = self._recent.get(takes, _NOTHING_CHANGES)
        self._changes = changes
        rounds = changes is not None and not self.key.codecs.values.in_place
        weight.unchanged = weight.staging.clone() if rounds else None

    def open(self, weight: Weight) -> None:
        """The gradient of a weight is complete: until the step ends, what the script does to the
        weight is seen."""
        weight.is_open = True
        watch(self, (weight.parameter,))

    def _close(self, weights: Iterable[Weight]) -> None:
        back = [weight for weight in weights if weight.is_open]
        unwatch(self, [weight.parameter for weight in back])
        for weight in back:
            weight.is_open = False

    # Values come.

    def value_changes(self, weight: Weight) -> bool:
        """Whether the value that is under way is to be written, and not that of a weight which was
        frozen here and which no other worker has changed either; waits until that is known."""
        if self.is_alone:
            return self._changes is None or self._changes.result()
        return weight.unchanged is None or not torch.equal(
            bits(weight.unchanged), bits(weight.staging)
        )

    def begin(self) -> None:
        with self._taking:
            self._there.clear()
            self.is_written = False
            self._slices.clear()
            self._written_elems = 0

    @property
    def on_slice(self) -> Optional[OnSlice]:
        """Takes a slice of the next value that is in the staging memory; None where all of it is
        written at once."""
        return self.slice_arrived if self.is_alone and self.size_bytes >= BY_SLICE_BYTES else None

    def slice_arrived(self, start: int, length: int) -> None:
        """A slice of the value is in the staging memory."""
        self._slices.append((start, length))
        self._soon()

    def arrived(self, error: Optional[BaseException]) -> None:
        """The value is in the staging memory, or does not come; a gradient has left before."""
        sent, self._sent = self._sent, None
        self.error = error or (None if sent is None else sent.has_left())
        self._there.set()
        self._soon()

    def transferred(
        self,
        source: Optional[torch.Tensor],
        gathered: Optional[Gathered],
        error: Optional[BaseException],
    ) -> None:
        """A push or a pull has ended: nobody reads the memory of its gradients any more. Called in
        the worker's thread; `source` stays until then."""
        if gathered is not None and gathered.parts:
            self._spare.append(gathered)
        self.arrived(error)

    def arm(self) -> None:
        """From now on, whoever reads one of the parameters waits for the value that is under
        way."""
        self.copies.arm()
        with self._taking:  # or a value that comes now would be written, and still be waited for
            more = [weight for weight in self.weights if not weight.is_late]
            for weight in self.weights:
                weight.was_entered = weight.was_awaited = False
                weight.is_late = True
            watch(self, [weight.parameter for weight in more])
        if self._there.is_set() or self._slices:
            self._soon()

    def _soon(self) -> None:
        """Has the value be written early. To write several small ones takes less than to wake the
        thread."""
        if self.is_alone and self.weights[0].is_late:  # else `arm` sees that it is there
            EARLY.soon(self)

    def take_if_there(self) -> None:
        """Writes a value, or those of its slices, that are there into parameters that are armed."""
        with self._taking:
            if not any(weight.is_late for weight in self.weights):
                return
            if self._there.is_set():
                self._end((), reads=False)
            elif not self.is_written:
                self.copies.write(self._write_slices)

    def wait(self) -> None:
        """As `take`, but whoever reads the forward pass's first parameter is still noticed."""
        for weight in self.weights:
            weight.was_awaited = True
        frees = [weight for weight in self.weights if not weight.is_first]
        self._take(self.weights, frees)

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Waits for the value, if one is under way to parameters that are armed, and writes it into
        them. Raises the job's failure. Of others than `tensor`, those stay late that a read is to
        be seen of."""
        taken = self.weights if tensor is None else (self._weight_of[id(tensor)],)
        self._close(taken)
        for weight in taken:
            weight.was_awaited = True
        self._take(taken, taken)

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        """As `take`. On an accelerator only what this thread computes next waits until the value is
        written, and parameters stay late until then: other threads and streams may read them."""
        weight = self._weight_of[id(tensor)]
        weight.is_seen = True
        if weight.is_late:  # another one may have been read by the same function
            may_begin_forward()
            self._take((weight,), (weight,), reads=True)

    def gave(self, tensor: torch.Tensor, function: Any, result: Any) -> None:
        if gives_memory(function) or name_of(function) == "data":
            self._weight_of[id(tensor)].gave(function, result)

    def enter(self, tensor: torch.Tensor) -> None:
        may_begin_forward()
        weight = self._weight_of[id(tensor)]
        weight.was_entered = True
        self._take((weight,), (), reads=True)

    def _take(
        self, weights: Collection[Weight], frees: Collection[Weight], reads: bool = False
    ) -> None:
        """Waits while any of `weights` is late; of those in `frees`, no read has to be seen.
        `reads`: only what this thread computes next needs the value."""
        while any(weight.is_late for weight in weights):
            if self.woken_by is not None:
                self.woken_by.settle()
            self.await_value()
            with self._taking:
                # Before this thread had the lock, another may have taken the value and begun to
                # wait for the next one.
                if self._there.is_set():
                    if any(weight.is_late for weight in weights):
                        self._end(frees, reads)
                    return

    def _end(self, frees: Collection[Weight], reads: bool) -> None:
        """Writes the value, which is there, into parameters that are armed."""
        self.write()
        is_seen_by_all = self.copies.reach_reader() if reads else self.copies.finish()
        if not is_seen_by_all:
            return
        back = [
            one
            for one in self.weights
            if one.is_late and ((one.is_seen and not one.is_first) or one in frees)
        ]
        unwatch(self, [weight.parameter for weight in back])
        for weight in back:
            weight.is_late = False
            weight.as_sent = None

    def _copy(self) -> None:
        weights, values = [], []
        for weight in self.weights:
            if (self.is_alone or weight.unchanged is not None) and not self.value_changes(weight):
                if weight.unchanged is not None:
                    weight.staging.copy_(weight.unchanged)
            elif self.is_alone:
                self._copy_one(weight)
            else:
                weights.append(weight.parameter.data)
                values.append(weight.staging)
            weight.unchanged = None
        if weights:
            torch._foreach_copy_(weights, values, non_blocking=True)

    def _copy_one(self, weight: Weight) -> None:
        if weight.as_sent is not None:
            # In this order a weight that has learned nothing is exactly the value.
            value = self.copies.to_device(weight.staging)
            weight.parameter.data.sub_(weight.as_sent).add_(value)
        elif not self._written_elems or not self._write_slices():
            weight.parameter.data.copy_(weight.staging, non_blocking=True)

    def _write_slices(self) -> bool:
        """Writes the slices that are there; whether all of the value is written then."""
        with torch._C.DisableTorchFunctionSubclass():
            weight = self.weights[0].parameter.data
            if not weight.is_contiguous():
                return False
            weight, value = weight.view(-1), self.staging.view(-1)
            while self._slices:
                start, length = self._slices.popleft()
                part = slice(start, start + length)
                weight[part].copy_(value[part], non_blocking=True)
                self._written_elems += length
            return self._written_elems == len(weight)


class Gathered(NamedTuple):
    """Gradients that leave together."""

    flat: torch.Tensor
    parts: Sequence[torch.Tensor] = ()
    """Those of a bucket with several parameters: each one's part of memory that is kept for
    them."""


def _kind(dtype: torch.dtype, shape: Tuple[int, ...], device: torch.device) -> str:
    return f"{dtype} of shape {tuple(shape)} on {device}"


class Joinable(NamedTuple):
    """A parameter that is to be declared."""

    number: int
    """Its place in the optimizer."""
    parameter: torch.nn.Parameter
    name: str
    group: Optional[int]
    """That of the optimizer; None: it can't be joined with others."""


def buckets_of(parameters: Iterable[Joinable], slice_elems: int) -> List[List[Joinable]]:
    """Which parameters travel together: neighbours that are alike, in the order of the first of
    each bucket. Every process finds the same.

    `parameters` are in the order in which the forward pass reads them. `slice_elems`: the elements
    of a slice, which is as large as is right for the network. A bucket has no more, since it delays
    what is more urgent as a slice does.
    """
    small_elems = min(slice_elems, _SMALL_ELEMS)
    found: List[List[Joinable]] = []
    last: Dict[Any, List[Joinable]] = {}
    for one in parameters:
        alike = one.group, one.parameter.dtype, one.parameter.device
        if one.group is None or not 0 < one.parameter.numel() <= small_elems:
            found.append([one])
            continue
        bucket = last.get(alike, [])
        elems = sum(other.parameter.numel() for other in (*bucket, one))
        if not bucket or len(bucket) == MAX_MEMBERS or elems > slice_elems:
            bucket = last[alike] = []
            found.append(bucket)
        bucket.append(one)
    return found
