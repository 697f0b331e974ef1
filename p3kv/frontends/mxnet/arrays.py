"""The arrays that MXNet's users pass: one or several, on the CPU or on devices, dense or not."""

from __future__ import annotations

import logging
import operator
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.refusals import KeyMismatchError
from p3kv.wire.messages import DTYPES, Key
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger("p3kv")

_CPU_KINDS = ("cpu", "cpu_pinned", "cpu_shared")

Arrays = Union[NDArray, Sequence[NDArray]]
"""Argument for a key: an array, or one for each device."""


def by_key(keys: Any, *arrays: Any) -> List[Tuple[Any, ...]]:
    """Each key once, with a list of its arrays for each of `arrays`.

    One key may be given with its arrays, or a list of keys with a list of theirs. As in MXNet, the
    arrays of a key that stands in the list several times count as arrays of several devices.
    Raises ValueError where the lists have different lengths or a key has no array.
    """
    if not isinstance(keys, (list, tuple)):
        return [(keys, *map(listed, arrays))]
    grouped: Dict[Key, Tuple[List[NDArray], ...]] = {}
    for one in arrays:
        if len(one) != len(keys):
            raise ValueError(f"{len(keys)} keys are given with {len(one)} values")
    for key, *values in zip(keys, *arrays):
        lists = grouped.setdefault(key, tuple([] for _ in values))
        for already, value in zip(lists, values):
            already += listed(value)
    return [(key, *lists) for key, lists in grouped.items()]


def check_distinct(keys: Any) -> None:
    """Raises KeyMismatchError where a key stands in a list twice."""
    if isinstance(keys, (list, tuple)) and len(set(keys)) < len(keys):
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise KeyMismatchError(f"key {twice!r} is to be initialised twice in one call")


def listed(arrays: Arrays) -> List[NDArray]:
    """The arrays of one key as a list; ValueError where there are none."""
    if isinstance(arrays, NDArray):
        return [arrays]
    several = list(arrays)
    if not several:
        raise ValueError("a key is given with an empty list of arrays")
    return several


def spread(value: NDArray, targets: Sequence[NDArray]) -> None:
    """Copies a value to all targets but itself; casts it where a target has another dtype."""
    for target in targets:
        if target is not value:
            # A forward pass that is recorded may be what needs the values.
            with mx.autograd.pause():
                classic(value).copyto(classic(target))


DENSE, ROW_SPARSE = "default", "row_sparse"
"""MXNet's names for how arrays are stored."""


def check_key(key: Any) -> None:
    """Raises KeyMismatchError for what can be no key."""
    if not isinstance(key, (int, str)):
        raise KeyMismatchError(f"key {key!r} is a {type(key).__name__}; use an int or a str")


def check_kind(called: str, array: NDArray, stypes: Sequence[str] = (DENSE,)) -> None:
    """Raises TypeError or NotSupportedError for what a store can't hold, or for an array that is
    not stored in one of these ways. `called`: the key, in messages."""
    if not isinstance(array, NDArray):
        raise TypeError(f"{called}: expected an NDArray, got {type(array).__name__}")
    if array.stype not in stypes:
        raise NotSupportedError(f"{called} is given {_STORED[array.stype]}, {_INSTEAD[stypes[0]]}")
    dtype = dtype_name(array)
    if dtype not in SUMMED:
        raise NotSupportedError(
            f"{called} has dtype {dtype}, which can't be summed; use {', '.join(SUMMED)}"
        )


SUMMED = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
"""The dtypes of a store's keys. MXNet's optimizers compute nothing in bfloat16."""
_STORED = {
    DENSE: "a dense array",
    ROW_SPARSE: "a sparse array (row_sparse)",
    "csr": "a sparse array (csr)",
}
_INSTEAD = {
    DENSE: "where a dense one is due. If gradients are to be row_sparse, the store must know it "
    "when the key is initialised: call weight.attach_grad(stype='row_sparse') before, or "
    "initialise the key with a row_sparse value",
    ROW_SPARSE: "and its weight or gradient was row_sparse when it was initialised; give "
    "row_sparse gradients, and row_sparse arrays to row_sparse_pull",
}


def dtype_name(array: NDArray) -> str:
    """Users' name for an array's dtype. Numpy has no bfloat16; MXNet makes a record type of it."""
    dtype = np.dtype(array.dtype)
    return dtype.names[0] if dtype.names else dtype.name


def check_fit(
    called: str,
    shape: Tuple[int, ...],
    dtype: Optional[str],
    arrays: Sequence[NDArray],
    stype: str = DENSE,
) -> None:
    """Raises KeyMismatchError where one of `arrays` has another shape or dtype than the key. A
    dtype of None allows every dtype, for arrays into which values are cast."""
    for array in arrays:
        check_kind(called, array, (stype,))
        its_shape, its_dtype = tuple(array.shape), dtype_name(array)
        if its_shape != shape or its_dtype != (dtype or its_dtype):
            of_dtype = f" and dtype {dtype}" if dtype else ""
            raise KeyMismatchError(
                f"{called} is initialised with shape {shape}{of_dtype}; this worker gives an "
                f"array of shape {its_shape} and dtype {its_dtype}"
            )


def check_sources(key: WorkerKey, arrays: Sequence[NDArray]) -> None:
    """Raises KeyMismatchError where one of `arrays` is not what the key was declared with."""
    stype = ROW_SPARSE if key.touched_only else DENSE
    check_fit(key.called, key.shape, key.dtype, arrays, stype)


def check_targets(key: WorkerKey, arrays: Sequence[NDArray]) -> None:
    """Raises KeyMismatchError where one of `arrays` can't take the key's value, cast if need be."""
    check_fit(key.called, key.shape, None, arrays)


def dense(arrays: Sequence[NDArray]) -> Sequence[NDArray]:
    """`arrays` without sparse ones."""
    return [array for array in arrays if getattr(array, "stype", "default") == "default"]


class Staging:
    """The arrays in CPU memory out of which values are sent and into which they are received.

    A single array in CPU memory is used as it is. For several arrays, or one on another device, an
    array of this object's stands in. Every array whose memory is read or written raw comes from
    here, and here its shape, dtype and device are checked.
    """

    def __init__(self) -> None:
        self._stand_ins: Dict[Key, NDArray] = {}
        self._sources: Dict[Key, _Checked] = {}
        self._targets: Dict[Key, _Checked] = {}
        """The arrays that were checked last. The same arrays come again in every step, and asking
        MXNet for their properties is slow."""

    def source(self, key: WorkerKey, arrays: Sequence[NDArray]) -> NDArray:
        """One array in CPU memory with the sum of `arrays`, one for each device. Raises
        KeyMismatchError for an array that is not what the key was declared with."""
        checked = _checked(self._sources, key, arrays, check_sources)
        if len(arrays) == 1 and checked.on_cpu is not None:
            return checked.on_cpu
        stand_in = self._stand_in(key, arrays[0])
        local = [classic(array).as_in_context(stand_in.context) for array in arrays]
        if len(local) == 1:
            local[0].copyto(stand_in)
        else:
            mx.nd.add_n(*local, out=stand_in)
        return stand_in

    def target(self, key: WorkerKey, arrays: Sequence[NDArray]) -> NDArray:
        """The first of `arrays` that is in CPU memory and has the key's dtype, or another such
        array; `spread` does the rest.

        Raises KeyMismatchError for an array of another shape than the key was declared with.
        """
        on_cpu = _checked(self._targets, key, arrays, check_targets).on_cpu
        return self._stand_in(key, arrays[0]) if on_cpu is None else on_cpu

    def dense_targets(self, key: WorkerKey, arrays: Sequence[NDArray]) -> Sequence[NDArray]:
        """`arrays` without sparse ones: as in MXNet, a pull leaves these as they are and warns. Not
        of a row_sparse weight, of which Module pulls no row with every update."""
        last = self._targets.get(key.key)
        if last is not None and _same(last.arrays, arrays):
            return arrays
        kept = dense(arrays)
        if len(kept) < len(arrays) and key.declared.layout != "sparse_rows":
            _log.warning("pull leaves sparse arrays as they are (ignore_sparse): %s", key.called)
        return kept

    def _stand_in(self, key: WorkerKey, like: NDArray) -> NDArray:
        stand_in = self._stand_ins.get(key.key)
        if stand_in is None:
            context = mx.cpu() if is_on_cpu(like) else mx.cpu_pinned(like.context.device_id)
            stand_in = mx.nd.empty(key.shape, context, key.dtype)
            self._stand_ins[key.key] = stand_in
        return stand_in


class _Checked(NamedTuple):
    arrays: Tuple[NDArray, ...]
    on_cpu: Optional[NDArray]
    """The first of them that is in CPU memory and has the key's dtype."""


def _checked(
    known: Dict[Key, _Checked],
    key: WorkerKey,
    arrays: Sequence[NDArray],
    check: Callable[[WorkerKey, Sequence[NDArray]], None],
) -> _Checked:
    last = known.get(key.key)
    if last is not None and _same(last.arrays, arrays):
        return last
    check(key, arrays)
    fit = (array for array in arrays if is_on_cpu(array) and dtype_name(array) == key.dtype)
    on_cpu = next(fit, None)
    checked = known[key.key] = _Checked(tuple(arrays), on_cpu)
    return checked


def _same(one: Sequence[NDArray], other: Sequence[NDArray]) -> bool:
    if len(one) == 1 == len(other):  # nearly always
        return one[0] is other[0]
    return len(one) == len(other) and all(map(operator.is_, one, other))


def is_on_cpu(array: NDArray) -> bool:
    """Whether an array is in CPU memory."""
    return array.context.device_type in _CPU_KINDS


def classic(array: NDArray) -> NDArray:
    """The same array as an `mx.nd` one: operators of `mx.nd` take no `mx.np` arrays."""
    return array if type(array) is NDArray else array.as_nd_ndarray()
