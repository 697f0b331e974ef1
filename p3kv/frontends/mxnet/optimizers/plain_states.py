"""MXNet's optimizer states as plain data, as servers keep, send and cut them."""

from __future__ import annotations

from typing import Any, Dict, Mapping, NamedTuple, Tuple

import mxnet as mx
import numpy as np

from p3kv.frontends.mxnet.arrays import ROW_SPARSE
from p3kv.server.optimizer import State
from p3kv.store import states


class OfKey(NamedTuple):
    """Optimizer's memory of a whole key."""

    state: Any
    """MXNet's, as `create_state` returns it."""
    updates: int
    """How often it has updated the key."""
    kept: Any = None
    """Values that it keeps for the key in itself: LBSGD's gradients of several steps."""


def take_apart(state: Any, elements: Dict[str, np.ndarray]) -> Any:
    """Copies the arrays of MXNet's state into `elements`; returns its structure.

    MXNet's state is None, an array or a tuple of states; those of users' classes and LBSGD's may be
    lists, dicts and numbers, too. In the structure an array is its name in `elements`. A row_sparse
    array is copied with all its rows.
    """

    def keep(array: Any) -> Any:
        if not isinstance(array, mx.nd.NDArray):
            return None
        name = str(len(elements))
        elements[name] = array.asnumpy()
        return {"row_sparse": name} if array.stype == ROW_SPARSE else name

    return states.take_apart(state, keep)


def put_together(structure: Any, elements: Mapping[str, np.ndarray]) -> Any:
    """The state of MXNet's that `take_apart` has taken apart, with arrays of its own."""

    def array(kept: Any) -> mx.nd.NDArray:
        if isinstance(kept, dict):
            return with_all_rows(elements[kept["row_sparse"]])
        return mx.nd.array(elements[kept], dtype=elements[kept].dtype)

    return states.put_together(structure, array)


def with_all_rows(elements: np.ndarray) -> mx.nd.NDArray:
    """A row_sparse array that has all rows, with a copy of these elements."""
    numbers = np.arange(len(elements))
    return mx.nd.sparse.row_sparse_array((elements, numbers), elements.shape, dtype=elements.dtype)


def as_state(of_key: OfKey, since_step: int, whole: bool) -> State:
    """Servers' `State` of a key; arrays are copied. `whole`: the optimizer needs whole tensors. The
    state is not cut then."""
    elements: Dict[str, np.ndarray] = {}
    numbers = {
        "since_step": since_step,
        "updates": of_key.updates,
        "structure": take_apart(of_key.state, elements),
        "kept": take_apart(of_key.kept, elements),
    }
    if not whole:
        elements = {name: array.reshape(-1) for name, array in elements.items()}
    return State(elements, numbers)


def as_mxnets(state: State, shape: Tuple[int, ...], whole: bool) -> OfKey:
    """Optimizer's memory of a key of a shape, as MXNet has it."""
    elements = state.elements
    if not whole:
        elements = {name: array.reshape(shape) for name, array in elements.items()}
    numbers = state.numbers
    structure, kept = (put_together(numbers[name], elements) for name in ("structure", "kept"))
    return OfKey(structure, int(numbers["updates"]), kept)
