"""Copies of what no gradient changes, for checkpoints."""

from __future__ import annotations

import mxnet as mx
import numpy as np
import pytest

from p3kv.frontends.mxnet.checkpoints import Local, copied, of_module
from tests.jobs import DEADLINE_S


def test_a_copy_is_the_value_of_its_moment_whatever_is_written_later() -> None:
    value, factor = mx.nd.ones((500, 500)), mx.nd.full((500, 500), 1 / 500)
    for _ in range(20):  # takes longer than the call
        value = mx.nd.dot(value, factor)
    copy = copied(Local("mean", "mean", [value]))
    value[:] = 7
    assert (copy.shape, copy.dtype) == ((500, 500), "float32")
    np.testing.assert_allclose(copy.value.result(DEADLINE_S), 1, rtol=1e-3)


def test_of_several_devices_the_copy_is_the_mean() -> None:
    arrays = [mx.nd.full((2, 3), device, mx.cpu(device)) for device in (1, 3)]
    copy = copied(Local("mean", "mean", arrays))
    np.testing.assert_array_equal(copy.value.result(DEADLINE_S), np.full((2, 3), 2.0))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_copy_of_an_auxiliary_state_is_that_of_the_step_s_end_whatever_runs_meanwhile(
    devices: int,
) -> None:
    """MXNet's executors say that they only read auxiliary states, and write them in the backward
    pass."""
    rows, columns = 400, 400
    batches = [
        np.random.RandomState(step).normal(step, 2, (rows, columns)).astype("float32")
        for step in range(12)
    ]
    symbol = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", momentum=0.5)
    contexts = [mx.cpu(device) for device in range(devices)]
    module = mx.mod.Module(mx.sym.MakeLoss(mx.sym.sum(symbol)), label_names=None, context=contexts)
    module.bind([("data", (rows, columns))])
    module.init_params()
    module.init_optimizer("local", "sgd", {"learning_rate": 0.0})
    unit = mx.nd.eye(columns)
    copies = []
    for batch in batches:
        data = mx.nd.array(batch)
        for _ in range(20):  # takes longer than the calls
            data = mx.nd.dot(data, unit)
        module.forward(mx.io.DataBatch([data]), is_train=True)
        module.backward()
        module.update()
        copies.append([copied(local) for local in of_module(module)])
    expected = np.zeros(columns)
    for batch, (mean, _) in zip(batches, copies):
        expected = 0.5 * expected + 0.5 * batch.mean(0)
        np.testing.assert_allclose(mean.value.result(DEADLINE_S), expected, atol=1e-3)
