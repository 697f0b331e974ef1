"""Trains two layers of the same shape whose names differ between the workers.

Argument: how they differ. Each worker prints whether both layers have what is theirs after a step.
"""

import p3kv  # noqa: F401, I001
import sys
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

SIDE, RATE = 3, 0.1


def layers(prefixes: List[str]) -> List[nn.Dense]:
    """Two layers; worker rank 0's values are 1 and 2."""
    made = [
        nn.Dense(SIDE, use_bias=False, in_units=SIDE, prefix=prefix or None) for prefix in prefixes
    ]
    for number, layer in enumerate(made, 1):
        layer.initialize(mx.init.Constant(number))
    return made


def made_before(count: int) -> None:
    """Makes layers that are not trained."""
    for _ in range(count):
        nn.Dense(1)


def parameters(net: List[nn.Dense]) -> Dict[str, gluon.Parameter]:
    return {name: one for layer in net for name, one in layer.collect_params().items()}


def train(net: List[nn.Dense], store: Any, given: Any) -> None:
    """One step: the gradients are those of sums, 1 for the first layer and 10 for the second."""
    trainer = gluon.Trainer(given, "sgd", {"learning_rate": RATE}, kvstore=store)
    with autograd.record():
        loss = net[0].weight.data().sum() + 10 * net[1].weight.data().sum()
    loss.backward()
    trainer.step(1)
    for number, (layer, gradient) in enumerate(zip(net, (1, 10)), 1):
        right = np.full((SIDE, SIDE), number - RATE * gradient * store.num_workers, np.float32)
        np.testing.assert_allclose(layer.weight.data().asnumpy(), right, rtol=1e-6)


def declare_rows(name: str, store: Any) -> None:
    """A row_sparse weight: its Trainer's keys are declared when rows are asked for."""
    weight = gluon.Parameter(name, shape=(SIDE, SIDE), stype="row_sparse", grad_stype="row_sparse")
    weight.initialize()
    gluon.Trainer([weight], "sgd", kvstore=store)
    weight.row_sparse_data(mx.nd.arange(SIDE)).wait_to_read()


def main() -> None:
    how = sys.argv[1]
    store = mx.kv.create("p3")
    first = store.rank == 0
    prefixes = ["", ""]
    if how in ("swapped", "listed"):
        # As text, dense10 comes before dense9.
        made_before(9 if first else 8)
    elif how == "shifted":
        made_before(3 if first else 2)
    else:
        prefixes = ["enc_", "dec_"] if first else ["foo_", "bar_"]
    if how == "sparse":
        declare_rows(f"{prefixes[0]}weight", store)
    net = layers(prefixes)
    named = parameters(net)
    train(net, store, list(named.values()) if how == "listed" else named)
    print("all is right")


if __name__ == "__main__":
    main()
