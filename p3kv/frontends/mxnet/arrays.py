"""The arrays that MXNet's users give: one or many, on the CPU or on devices, dense or not."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Sequence, Tuple, Union

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.errors import KeyMismatchError, NotSupportedError
from p3kv.wire.messages import Key
from p3kv.worker.transfers import WorkerKey

_CPU_KINDS = ("cpu", "cpu_pinned", "cpu_shared")
_DTYPES = ("float32", "float64")


def pairs(keys: Any, *values: Any) -> Iterator[Tuple[Any, ...]]:
    """Each key with its values, whether one key is given or a list of keys."""
    if not isinstance(keys, (list, tuple)):
        yield (keys, *values)
        return
    for value in values:
        if len(value) != len(keys):
            raise ValueError(f"{len(keys)} keys are given with {len(value)} values")
    yield from zip(keys, *values)


def listed(arrays: Union[NDArray, Sequence[NDArray]]) -> List[NDArray]:
    """The arrays, also where only one is given."""
    return [arrays] if isinstance(arrays, NDArray) else list(arrays)


def spread(value: NDArray, targets: List[NDArray]) -> None:
    """Copies a value to all targets but itself."""
    for target in targets:
        if target is not value:
            value.copyto(target)


def check_kind(key: Key, array: NDArray) -> None:
    """Raises KeyMismatchError, TypeError or NotSupportedError for what a store can't hold."""
    if not isinstance(key, (int, str)):
        raise KeyMismatchError(f"key {key!r} is a {type(key).__name__}; use an int or a str")
    if not isinstance(array, NDArray):
        raise TypeError(f"key {key!r}: expected an NDArray, got {type(array).__name__}")
    if array.stype != "default":
        raise NotSupportedError(
            f"key {key!r} is a sparse array ({array.stype}), which is not built yet; use dense "
            "parameters and gradients, or kvstore='dist_sync'"
        )
    dtype = np.dtype(array.dtype).name
    if dtype not in _DTYPES:
        raise NotSupportedError(
            f"key {key!r} has dtype {dtype}, which is not built yet; use {' or '.join(_DTYPES)}"
        )


class Staging:
    """Arrays in CPU memory for values that are on other devices, or on several.

    A single array in CPU memory is used as it is.
    """

    def __init__(self) -> None:
        self._arrays: Dict[Key, NDArray] = {}
        self._sources: Dict[Key, NDArray] = {}
        self._targets: Dict[Key, NDArray] = {}
        """Those in CPU memory that were used last: to ask MXNet where an array is takes long."""

    def reduced(self, worker_key: WorkerKey, arrays: List[NDArray]) -> NDArray:
        """One array in CPU memory with the sum of `arrays`, one for each device."""
        key = worker_key.key
        if len(arrays) == 1 and (self._sources.get(key) is arrays[0] or _on_cpu(arrays[0])):
            self._sources[key] = arrays[0]
            return arrays[0]
        staging = self._array(worker_key, arrays[0])
        if len(arrays) == 1:
            arrays[0].copyto(staging)
        else:
            local = [array.as_in_context(staging.context) for array in arrays]
            mx.nd.add_n(*local, out=staging)
        return staging

    def landing_place(self, worker_key: WorkerKey, arrays: List[NDArray]) -> NDArray:
        """The first of `arrays` that is in CPU memory, or an array there."""
        key = worker_key.key
        for array in arrays:
            if self._targets.get(key) is array or _on_cpu(array):
                self._targets[key] = array
                return array
        return self._array(worker_key, arrays[0])

    def _array(self, worker_key: WorkerKey, like: NDArray) -> NDArray:
        staging = self._arrays.get(worker_key.key)
        if staging is None:
            context = mx.cpu() if _on_cpu(like) else mx.cpu_pinned(like.context.device_id)
            staging = mx.nd.empty(worker_key.shape, context, worker_key.dtype)
            self._arrays[worker_key.key] = staging
        return staging


def _on_cpu(array: NDArray) -> bool:
    return array.context.device_type in _CPU_KINDS
