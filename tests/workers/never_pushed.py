"""Trains a layer with running statistics, and goes on with those that the script has saved.

Arguments: a folder, and who trains: "trainer" or "module". The first start makes three steps, of
which two are in the checkpoint; the second one goes on.
"""

import p3kv  # noqa: F401, I001
import os
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

folder, who = sys.argv[1:]
STEPS, SAVED = 3, 2
store = mx.kv.create("p3")
saved = os.path.join(folder, "mean.npy")
rank, resumed = store.rank, store.resumed_steps
own = np.load(saved) if resumed else np.full(3, 5.0 + rank, np.float32)


def batch(step: int) -> mx.nd.NDArray:
    return mx.nd.array(np.random.RandomState(10 * step + rank).normal(1, 2, (4, 3)))


def with_trainer() -> None:
    layer = nn.BatchNorm(in_channels=3, prefix="norm_")
    layer.initialize()
    layer.running_mean.set_data(mx.nd.array(own))
    trainer = gluon.Trainer(layer.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    check(layer.running_mean.data(), layer.gamma.data())
    for step in range(resumed, STEPS):
        with autograd.record():
            loss = (layer(batch(step)) ** 2).sum()
        loss.backward()
        trainer.step(8)
        keep(step, layer.running_mean.data())


def with_module() -> None:
    symbol = mx.sym.sum(mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm", fix_gamma=False))
    module = mx.mod.Module(mx.sym.MakeLoss(symbol), label_names=None)
    module.bind([("data", (4, 3))])
    means = {"norm_moving_mean": mx.nd.array(own), "norm_moving_var": mx.nd.ones(3)}
    module.init_params(mx.init.One(), aux_params=means, allow_missing=True)
    module.init_optimizer(store, "sgd", {"learning_rate": 0.1})
    check(module.get_params()[1]["norm_moving_mean"], module.get_params()[0]["norm_gamma"])
    for step in range(resumed, STEPS):
        module.forward(mx.io.DataBatch([batch(step)]), is_train=True)
        module.backward()
        module.update()
        keep(step, module.get_params()[1]["norm_moving_mean"])


def check(mean: mx.nd.NDArray, gamma: mx.nd.NDArray) -> None:
    """At the start: the script's own mean; of the trained weight, the checkpoint's."""
    first = 5.0 if who == "trainer" and not resumed else own  # worker 0's, as in any job
    np.testing.assert_array_equal(mean.asnumpy(), first)
    if resumed and who == "trainer":
        assert not np.array_equal(gamma.asnumpy(), np.ones(3))


def keep(step: int, mean: mx.nd.NDArray) -> None:
    if not resumed and step == SAVED - 1 and rank == 0:
        np.save(saved, mean.asnumpy())


{"trainer": with_trainer, "module": with_module}[who]()
store._barrier()
print(f"worker {rank} has trained from step {resumed} on")
