"""Trains a small network for some steps, once or several times; worker 0 saves the weights.

Arguments: a folder for the weights, and trainings: each an optimizer's name and who updates, such
as `sgd-servers` or `adam-workers`. Each training has a store of its own.
"""

import p3kv  # noqa: F401, I001
import sys

import exact_model
import mxnet as mx
from mxnet import gluon


def train(folder: str, training: str) -> mx.kvstore.KVStoreBase:
    name, who = training.split("-")
    store = mx.kv.create("p3")
    net = exact_model.network()
    trainer = gluon.Trainer(
        net.collect_params(),
        name,
        exact_model.OPTIMIZERS[name],
        kvstore=store,
        update_on_kvstore=who == "servers",
    )
    for step in range(exact_model.STEPS):
        x, y = exact_model.part(step, store.rank, store.num_workers)
        exact_model.backward(net, x, y)
        trainer.step(exact_model.BATCH)
    assert trainer._update_on_kvstore == (who == "servers")
    if store.rank == 0:
        exact_model.save(net, folder, training)
    exact_model.weights(net)
    return store


stores = [train(sys.argv[1], training) for training in sys.argv[2:]]
