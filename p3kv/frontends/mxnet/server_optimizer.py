"""MXNet's optimizers on a server, slice by slice."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, Dict, List, Mapping, Optional, Tuple

import mxnet as mx
import numpy as np

from p3kv.errors import ProtocolError
from p3kv.frontends.mxnet.optimizer_settings import from_bytes
from p3kv.server.optimizer import Optimizer, State
from p3kv.wire.messages import DeclaredKey


class _SliceState:
    __slots__ = ("since_step", "state", "updates")

    def __init__(self, state: Any, since_step: int) -> None:
        self.state = state
        self.since_step = since_step
        self.updates = 0


class MXNetOptimizer(Optimizer):
    """Runs MXNet's own update operations on each slice.

    They are the very kernels that training in one process runs, so the numbers are the same.
    Optimizers count updates themselves, once a call; here the count is set for each slice, so
    that it advances once a round however many slices a key has.
    """

    def __init__(self) -> None:
        self._from_steps: List[int] = []
        self._optimizers: List[Tuple[mx.optimizer.Optimizer, int]] = []
        self._states: Dict[Tuple[int, int], _SliceState] = {}
        self._arrays: Dict[int, Tuple[np.ndarray, mx.nd.NDArray]] = {}

    def configure(self, from_step: int, settings: bytes, oldest_step: int) -> None:
        if self._from_steps and from_step < self._from_steps[-1]:
            raise ProtocolError(f"optimizer settings for the past step {from_step}")
        self._optimizers.append(from_bytes(settings))
        self._from_steps.append(from_step)
        unneeded = max(0, bisect_right(self._from_steps, oldest_step) - 1)
        del self._from_steps[:unneeded], self._optimizers[:unneeded]

    def update(
        self, key: DeclaredKey, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        optimizer, since_step = self._at(step)
        weight_array, total_array = self._shared(weight), self._shared(total)
        slice_state = self._states.get((key.key_id, index))
        if slice_state is None or slice_state.since_step != since_step:
            state = optimizer.create_state_multi_precision(key.key, weight_array)
            slice_state = _SliceState(state, since_step)
            self._states[key.key_id, index] = slice_state
        first = optimizer.begin_num_update
        optimizer.num_update = first + step - since_step
        optimizer._index_update_count[key.key] = first + slice_state.updates
        optimizer.update_multi_precision(key.key, weight_array, total_array, slice_state.state)
        weight_array.wait_to_read()
        slice_state.updates += 1

    def export(self, key: DeclaredKey, index: int) -> Optional[State]:
        # They would keep the memory of old slices.
        self._arrays.clear()
        slice_state = self._states.pop((key.key_id, index), None)
        if slice_state is None:
            return None
        elements: Dict[str, np.ndarray] = {}
        structure = _take_apart(slice_state.state, elements)
        since_step, updates = slice_state.since_step, slice_state.updates
        return State(
            elements, {"since_step": since_step, "updates": updates, "structure": structure}
        )

    def load(self, key: DeclaredKey, index: int, state: State) -> None:
        numbers = state.numbers
        slice_state = _SliceState(
            _put_together(numbers["structure"], state.elements), numbers["since_step"]
        )
        slice_state.updates = numbers["updates"]
        self._states[key.key_id, index] = slice_state

    def _at(self, step: int) -> Tuple[mx.optimizer.Optimizer, int]:
        position = bisect_right(self._from_steps, step)
        if position == 0:
            raise ProtocolError(f"no optimizer settings hold for step {step}")
        return self._optimizers[position - 1]

    def _shared(self, array: np.ndarray) -> mx.nd.NDArray:
        """An NDArray in the same memory; servers use the same buffers again and again."""
        address = array.__array_interface__["data"][0]
        shared = self._arrays.get(address)
        if shared is None or shared[0] is not array:
            wrapped = mx.nd.from_numpy(array, zero_copy=True)
            array.flags.writeable = True  # from_numpy makes it read-only, and updates write
            shared = self._arrays[address] = (array, wrapped)
        return shared[1]


def _take_apart(state: Any, elements: Dict[str, np.ndarray]) -> Any:
    """Copies the arrays of MXNet's state of a slice into `elements`; returns its structure.

    MXNet's state is None, an array or a tuple of states. The structure is None, the array's name in
    `elements` or a list of structures.
    """
    if state is None:
        return None
    if isinstance(state, tuple):
        return [_take_apart(part, elements) for part in state]
    name = str(len(elements))
    elements[name] = state.asnumpy()
    return name


def _put_together(structure: Any, elements: Mapping[str, np.ndarray]) -> Any:
    """The state of MXNet's that `_take_apart` has taken apart, with arrays of its own."""
    if structure is None:
        return None
    if isinstance(structure, list):
        return tuple(_put_together(part, elements) for part in structure)
    array = elements[structure]
    return mx.nd.array(array, dtype=array.dtype)


def as_state(state: Any, updates: int, since_step: int) -> State:
    """MXNet's state of a whole key, as the servers' optimizer remembers it; arrays are copied."""
    elements: Dict[str, np.ndarray] = {}
    structure = _take_apart(state, elements)
    flat = {name: array.reshape(-1) for name, array in elements.items()}
    return State(flat, {"since_step": since_step, "updates": updates, "structure": structure})


def as_mxnets(state: State, shape: Tuple[int, ...]) -> Tuple[Any, int]:
    """MXNet's state of a whole key of a shape, and how often it was updated."""
    elements = {name: array.reshape(shape) for name, array in state.elements.items()}
    return _put_together(state.numbers["structure"], elements), int(state.numbers["updates"])
