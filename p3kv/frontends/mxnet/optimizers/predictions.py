"""MXNet's optimizers that can say what a weight will be some updates later."""

from __future__ import annotations

from typing import Any, Optional

import mxnet as mx
import numpy as np

from p3kv.consistency.predicting import adam, momentum_updates
from p3kv.wire.messages import Key


def predicts(optimizer: mx.optimizer.Optimizer) -> bool:
    """Whether an optimizer is one of those: SGD with momentum, or Adam."""
    kind = type(optimizer)
    return kind is mx.optimizer.Adam or (kind is mx.optimizer.SGD and bool(optimizer.momentum))


def predicted(
    optimizer: mx.optimizer.Optimizer,
    key: Key,
    weight: np.ndarray,
    state: Any,
    count: int,
    steps: int,
    damped: bool,
) -> Optional[np.ndarray]:
    """A weight with this `count` of updates, `steps` updates later, as `Optimizer.predicted`
    gives it. `state` is that of MXNet for the weight in its own precision."""
    if not predicts(optimizer):
        return None
    if isinstance(optimizer, mx.optimizer.Adam):
        mean, square = (one.asnumpy() for one in state)
        return adam(
            weight, mean, square, count, optimizer._get_lr(key),
            (optimizer.beta1, optimizer.beta2), optimizer.epsilon, False, 0.0, steps, damped,
        )  # fmt: skip
    # A weight gets its momentum, which has the learning rate.
    return weight + momentum_updates(optimizer.momentum, steps, damped) * state.asnumpy()
