"""MXNet's part of checkpoints: how a store goes on, and copies of what no gradient changes.

Each worker has its own of these, BatchNorm's running averages and frozen parameters, and servers
have the initial ones at most. Checkpoints have worker rank 0's.
"""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import Future
from typing import List, NamedTuple, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv import config
from p3kv.common.words import some_of
from p3kv.errors import CheckpointError, ConfigError, StatesError
from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, ROW_SPARSE, SUMMED, classic, dtype_name, is_on_cpu
from p3kv.frontends.mxnet.optimizers import saved_states
from p3kv.frontends.mxnet.optimizers.plain_states import with_all_rows
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.server.optimizer import State
from p3kv.store.resuming import Counts, GoesOn
from p3kv.wire.messages import Key
from p3kv.worker.saving.cuts import Unpushed
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

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


_log = logging.getLogger("p3kv")


class OptimizerGoesOn(GoesOn[WorkerOptimizer]):
    """Optimizers of one store: they count on, and have their states."""

    def __init__(self, own: WorkerStore) -> None:
        self._own = own

    def optimizer(self, fresh: WorkerOptimizer, counts: Counts, since_step: int) -> WorkerOptimizer:
        # What was the rate of the last step follows from it.
        optimizer = fresh.optimizer
        optimizer.num_update = fresh.num_update(counts.steps)
        by_codec = self._own.codec_applies_momentum
        return WorkerOptimizer(optimizer, since_step, counts.remembered, by_codec)

    def give(
        self,
        key: WorkerKey,
        states: Sequence[State],
        optimizer: WorkerOptimizer,
        member: int = 0,
    ) -> None:
        found = saved_states.of_states(states, key, optimizer)
        try:
            saved_states.check("the checkpoint", {key.key: found.state}, optimizer.optimizer, [key])
        except StatesError as error:
            raise CheckpointError(str(error)) from None
        saved_states.give(self._own, [key], {key.key: found}, optimizer)


def initial(value: NDArray, saved: np.ndarray) -> NDArray:
    """A checkpoint's value of a key, stored as the script's `value` is."""
    if value.stype == ROW_SPARSE:
        return with_all_rows(saved)
    return mx.nd.array(saved, dtype=saved.dtype)


def declare_now(trainer: mx.gluon.Trainer) -> None:
    """Has a Trainer declare its parameters as soon as it is made, and not in its first step: their
    values may be a checkpoint's, and the first gradient is to be that of these values.

    Raises ConfigError where a parameter has no value yet.
    """
    for parameter in trainer._params:
        if parameter._data is None:
            raise ConfigError(
                f"the parameter '{parameter.name}' has no value yet. With P3KV_CHECKPOINT_DIR a "
                "Trainer needs all values when it is made, since a checkpoint's may take their "
                "place: initialise the network, and run one forward pass if its layers find out "
                "their shapes by themselves, before you make the Trainer"
            )
    trainer._init_kvstore()
    trainer._init_params()
    trainer._kvstore.keep_unpushed(lambda: of_trainer(trainer))


def leave_out(names: Sequence[str]) -> None:
    """Says what of FeedForward's checkpoints do not have, if there are any; for worker rank 0."""
    if names and config.current().checkpoint_dir is not None:
        _log.warning(
            "checkpoints do not have the values of %s, which FeedForward keeps to itself: a job "
            "that goes on begins with the script's own. Of a Module they are in checkpoints",
            some_of([repr(name) for name in names]),
        )
