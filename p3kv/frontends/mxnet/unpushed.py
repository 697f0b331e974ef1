"""Values that no gradient changes: BatchNorm's running averages and frozen parameters.

Each worker has its own, and servers have the initial ones at most. Checkpoints have worker rank
0's.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from typing import List, NamedTuple

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, SUMMED, classic, dtype_name, is_on_cpu
from p3kv.wire.messages import Key
from p3kv.worker.saving.cuts import Unpushed

_COPY = b"p3kv_copy"
"""Name of the operation in MXNet's profiler."""


class Local(NamedTuple):
    """A value of this worker that no gradient changes now."""

    key: Key
    name: str
    arrays: List[NDArray]
    """One for each device."""


def of_trainer(trainer: mx.gluon.Trainer) -> List[Local]:
    """Parameters of a Trainer without gradients, by their keys."""
    found = [
        Local(key, parameter.name, parameter._check_and_get(parameter._data, list))
        for key, parameter in enumerate(trainer._params)
        if parameter.grad_req == "null"
    ]
    return list(filter(_can_travel, found))


def of_module(module: mx.mod.Module) -> List[Local]:
    """A Module's auxiliary states and fixed parameters, by their names."""
    group = module._exec_group
    arrays = dict(zip(group.param_names, group.param_arrays))
    found = [Local(name, name, arrays[name]) for name in module._fixed_param_names]
    found += [
        Local(name, name, several) for name, several in zip(group.aux_names, group.aux_arrays)
    ]
    return list(filter(_can_travel, found))


def copied(local: Local) -> Unpushed:
    """A copy as the value is when all operations of MXNet's engine have ended that were pushed
    before. Returns at once. Of several devices it is the mean, as in MXNet's own files.

    An executor's backward pass writes auxiliary states and says that it reads them. So operations
    that copy must say that they write: then they wait for all that was pushed before, and all that
    comes later waits for them.
    """
    value: Future[np.ndarray] = Future()

    def copy(operation: engine.Operation) -> None:
        if value.set_running_or_notify_cancel():
            try:
                value.set_result(_read(array))
            except Exception as error:  # noqa: BLE001  a thread waits for one or the other
                value.set_exception(error)
        operation.complete()

    if len(local.arrays) == 1 and is_on_cpu(local.arrays[0]):
        array = local.arrays[0]
        engine.push(copy, [], [array], _COPY)
    else:
        engine.push(engine.Operation.complete, [], local.arrays, _COPY)
        array = _merged(local.arrays)
        engine.push(engine.Operation.complete, [], local.arrays, _COPY)
        engine.push(copy, [array], [], _COPY)
    return Unpushed(local.key, local.name, tuple(array.shape), dtype_name(array), value)


def _can_travel(local: Local) -> bool:
    """Not row_sparse weights, of which workers have some rows only."""
    first = local.arrays[0]
    return first.stype == DENSE and dtype_name(first) in SUMMED


def _merged(arrays: List[NDArray]) -> NDArray:
    """A new array in CPU memory."""
    with mx.autograd.pause():
        local = [classic(array).copyto(mx.cpu()) for array in arrays]
        return local[0] if len(local) == 1 else mx.nd.add_n(*local) / len(local)


def _read(array: NDArray) -> np.ndarray:
    """A copy of what is in memory; in an operation that reads the array."""
    size_bytes = array.size * np.dtype(array.dtype).itemsize
    memory = ctypes.string_at(engine.address(array), size_bytes)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
