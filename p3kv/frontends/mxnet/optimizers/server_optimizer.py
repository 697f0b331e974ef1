"""MXNet's optimizers on a server: slice by slice, or on whole tensors."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import ProtocolError, in_one_line
from p3kv.frontends.mxnet.optimizers.optimizer_settings import (
    KEPT_BY_KEY,
    SHARED_NUMBERS,
    PlainOptimizer,
    SharedNumber,
    built,
    check_unchanged,
    is_mxnets,
    needs_sparse_weight,
    needs_whole_tensors,
    read,
    updates_rows,
)
from p3kv.frontends.mxnet.optimizers.plain_states import put_together, take_apart
from p3kv.frontends.mxnet.optimizers.predictions import predicted
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.messages import DeclaredKey, Key

_PLACES_OF_MASTER = {
    mx.optimizer.Optimizer.create_state_multi_precision: 0,
    mx.optimizer.SGD.create_state_multi_precision: 1,
    mx.optimizer.LARS.create_state_multi_precision: 1,
    mx.optimizer.NAG.create_state_multi_precision: 1,
}
"""By the method that makes the state, also where users' classes inherit it."""


class _Built:
    """An optimizer as it is from a step on."""

    def __init__(self, settings: PlainOptimizer) -> None:
        self.optimizer = built(settings)
        self.since_step = settings.since_step
        self.counts_from = settings.counts_from
        self.seed = settings.seed
        self.counts = dict(settings.counts)
        self.first_update = max(settings.first_update, self.optimizer.begin_num_update)
        kind = self.kind = type(self.optimizer)
        mxnets = is_mxnets(kind)
        self.needs_whole = needs_whole_tensors(kind)
        self.incomplete = mxnets and settings.name in SHARED_NUMBERS
        """Whether updates need more than the settings have."""
        self.kept_by_key = KEPT_BY_KEY.get(settings.name) if mxnets else None
        self.unchanging = None if mxnets else settings.attributes
        """Attributes that updates of a user's class must not change."""
        self.place_of_master = _place_of_master(self.optimizer)

    def first_of(self, key: Key) -> int:
        """The count of a key's updates before the first one here."""
        return self.counts.get(key, int(self.optimizer.begin_num_update))


class _StateOfSlice:
    """MXNet's state of a slice or of a whole tensor."""

    __slots__ = ("kept", "since_step", "state", "updates")

    def __init__(self, state: Any, since_step: int) -> None:
        self.state = state
        self.kept: Any = None
        """Values that the optimizer has kept for the key in itself."""
        self.since_step = since_step
        self.updates = 0


class MXNetOptimizer(Optimizer):
    """Runs MXNet's own update operations on each slice, or on whole tensors.

    They are the very kernels that training in one process runs, so the numbers are the same.
    Optimizers count updates themselves, once a call; here the count is set for each slice, so
    that it advances once a round however many slices a key has.
    """

    def __init__(self) -> None:
        self._from_steps: List[int] = []
        self._optimizers: List[_Built] = []
        self._states: Dict[Tuple[int, int], _StateOfSlice] = {}
        self._shared_numbers: Dict[Tuple[int, Key, int], Tuple[int, SharedNumber]] = {}
        """By `since_step`, key and count of its updates: from which step, and the number."""
        self._arrays: Dict[int, Tuple[np.ndarray, mx.nd.NDArray]] = {}
        self._weights: Dict[int, Tuple[np.ndarray, NDArray]] = {}
        """By key of rows, the rows that are kept, and the same as an NDArray."""

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        if self._from_steps and from_step < self._from_steps[-1]:
            raise ProtocolError(f"optimizer settings for the past step {from_step}")
        message = read(settings)
        if isinstance(message, SharedNumber):
            identity = message.since_step, message.key, message.update
            self._shared_numbers[identity] = (from_step, message)
        else:
            self._optimizers.append(_Built(message))
            self._from_steps.append(from_step)
        self._forget(oldest_step)
        self.whole_tensors = any(one.needs_whole for one in self._optimizers)
        self.needs_rank_0 = any(one.incomplete for one in self._optimizers)

    def needs_whole(self, step: Optional[int]) -> bool:
        return self._at(step).needs_whole

    def update(
        self,
        key: DeclaredKey,
        index: int,
        weight: np.ndarray,
        total: np.ndarray,
        step: Optional[int],
    ) -> None:
        now = self._at(step)
        place = now.place_of_master if weight.dtype == np.float16 else None
        if index == WHOLE:
            arrays = [_of_shape(array, key.shape) for array in (weight, total)]
        else:
            arrays = [self._shared(weight), self._shared(total)]
        if place is None and total.dtype != weight.dtype:
            # In one process such an optimizer gets gradients in float16.
            arrays[1] = arrays[1].astype(np.float16)
        self._update(now, key, index, arrays, step, place)

    def predicted(
        self, key: DeclaredKey, index: int, weight: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        state = self._states.get((key.key_id, index))
        if state is None or not self._optimizers:
            return None
        now = self._optimizers[-1]
        place = now.place_of_master if weight.dtype == np.float16 else None
        count = now.first_of(key.key) + state.updates
        if place is None:
            return predicted(now.optimizer, key.key, weight, state.state, count, steps, damped)
        master = state.state[place].asnumpy()
        of_master = state.state[1 - place]
        return predicted(now.optimizer, key.key, master, of_master, count, steps, damped)

    def updates_touched_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        now = self._at(step)
        sparse_weight = key.layout == "sparse_rows"
        alone = now.seed is None and not (sparse_weight and needs_sparse_weight(now.optimizer))
        return alone and not self.changes_all_rows(key, step)

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return not updates_rows(self._at(step).optimizer, key.layout == "sparse_rows")

    def update_rows(
        self,
        key: DeclaredKey,
        weight: np.ndarray,
        numbers: np.ndarray,
        rows: np.ndarray,
        step: Optional[int],
        ends_update: bool = True,
    ) -> None:
        now = self._at(step)
        shape = (len(weight), *key.shape[1:])
        sparse_weight = key.layout == "sparse_rows"
        # Kernels of these optimizers do the same to a sparse weight that has all its rows.
        sparse = sparse_weight and needs_sparse_weight(now.optimizer)
        if sparse:
            array = row_sparse(np.arange(len(weight)), weight, shape)
        else:
            array = self._weight_of(key, weight, shape)
        place = now.place_of_master if weight.dtype == np.float16 else None
        total = row_sparse(numbers, rows, shape)
        if place is None and rows.dtype != weight.dtype:
            total = total.astype(weight.dtype)
        state = self._update(now, key, WHOLE, [array, total], step, place)
        if not ends_update:
            state.updates -= 1
        if sparse:
            weight[:] = array.asnumpy().reshape(weight.shape)

    def _update(
        self,
        now: _Built,
        key: DeclaredKey,
        index: int,
        arrays: Sequence[NDArray],
        step: Optional[int],
        place: Optional[int] = None,
    ) -> _StateOfSlice:
        """Updates the first of `arrays`, a weight, with the second, its gradient.

        `place`: where the state has the weight's float32 copy, if the gradient is float32.
        """
        optimizer, name = now.optimizer, key.key
        state = self._states.get((key.key_id, index))
        if state is None or state.since_step != now.since_step:
            created = optimizer.create_state_multi_precision(name, arrays[0])
            state = self._states[key.key_id, index] = _StateOfSlice(created, now.since_step)
        if step is not None:
            optimizer.num_update = now.first_update + step - now.counts_from
        optimizer._index_update_count[name] = now.first_of(name) + state.updates
        state.updates += 1
        if now.seed is not None:
            # By no process's own numbers: servers would all draw the same ones.
            mx.random.seed(_mixed(now.seed, name, index, state.updates))
        if now.incomplete:
            with self._completed(now, name, state):
                _update(optimizer, name, arrays, state.state, place)
        else:
            _update(optimizer, name, arrays, state.state, place)
        arrays[0].wait_to_read()
        if now.unchanging is not None:
            check_unchanged(optimizer, now.unchanging)
        return state

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        # They would keep the memory of old slices.
        self._arrays.clear()
        copied = self.copied(key, index)
        self._states.pop((key.key_id, index), None)
        self._weights.pop(key.key_id, None)
        return copied

    def copied(self, key: DeclaredKey, index: int) -> Optional[State]:
        state = self._states.get((key.key_id, index))
        if state is None:
            return None
        elements: Dict[str, np.ndarray] = {}
        numbers = {
            "since_step": state.since_step,
            "updates": state.updates,
            "structure": take_apart(state.state, elements),
            "kept": take_apart(state.kept, elements),
        }
        return State(elements, numbers)

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        numbers = state.numbers
        try:
            structure, kept = (
                put_together(numbers[name], state.elements) for name in ("structure", "kept")
            )
            loaded = _StateOfSlice(structure, int(numbers["since_step"]))
            loaded.updates = int(numbers["updates"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(
                f"it sent a state that no optimizer can have: {in_one_line(error)}"
            ) from error
        loaded.kept = kept
        self._states[key.key_id, index] = loaded

    def _forget(self, oldest_step: int) -> None:
        unneeded = max(0, bisect_right(self._from_steps, oldest_step) - 1)
        del self._from_steps[:unneeded], self._optimizers[:unneeded]
        while self._shared_numbers:
            identity, (step, _) = next(iter(self._shared_numbers.items()))
            if step >= oldest_step:
                break
            del self._shared_numbers[identity]

    def _at(self, step: Optional[int]) -> _Built:
        """The optimizer as it is in a step; None: by the newest settings."""
        position = len(self._from_steps) if step is None else bisect_right(self._from_steps, step)
        if position == 0:
            raise ProtocolError(f"no optimizer settings hold for step {step}")
        return self._optimizers[position - 1]

    @contextmanager
    def _completed(self, now: _Built, key: Key, state: _StateOfSlice) -> Iterator[None]:
        """Gives the optimizer what an update of this key finds in it in one process.

        That is what it has kept for the key, since it is built anew whenever settings change; and
        the number that worker rank 0 has sent for this update.
        """
        values = vars(now.optimizer)
        found = self._shared_numbers.get((now.since_step, key, state.updates))
        if found is not None:
            _, number = found
            before = values[number.attribute]
            values[number.attribute] = number.value
        elif now.kind is mx.optimizer.Nadam:
            raise ProtocolError(f"it sent no schedule for update {state.updates} of key {key!r}")
        if now.kept_by_key is not None and state.kept is not None:
            values[now.kept_by_key][key] = state.kept
        yield
        if now.kept_by_key is not None:
            state.kept = values[now.kept_by_key].pop(key, None)
        if found is not None:
            values[number.attribute] = before

    def _weight_of(self, key: DeclaredKey, weight: np.ndarray, shape: Tuple[int, ...]) -> NDArray:
        """An NDArray in the memory of all rows that a server keeps of a key."""
        shared = self._weights.get(key.key_id)
        if shared is None or shared[0] is not weight:
            shared = self._weights[key.key_id] = (weight, _of_shape(weight, shape))
        return shared[1]

    def _shared(self, array: np.ndarray) -> mx.nd.NDArray:
        """An NDArray in the same memory; servers use the same buffers again and again."""
        address = array.__array_interface__["data"][0]
        shared = self._arrays.get(address)
        if shared is None or shared[0] is not array:
            wrapped = mx.nd.from_numpy(array, zero_copy=True)
            array.flags.writeable = True  # from_numpy makes it read-only, and updates write
            shared = self._arrays[address] = (array, wrapped)
        return shared[1]


def _of_shape(array: np.ndarray, shape: Tuple[int, ...]) -> mx.nd.NDArray:
    """An NDArray in the memory of a flat array."""
    return mx.nd.from_numpy(array.reshape(shape or (1,)), zero_copy=True)


def _place_of_master(optimizer: mx.optimizer.Optimizer) -> Optional[int]:
    """Where the float32 copy of a float16 weight is in the optimizer's state, a pair of this copy
    and the copy's own state; None where the optimizer has none, or keeps it in a way of its own."""
    if not optimizer.multi_precision:
        return None
    return _PLACES_OF_MASTER.get(type(optimizer).create_state_multi_precision)


def row_sparse(numbers: np.ndarray, rows: np.ndarray, shape: Tuple[int, ...]) -> NDArray:
    """A row_sparse array with a copy of these rows; it has no others."""
    if not len(numbers):
        return mx.nd.sparse.zeros("row_sparse", shape, dtype=rows.dtype)
    elements = mx.nd.from_numpy(rows.reshape(-1, *shape[1:]), zero_copy=True)
    array = mx.nd.sparse.row_sparse_array(
        (elements, numbers.astype(np.int64)), shape, dtype=rows.dtype
    )
    rows.flags.writeable = True  # from_numpy makes it read-only
    return array


def _update(
    optimizer: mx.optimizer.Optimizer,
    key: Key,
    arrays: Sequence[mx.nd.NDArray],
    state: Any,
    place_of_master: Optional[int] = None,
) -> None:
    """Updates as MXNet's Updater does: LAMB, for example, has other kernels for lists of
    tensors.

    Where the state has a float32 copy of the weight, this copy is updated by the float32 total, and
    the weight is cast from it, as on MXNet's own servers.
    """
    weight, total = arrays
    if place_of_master is not None:
        master = state[place_of_master]
        _update(optimizer, key, (master, total), state[1 - place_of_master])
        master.copyto(weight)
        return
    if optimizer.aggregate_num > 0:
        optimizer.update_multi_precision((key,), (weight,), (total,), [state])
    else:
        optimizer.update_multi_precision(key, weight, total, state)


def _mixed(seed: int, key: Key, index: int, update: int) -> int:
    """A seed of its own for each update, the same in every process."""
    return zlib.crc32(f"{seed} {key!r} {index} {update}".encode()) & 0x7FFFFFFF
