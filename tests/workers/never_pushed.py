"""Trains layers with running statistics, and goes on with those of the checkpoint: worker 0's.

Arguments: a folder, and who trains: "trainer", "trainers" that take turns as those of a GAN, or
"module". The first start makes all steps, and its newest checkpoint is of the step before the last;
the second one makes the last step again. Worker 0 compares what it has in the end.
"""

import p3kv  # noqa: F401, I001
import os
import sys
from typing import Dict

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from written import wait_for_checkpoint

folder, who = sys.argv[1:]
STEPS = 5
store = mx.kv.create("p3")
rank, resumed = store.rank, store.resumed_steps
assert resumed in (0, STEPS - 1)
Values = Dict[str, np.ndarray]


def batch(step: int) -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(10 * step + rank).normal(1, 2, (4, 3)))


def begin(values: Values) -> None:
    """What a job that goes on begins with is what worker 0 has had, on all workers."""
    if resumed:
        same(values, dict(np.load(os.path.join(folder, "before.npz"))))


def end_step(step: int, values: Values) -> None:
    """Keeps worker 0's values of the first start, and compares those of the second one."""
    if rank == 0 and step >= STEPS - 2:
        file = os.path.join(folder, "before.npz" if step == STEPS - 2 else "end.npz")
        if resumed:
            same(values, dict(np.load(file)))
        else:
            np.savez(file, **values)


def same(values: Values, expected: Values) -> None:
    assert values.keys() == expected.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def values_of(*layers: gluon.Block) -> Values:
    return {
        name: parameter.data().asnumpy()
        for layer in layers
        for name, parameter in layer.collect_params().items()
    }


def norm(name: str) -> nn.BatchNorm:
    """Its beta is frozen."""
    layer = nn.BatchNorm(in_channels=3, prefix=f"{name}_")
    layer.initialize()
    layer.running_mean.set_data(mx.nd.full(3, 5.0 + rank))
    layer.beta.grad_req = "null"
    return layer


def train(trainer: gluon.Trainer, *layers: gluon.Block, step: int) -> None:
    x = batch(step)
    with autograd.record():
        for layer in layers:
            x = layer(x)
        loss = (x**2).sum()
    loss.backward()
    trainer.step(8, ignore_stale_grad=True)


def with_trainer() -> None:
    layer = norm("norm")
    own = gluon.Parameter("own", shape=(1,), grad_req="null", init="zeros")
    own.initialize()
    parameters = [*layer.collect_params().values(), own]
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=store)
    begin(values_of(layer))
    own.set_data(mx.nd.array([7.0]))  # of the script, after the store has given the checkpoint's
    for step in range(resumed, STEPS):
        train(trainer, layer, step=step)
        if step == 1:
            layer.beta.set_data(mx.nd.array([1, 2, 3]))
        end_step(step, values_of(layer))
    assert own.data().asscalar() == 7


def with_trainers() -> None:
    """The second one's steps change the running statistics of the first one's layer, too."""
    first, second = norm("norm"), norm("other")
    trainers = [
        gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=one)
        for layer, one in ((first, store), (second, "p3"))
    ]
    begin(values_of(first, second))
    for step in range(resumed, STEPS):
        train(trainers[0], first, step=step)
        train(trainers[1], second, first, step=step)
        for parameter in first.collect_params().values():
            parameter.zero_grad()
        end_step(step, values_of(first, second))


def with_module() -> None:
    symbol = mx.sym.sum(mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", fix_gamma=False))
    module = mx.mod.Module(
        mx.sym.MakeLoss(symbol), label_names=None, fixed_param_names=["norm_beta"]
    )
    module.bind([("data", (4, 3))])
    means = {"norm_moving_mean": mx.nd.full(3, 5.0 + rank), "norm_moving_var": mx.nd.ones(3)}
    module.init_params(mx.init.One(), aux_params=means, allow_missing=True)
    module.init_optimizer(store, "sgd", {"learning_rate": 0.1})

    def values() -> Values:
        mx.nd.waitall()  # or get_params may read auxiliary states before the backward pass writes
        return {
            name: value.asnumpy() for some in module.get_params() for name, value in some.items()
        }

    begin(values())
    for step in range(resumed, STEPS):
        module.forward(mx.io.DataBatch([batch(step)]), is_train=True)
        module.backward()
        module.update()
        end_step(step, values())


{"trainer": with_trainer, "trainers": with_trainers, "module": with_module}[who]()
if not resumed:
    wait_for_checkpoint(files=3)
store._barrier()
print(f"worker {rank} has trained from step {resumed} on")
