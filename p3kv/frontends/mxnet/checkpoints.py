"""MXNet's part of a store that goes on from a checkpoint."""

from __future__ import annotations

import logging
from typing import Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray import NDArray

from p3kv import config
from p3kv.common.words import some_of
from p3kv.errors import CheckpointError, ConfigError, StatesError
from p3kv.frontends.mxnet.arrays import ROW_SPARSE
from p3kv.frontends.mxnet.optimizers import saved_states
from p3kv.frontends.mxnet.optimizers.plain_states import with_all_rows
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.frontends.mxnet.unpushed import of_trainer
from p3kv.server.optimizer import State
from p3kv.store.resuming import Counts, GoesOn
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

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
