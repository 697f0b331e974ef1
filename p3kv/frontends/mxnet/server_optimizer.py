"""MXNet's optimizers on a server, slice by slice."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import mxnet as mx
import numpy as np

from p3kv.errors import ProtocolError
from p3kv.frontends.mxnet.optimizer_settings import from_bytes
from p3kv.server.optimizer import Optimizer
from p3kv.wire.messages import KeyLayout


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
        self, layout: KeyLayout, index: int, weight: np.ndarray, total: np.ndarray, step: int
    ) -> None:
        optimizer, since_step = self._at(step)
        weight_array, total_array = self._shared(weight), self._shared(total)
        slice_state = self._states.get((layout.key_id, index))
        if slice_state is None or slice_state.since_step != since_step:
            state = optimizer.create_state_multi_precision(layout.key, weight_array)
            slice_state = _SliceState(state, since_step)
            self._states[layout.key_id, index] = slice_state
        first = optimizer.begin_num_update
        optimizer.num_update = first + step - since_step
        optimizer._index_update_count[layout.key] = first + slice_state.updates
        optimizer.update_multi_precision(layout.key, weight_array, total_array, slice_state.state)
        weight_array.wait_to_read()
        slice_state.updates += 1

    def regroup(
        self, layout: KeyLayout, before: Mapping[int, int], after: Mapping[int, int]
    ) -> None:
        # They would keep the memory of old slices.
        self._arrays.clear()
        old = [self._states.pop((layout.key_id, index), None) for index in before]
        known = [state for state in old if state is not None]
        if known:
            states = _cut_anew([state.state for state in known], list(after.values()))
            for index, state in zip(after, states):
                anew = _SliceState(state, known[0].since_step)
                anew.updates = known[0].updates
                self._states[layout.key_id, index] = anew

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


def _cut_anew(states: Sequence[Any], lengths: Sequence[int]) -> List[Any]:
    """Joins the states of slices, each an array, several or none, and cuts them to `lengths`."""
    if states[0] is None:
        return [None] * len(lengths)
    if isinstance(states[0], (list, tuple)):
        parts = [_cut_anew(part, lengths) for part in zip(*states)]
        return [type(states[0])(part) for part in zip(*parts)]
    joined = np.concatenate([state.asnumpy() for state in states])
    pieces = np.split(joined, list(accumulate(lengths))[:-1])
    return [mx.nd.array(piece, dtype=piece.dtype) for piece in pieces]
