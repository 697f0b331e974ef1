"""Predicted weights, beside those that MXNet's own optimizers make."""

from __future__ import annotations

from typing import Any, List

import mxnet as mx
import numpy as np
import pytest

from p3kv.frontends.mxnet.optimizers.optimizer_settings import plain
from p3kv.frontends.mxnet.optimizers.server_optimizer import MXNetOptimizer
from p3kv.wire.messages import DeclaredKey, encode

ELEMS, DECAY = 5, 0.9


def after(optimizer: mx.optimizer.Optimizer, gradients: List[Any], dtype: str) -> Any:
    """A server's optimizer that has made updates by these gradients, the key, and the weight."""
    server = MXNetOptimizer()
    server.configure(1, encode(plain(optimizer, 0, None, 0)), 1)
    key = DeclaredKey(0, "w", (ELEMS,), dtype, ((0, ELEMS),))
    weight = np.linspace(-1, 1, ELEMS).astype(dtype)
    for step, gradient in enumerate(gradients, 1):
        server.update(key, 0, weight, np.asarray(gradient, np.float32).copy(), step)
    return server, key, weight


def gradients(count: int) -> List[np.ndarray]:
    random = np.random.RandomState(1)
    return [random.normal(size=ELEMS).astype(np.float32) for _ in range(count)]


SGD = {"learning_rate": 0.1, "momentum": DECAY}


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    "optimizer",
    [mx.optimizer.SGD(**SGD), mx.optimizer.Adam(learning_rate=0.01, epsilon=1e-3)],
    ids=["SGD", "Adam"],
)
def test_damped_predictions_are_the_updates_by_no_gradient(
    optimizer: mx.optimizer.Optimizer, steps: int
) -> None:
    given = gradients(4)
    server, key, weight = after(optimizer, given, "float32")
    _, _, expected = after(optimizer, given + [np.zeros(ELEMS)] * steps, "float32")
    ahead = server.predicted(key, 0, weight, steps, True)
    assert not np.allclose(ahead, weight, atol=1e-4)
    np.testing.assert_allclose(ahead, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_predictions_of_momentum_are_equation_4(steps: int) -> None:
    """Smoothed gradients v as in equation 1, with a weight that changes by -rate / (1 - decay) * v:
    MXNet's momentum has neither this factor nor the rate apart."""
    given = gradients(6)
    server, key, weight = after(mx.optimizer.SGD(**SGD), given, "float32")
    smoothed = np.zeros(ELEMS)
    for gradient in given:
        smoothed = DECAY * smoothed + (1 - DECAY) * gradient
    ahead = server.predicted(key, 0, weight, steps, False)
    expected = weight - steps * SGD["learning_rate"] / (1 - DECAY) * smoothed
    np.testing.assert_allclose(ahead, expected, rtol=1e-5, atol=1e-6)


def test_predictions_of_adam_are_right_while_gradients_stay_as_they_are() -> None:
    adam, gradient = mx.optimizer.Adam(learning_rate=0.01, epsilon=0.0), gradients(1)
    server, key, weight = after(adam, gradient * 3, "float32")
    _, _, expected = after(adam, gradient * 6, "float32")
    np.testing.assert_allclose(
        server.predicted(key, 0, weight, 3, False), expected, rtol=1e-5, atol=1e-6
    )


def test_half_precision_is_predicted_from_the_copy_in_single_precision() -> None:
    sgd = mx.optimizer.SGD(**SGD, multi_precision=True)
    server, key, weight = after(sgd, gradients(4), "float16")
    full, single, exact = after(mx.optimizer.SGD(**SGD), gradients(4), "float32")
    ahead = server.predicted(key, 0, weight, 2, False)
    assert ahead.dtype == np.float32
    np.testing.assert_allclose(ahead, full.predicted(single, 0, exact, 2, False), rtol=1e-3)


def test_an_optimizer_without_a_rule_predicts_nothing() -> None:
    for optimizer in (mx.optimizer.SGD(learning_rate=0.1), mx.optimizer.RMSProp()):
        server, key, weight = after(optimizer, gradients(1), "float32")
        assert server.predicted(key, 0, weight, 1, False) is None
