"""MXNet's Module: `fit` takes the store by its name.

p3kv launch -n 2 -- python examples/module.py
"""

import p3kv  # noqa: F401  # First: in a server's role a script goes no further than this line.

# isort: split
import logging

import mxnet as mx
import numpy as np

CLASSES, NUMBERS, SAMPLES, BATCH = 5, 20, 2000, 50

logging.basicConfig(level=logging.INFO, format="%(message)s")  # `fit` logs how it goes


def network():
    x = mx.sym.Variable("data")
    x = mx.sym.FullyConnected(x, num_hidden=64, name="hidden")
    x = mx.sym.Activation(x, act_type="relu")
    x = mx.sym.FullyConnected(x, num_hidden=CLASSES, name="scores")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def samples(rank):
    """Points around a centre for each class; other points on each worker."""
    centres = np.random.RandomState(0).normal(size=(CLASSES, NUMBERS))
    random = np.random.RandomState(1 + rank)
    labels = random.randint(CLASSES, size=SAMPLES)
    points = centres[labels] + random.normal(0, 0.8, (SAMPLES, NUMBERS))
    return mx.io.NDArrayIter(points, labels, BATCH, shuffle=True)


store = mx.kv.create("p3")  # "p3" would do below; here the script asks for its rank
module = mx.mod.Module(network())
module.fit(
    samples(store.rank),
    kvstore=store,
    # Module divides by the batch of all workers by itself.
    optimizer="sgd",
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9},
    initializer=mx.init.Xavier(),
    eval_metric="accuracy",
    num_epoch=2,
)

if store.rank == 0:
    [(_, reached)] = module.score(samples(rank=100), "accuracy")
    print(f"accuracy {reached:.2f} on other points")
