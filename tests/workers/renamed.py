"""Trains two layers of the same shape with checkpoints, and goes on from one where there is one.

Arguments: how many layers the script makes before, and the prefixes of the two. Each worker prints
after how many steps it goes on.
"""

import p3kv  # noqa: F401, I001
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from names import RATE, SIDE, layers, made_before, parameters

STEPS = 3


def main() -> None:
    store = mx.kv.create("p3")
    made_before(int(sys.argv[1]))
    net = layers(sys.argv[2:])
    trainer = gluon.Trainer(parameters(net), "sgd", {"learning_rate": RATE}, kvstore=store)
    begun = store.resumed_steps
    for _ in range(STEPS):
        with autograd.record():
            loss = net[0].weight.data().sum() + 10 * net[1].weight.data().sum()
        loss.backward()
        trainer.step(1)
    moved = RATE * store.num_workers * (begun + STEPS)
    for number, (layer, gradient) in enumerate(zip(net, (1, 10)), 1):
        right = np.full((SIDE, SIDE), number - gradient * moved, np.float32)
        np.testing.assert_allclose(layer.weight.data().asnumpy(), right, atol=1e-5)
    print(f"all is right after {begun} steps and {STEPS} more")


main()
