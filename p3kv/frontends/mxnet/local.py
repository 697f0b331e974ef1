"""A store whose worker trains by itself, and exchanges what it has learned in turn."""

from __future__ import annotations

from contextlib import nullcontext
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import CheckpointError, NotSupportedError
from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, check_sources, classic
from p3kv.frontends.mxnet.checkpoints import Local, copied
from p3kv.frontends.mxnet.operations import Operations
from p3kv.frontends.mxnet.optimizers import saved_states
from p3kv.frontends.mxnet.optimizers.optimizer_settings import KEPT_BY_KEY
from p3kv.frontends.mxnet.optimizers.plain_states import put_together
from p3kv.frontends.mxnet.steps import Pushed, Steps
from p3kv.store.outer import of_inner, set_outer_optimizer
from p3kv.store.pushes import Pushes
from p3kv.store.resuming import Resuming
from p3kv.store.states import take_apart
from p3kv.store.turns import Progress
from p3kv.wire.messages import Key
from p3kv.worker.saving.cuts import Trained, TrainedArray
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class _Weight:
    """A key's weight on this worker, one array for each device, and what the servers have."""

    def __init__(self, weights: Sequence[NDArray], progress: Progress) -> None:
        """The weights are the servers' value."""
        self.progress = progress
        self.hold(weights)
        self.value = self.first.copyto(mx.cpu())
        """The servers' last value, as this worker has it."""
        self.as_sent: Optional[NDArray] = None
        """The weight when its difference left, until it takes the value that comes."""

    def hold(self, weights: Sequence[NDArray]) -> None:
        """Has the weight be in these arrays from now on, of the same memory as those before."""
        self.weights = weights
        self.first = classic(weights[0])
        """The one that is updated; the others are copies."""

    def difference(self) -> NDArray:
        """By how much the servers' last value differs from the weight."""
        return self.value - self.first.as_in_context(mx.cpu())

    def take(self) -> None:
        """Has the weight be the servers' value, with what it has learned since the difference left;
        in this order, so that one that has learned nothing is exactly the value."""
        value = self.value.as_in_context(self.first.context)
        if self.as_sent is None:
            value.copyto(self.first)
        else:
            self.first[:] = (self.first - self.as_sent) + value
            self.as_sent = None

    def multiply_learned(self, by: float) -> None:
        """Multiplies by how much the weight differs from the servers' value."""
        value = self.value.as_in_context(self.first.context)
        self.first[:] = (self.first - value) * by + value

    def spread(self) -> None:
        """Gives the weight to the other devices."""
        for other in self.weights[1:]:
            self.first.copyto(classic(other))


class LocalSteps(Steps):
    """Updates weights by MXNet's own updater, on this worker. All that it does are operations of
    the engine, so calls return at once, and what reads a weight waits for what it needs.

    Belongs to the script's thread.
    """

    def __init__(
        self,
        own: WorkerStore,
        operations: Operations,
        pushes: Pushes[Any],
        resuming: Resuming[Any],
        rank: int,
        optimizer: mx.optimizer.Optimizer,
    ) -> None:
        """Trains by `optimizer`, until another one is set.

        Raises CheckpointError where the job can't go on from its checkpoint, and ConfigError where
        this worker can't write its part of checkpoints.
        """
        super().__init__(operations)
        self._own = own
        self._pushes = pushes
        self._rank = rank
        self._weights: Dict[Key, _Weight] = {}
        rule = own.rule.local
        self._parts = own.rule.num_workers if rule is not None and rule.adds else 1
        """What this worker's optimizer does counts with one of so many parts."""
        self._before: Optional[List[Trained]] = None
        """What `_copied` gives, before `synchronize` after the newest step."""
        self._says_steps = False
        """Whether the script says where steps begin."""
        self.set_optimizer(optimizer)
        self._schedule = set_outer_optimizer(
            own, resuming, lambda: self._inner.name, lambda: self._inner.remembered()
        )
        self._begun = self._schedule.count
        """How many steps have begun."""
        if own.resumed is not None:
            self._inner.go_on(of_inner(own), self._begun)
        own.keep_trained(self._copied)

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        self.updater = mx.optimizer.get_updater(optimizer)
        self._inner = InnerOptimizer(self.updater)

    def one_step(self, fresh: Optional[Collection[Key]]) -> ContextManager[None]:
        self._says_steps = True
        self._begin_step()
        return nullcontext()

    def _begin_step(self) -> None:
        self._begun += 1
        self._before = None
        self._pushes.begin_own_step()

    def trains(self, key: Key) -> bool:
        return key in self._weights

    def given(self, key: WorkerKey, targets: Sequence[NDArray]) -> None:
        """Replace weights that came from the servers by this worker's own from the checkpoint, if
        it has them."""
        saved = self._own.own_trained(key.key)
        if saved is None:
            return
        one = self._weights[key.key] = self._new_weight(key, targets)
        one.progress.takes_at = saved.numbers[TAKES_AT]
        with mx.autograd.pause():
            one.as_sent = self._inner.restore(key, one.first, saved.numbers, saved.arrays)
            one.spread()

    def check_out(self, out: Any) -> None:
        if out is None:
            raise NotSupportedError(
                "each worker trains by itself (P3KV_CONSISTENCY), so a step needs the weight: call "
                "kv.pushpull(key, gradient, out=weight)"
            )

    def pushpull(self, known: Pushed, priority: int) -> None:
        for key, sources, targets in known:
            self._step(key, sources, targets, priority)

    def push(self, known: Sequence[Tuple[WorkerKey, List[NDArray]]], priority: int) -> None:
        raise AssertionError("check_out has refused it")

    def push_no_gradient(
        self, key: WorkerKey, targets: Sequence[List[NDArray]], priority: int
    ) -> Callable[[], bool]:
        self._step(key, [], targets[0], priority)
        return lambda: False

    def _step(
        self, key: WorkerKey, sources: List[NDArray], targets: Sequence[NDArray], priority: int
    ) -> None:
        """Updates a key's weight, which is in `targets`, by the sum of this worker's gradients,
        which are those of its devices; none: it has no gradient. Then exchanges what is due.

        Raises KeyMismatchError for arrays that are not like the key, NotSupportedError for a weight
        that the optimizer keeps in another place, too.
        """
        check_sources(key, targets)
        one = self._weight(key, targets)
        if not self._says_steps and one.progress.count >= self._begun:
            self._begin_step()
        with mx.autograd.pause():
            if sources:
                here = [classic(array).as_in_context(one.first.context) for array in sources]
                total = mx.nd.add_n(*here) if len(here) > 1 else here[0]
                if self._parts == 1:
                    self.updater(key.key, total, one.first)
                else:
                    self._update_in_part(key, total, one)
            self._exchange(key, one, priority)
            one.spread()

    def _update_in_part(self, key: WorkerKey, total: NDArray, one: _Weight) -> None:
        """Updates where changes add up: the weight that there would be if all workers had learned
        the same as this one, by all of this worker's gradient, of which `rescale_grad` is a part.
        So weight decay and Adam's steps count once, and not once for each worker."""
        optimizer = self.updater.optimizer
        rescale = optimizer.rescale_grad
        one.multiply_learned(self._parts)
        optimizer.rescale_grad = rescale * self._parts
        try:
            self.updater(key.key, total, one.first)
        finally:
            optimizer.rescale_grad = rescale
        one.multiply_learned(1 / self._parts)

    def pull(
        self, key: WorkerKey, targets: List[NDArray], priority: int, ignore_sparse: bool
    ) -> None:
        """Raises NotSupportedError for a pull into a weight, which may await another value."""
        one = self._weights.get(key.key)
        if one is not None and any(target is own for target in targets for own in one.weights):
            raise NotSupportedError(
                f"{key.called} is pulled into the weight that this worker trains by itself "
                "(P3KV_CONSISTENCY): call kv.synchronize, which gives all weights the servers' "
                "values, or pull into another array"
            )
        super().pull(key, targets, priority, ignore_sparse)

    def synchronize(self) -> None:
        """Gives all weights the servers' own values."""
        if self._own.may_end_in_cut:  # a job that goes on has not synchronised
            self._before = self._copied()
        if self._rank == 0:
            self._schedule.tell_unsent()
        for key, one in self._weights.items():
            one.progress.settle()
            one.as_sent = None
            self._operations.pull(self._own.key(key), [one.value], 0, exact=True)
            _take(self._own.key(key), one)
            one.spread()

    def exchange(self, barrier: Callable[[str], None]) -> None:
        barrier("to exchange what they have learned")
        self._before = None
        self._pushes.begin_exchange()
        with mx.autograd.pause(), self._schedule.averaging():
            for name, one in self._weights.items():
                key = self._own.key(name)
                if one.progress.awaits:
                    one.progress.settle()
                    _take(key, one)
                self._operations.exchange(key, one.difference(), one.value, 0)
                self._operations.pull(key, [one.value], 0, exact=True)
                one.progress.exchanged()
                _take(key, one)
                one.spread()

    def save(self, fname: str, dump_optimizer: bool) -> None:
        """Writes this worker's states, as MXNet's own stores do."""
        with saved_states.replacing(fname, self._rank) as file:
            file.write(self.updater.get_states(dump_optimizer))

    def load(self, fname: str) -> None:
        """Goes on from states in a file."""
        with open(fname, "rb") as file:
            self.updater.set_states(file.read())

    def _exchange(self, key: WorkerKey, one: _Weight, priority: int) -> None:
        due = one.progress.step()
        if due.takes_before:
            _take(key, one)
        if due.sends:
            difference = one.difference()
            one.as_sent = None if due.takes_now else one.first.copy()
            self._operations.exchange(key, difference, one.value, priority)
            if due.takes_now:
                _take(key, one)

    def _weight(self, key: WorkerKey, targets: Sequence[NDArray]) -> _Weight:
        one = self._weights.get(key.key)
        if one is None:
            if self._own.own_trained(key.key) is not None:
                raise CheckpointError(
                    f"{key.called} had a weight of this worker's own at the checkpoint, and this "
                    "script has not said where it is: call kv.set_optimizer before "
                    "kv.broadcast(key, value, out=weight)"
                )
            one = self._weights[key.key] = self._new_weight(key, targets)
        elif one.weights[0] is not targets[0]:
            if _share_memory(one.weights, targets):  # MXNet's own, after a change of grad_req
                one.hold(targets)
                return one
            raise NotSupportedError(
                f"{key.called} was in another array before, and this worker trains it there "
                "(P3KV_CONSISTENCY): give the same arrays as out= in each step"
            )
        return one

    def _new_weight(self, key: WorkerKey, targets: Sequence[NDArray]) -> _Weight:
        optimizer = self.updater.optimizer
        if getattr(optimizer, "multi_precision", False) and key.numpy_dtype == np.float16:
            raise NotSupportedError(
                f"{key.called} is float16, and the optimizer, with multi_precision, updates a "
                "copy of its own in float32, which no value of the servers would reach: use "
                "float32 weights, or leave multi_precision out"
            )
        key.goes_on = True
        sizes = [(one.key, one.size_bytes) for one in self._own.declared()]
        return _Weight(targets, self._schedule.of(key.key, sizes))

    def _copied(self) -> List[Trained]:
        """Copies for a checkpoint of what this worker has."""
        if self._before is not None:
            return self._before
        with mx.autograd.pause():
            return [
                self._inner.copied(
                    self._own.key(key), one.first, one.as_sent, one.progress.takes_at
                )
                for key, one in self._weights.items()
            ]


def _share_memory(arrays: Sequence[NDArray], others: Sequence[NDArray]) -> bool:
    """Whether arrays are pairwise in the same memory; waits for the operations under way on them,
    which may move it."""
    for array in (*arrays, *others):
        array.wait_to_read()
    return list(map(engine.address, arrays)) == list(map(engine.address, others))


def _take(key: WorkerKey, one: _Weight) -> None:
    """Has the weight take the value of the last push; whatever reads it waits for that."""
    key.value_is_due()
    one.take()


_WEIGHT, _AS_SENT = "weight", "as_sent"
_STATE, _UPDATES, TAKES_AT = "state", "updates", "takes_at"
_REMEMBERED = ("num_update", "m_schedule", "cur_lr", "last_lr")
"""Attributes of MXNet's optimizers that updates change, of all keys together."""


class InnerOptimizer:
    """A worker's own optimizer, with its states. Belongs to the script's thread."""

    def __init__(self, updater: Any) -> None:
        """`updater` is MXNet's."""
        self._updater = updater

    @property
    def _optimizer(self) -> mx.optimizer.Optimizer:
        return self._updater.optimizer

    @property
    def name(self) -> str:
        return type(self._optimizer).__name__

    def remembered(self) -> Dict[str, Any]:
        """What is the same for all keys, as plain values."""
        values = vars(self._optimizer)
        return {name: values[name] for name in _REMEMBERED if name in values}

    def go_on(self, remembered: Mapping[str, Any], steps: int) -> None:
        """Goes on from another training's `remembered`; without any, as after so many steps."""
        if not remembered:
            self._optimizer.num_update = self._optimizer.begin_num_update + steps
        vars(self._optimizer).update(remembered)

    def copied(
        self, key: WorkerKey, first: NDArray, as_sent: Optional[NDArray], takes_at: Optional[int]
    ) -> Trained:
        """Copies a key's weight, its weight when its difference left, if it awaits a value, and its
        state, when all operations of MXNet's engine have ended that were pushed before. Raises
        NotSupportedError for a state that files can't have."""
        arrays = {_WEIGHT: _copied(key, first)}
        if as_sent is not None:
            arrays[_AS_SENT] = _copied(key, as_sent)

        def keep(value: Any) -> Optional[str]:
            if not isinstance(value, NDArray):
                return None
            name = f"{_STATE}{len(arrays)}"
            arrays[name] = _copied(key, value)
            return name

        kept = self._kept.get(key.key)
        numbers = {
            TAKES_AT: takes_at,
            _UPDATES: self._counts(first).get(key.key),
            _STATE: take_apart((self._updater.states.get(key.key), kept), keep),
        }
        return Trained(key.key_id, key.key, numbers, arrays)

    def restore(
        self,
        key: WorkerKey,
        first: NDArray,
        numbers: Mapping[str, Any],
        arrays: Mapping[str, np.ndarray],
    ) -> Optional[NDArray]:
        """Gives a key's weight and state back; returns the weight when its difference left."""
        state, kept = put_together(numbers[_STATE], arrays)
        first[:] = _array(arrays[_WEIGHT])
        if numbers[_UPDATES] is not None:
            self._counts(first)[key.key] = numbers[_UPDATES]
        if state is not None:
            self._updater.states[key.key] = state
            self._updater.states_synced[key.key] = False  # it may be another device's
        if kept is not None:
            self._kept[key.key] = kept
        if _AS_SENT not in arrays:
            return None
        return _array(arrays[_AS_SENT]).as_in_context(first.context)

    @property
    def _kept(self) -> Dict[Any, Any]:
        """Values that the optimizer keeps for each key in itself."""
        kept: Dict[Any, Any] = getattr(self._optimizer, KEPT_BY_KEY.get(self.name, ""), {})
        return kept

    def _counts(self, first: NDArray) -> Dict[Any, int]:
        """How often the optimizer has updated each key on a weight's device."""
        counts: Dict[Any, int] = self._optimizer._all_index_update_counts.setdefault(
            first.context.device_id, {}
        )
        return counts


def _copied(key: WorkerKey, array: NDArray) -> TrainedArray:
    if array.stype != DENSE:
        raise NotSupportedError(
            f"the optimizer's state of {key.called} is {array.stype}, which checkpoints of workers "
            "that train by themselves can't have; use dense arrays, or unset P3KV_CHECKPOINT_DIR"
        )
    copy = copied(Local(key.key, "", [array]))
    return TrainedArray(copy.shape, copy.dtype, copy.value)


def _array(value: np.ndarray) -> NDArray:
    return mx.nd.array(value, dtype=value.dtype)
