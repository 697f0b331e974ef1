"""Trains a small network for some steps; worker 0 saves the weights.

Arguments: the file for the weights, the optimizer's name, update_on_kvstore as 0 or 1.
"""

import p3kv  # noqa: F401, I001
import sys

import exact_model
import mxnet as mx
from mxnet import gluon


def main() -> mx.kvstore.KVStoreBase:
    path, name, update_on_kvstore = sys.argv[1], sys.argv[2], bool(int(sys.argv[3]))
    store = mx.kv.create("p3")
    net = exact_model.network()
    trainer = gluon.Trainer(
        net.collect_params(),
        name,
        exact_model.OPTIMIZERS[name],
        kvstore=store,
        update_on_kvstore=update_on_kvstore,
    )
    for step in range(exact_model.STEPS):
        x, y = exact_model.part(step, store.rank, store.num_workers)
        exact_model.backward(net, x, y)
        trainer.step(exact_model.BATCH)
    if store.rank == 0:
        exact_model.save(net, path)
    exact_model.weights(net)
    return store


store = main()
