"""MXNet's optimizers on a server: slice by slice, or on whole tensors."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from p3kv.errors import NotSupportedError, ProtocolError
from p3kv.frontends.mxnet.optimizer_settings import (
    KEPT_BY_KEY,
    SHARED_NUMBERS,
    PlainOptimizer,
    SharedNumber,
    built,
    check_unchanged,
    is_mxnets,
    needs_whole_tensors,
    read,
)
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.messages import DeclaredKey, Key


class _Built:
    """An optimizer as it is from a step on."""

    def __init__(self, settings: PlainOptimizer) -> None:
        self.optimizer = built(settings)
        self.since_step = settings.since_step
        self.seed = settings.seed
        kind = self.kind = type(self.optimizer)
        mxnets = is_mxnets(kind)
        self.needs_whole = needs_whole_tensors(kind)
        self.incomplete = mxnets and settings.name in SHARED_NUMBERS
        """Whether updates need more than the settings have."""
        self.kept_by_key = KEPT_BY_KEY.get(settings.name) if mxnets else None
        self.unchanging = None if mxnets else settings.attributes
        """Attributes that updates of a user's class must not change."""


class _StateOfSlice:
    """MXNet's state of a slice or of a whole tensor."""

    __slots__ = ("kept", "since_step", "state", "updates")

    def __init__(self, state: Any, since_step: int) -> None:
        self.state = state
        self.kept: Any = None
        """What the optimizer has kept for the key in itself."""
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
        optimizer, name = now.optimizer, key.key
        if index == WHOLE:
            arrays = [_of_shape(array, key.shape) for array in (weight, total)]
        else:
            arrays = [self._shared(weight), self._shared(total)]
        state = self._states.get((key.key_id, index))
        if state is None or state.since_step != now.since_step:
            created = optimizer.create_state_multi_precision(name, arrays[0])
            state = self._states[key.key_id, index] = _StateOfSlice(created, now.since_step)
        first = optimizer.begin_num_update
        if step is not None:
            optimizer.num_update = first + step - now.since_step
        optimizer._index_update_count[name] = first + state.updates
        state.updates += 1
        if now.seed is not None:
            # By no process's own numbers: servers would all draw the same ones.
            mx.random.seed(_mixed(now.seed, name, index, state.updates))
        if now.incomplete:
            with self._completed(now, name, state):
                _update(optimizer, name, arrays, state.state)
        else:
            _update(optimizer, name, arrays, state.state)
        arrays[0].wait_to_read()
        if now.unchanging is not None:
            check_unchanged(optimizer, now.unchanging)

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        # They would keep the memory of old slices.
        self._arrays.clear()
        state = self._states.pop((key.key_id, index), None)
        if state is None:
            return None
        elements: Dict[str, np.ndarray] = {}
        numbers = {
            "since_step": state.since_step,
            "updates": state.updates,
            "structure": _take_apart(state.state, elements),
            "kept": _take_apart(state.kept, elements),
        }
        return State(elements, numbers)

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        numbers = state.numbers
        structure, kept = (
            _put_together(numbers[name], state.elements) for name in ("structure", "kept")
        )
        loaded = self._states[key.key_id, index] = _StateOfSlice(structure, numbers["since_step"])
        loaded.kept = kept
        loaded.updates = numbers["updates"]

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


def _update(
    optimizer: mx.optimizer.Optimizer, key: Key, arrays: Sequence[mx.nd.NDArray], state: Any
) -> None:
    """Updates as MXNet's Updater does: LAMB, for example, has other kernels for lists of
    tensors."""
    weight, total = arrays
    if optimizer.aggregate_num > 0:
        optimizer.update_multi_precision((key,), (weight,), (total,), [state])
    else:
        optimizer.update_multi_precision(key, weight, total, state)


def _mixed(seed: int, key: Key, index: int, update: int) -> int:
    """A seed of its own for each update, the same in every process."""
    return zlib.crc32(f"{seed} {key!r} {index} {update}".encode()) & 0x7FFFFFFF


def _take_apart(state: Any, elements: Dict[str, np.ndarray]) -> Any:
    """Copies the arrays of MXNet's state into `elements`; returns its structure.

    MXNet's state is None, an array or a tuple of states; those of users' classes and LBSGD's may be
    lists, dicts and numbers, too. The structure is None, the array's name in `elements`, a list of
    structures for a tuple, or a dict that says what is in it.
    """
    if state is None:
        return None
    if isinstance(state, tuple):
        return [_take_apart(part, elements) for part in state]
    if isinstance(state, mx.nd.NDArray):
        name = str(len(elements))
        elements[name] = state.asnumpy()
        return name
    if isinstance(state, list):
        return {"list": [_take_apart(part, elements) for part in state]}
    if isinstance(state, dict):
        return {"dict": [[name, _take_apart(part, elements)] for name, part in state.items()]}
    if isinstance(state, (bool, int, float, str)):
        return {"value": state}
    raise NotSupportedError(
        f"an optimizer's state has a {type(state).__name__}; it may have MXNet's dense arrays, "
        "numbers, strs, tuples, lists and dicts"
    )


def _put_together(structure: Any, elements: Mapping[str, np.ndarray]) -> Any:
    """The state of MXNet's that `_take_apart` has taken apart, with arrays of its own."""
    if structure is None:
        return None
    if isinstance(structure, list):
        return tuple(_put_together(part, elements) for part in structure)
    if isinstance(structure, str):
        array = elements[structure]
        return mx.nd.array(array, dtype=array.dtype)
    if "list" in structure:
        return [_put_together(part, elements) for part in structure["list"]]
    if "dict" in structure:
        return {name: _put_together(part, elements) for name, part in structure["dict"]}
    return structure["value"]


def as_state(state: Any, updates: int, since_step: int) -> State:
    """MXNet's state of a whole key, as the servers' optimizer remembers it; arrays are copied."""
    elements: Dict[str, np.ndarray] = {}
    structure = _take_apart(state, elements)
    flat = {name: array.reshape(-1) for name, array in elements.items()}
    numbers = {"since_step": since_step, "updates": updates, "structure": structure, "kept": None}
    return State(flat, numbers)


def as_mxnets(state: State, shape: Tuple[int, ...]) -> Tuple[Any, int]:
    """MXNet's state of a whole key of a shape, and how often it was updated."""
    elements = {name: array.reshape(shape) for name, array in state.elements.items()}
    return _put_together(state.numbers["structure"], elements), int(state.numbers["updates"])
