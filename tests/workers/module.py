"""Module.fit, and beside it the same steps by executors, without a store: equal bit for bit.

Argument: the folder for the names of the checks that pass. The environment says with
MXNET_UPDATE_ON_KVSTORE who updates.
"""

import p3kv  # noqa: F401, I001
import os
import sys
from typing import Dict, List, Union

import mxnet as mx
import numpy as np
from checks import run
from mxnet.kvstore import KVStoreBase

EPOCHS = 2
BATCHES = 3
BATCH = 8
SGD = {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.05}
DATA = (16, 6, 6)
Weights = Dict[str, np.ndarray]
CHECKS = [
    "fit_by_the_name_p3",
    "fit_by_the_name_dist_sync_p3",
    "fit_with_the_store_on_two_devices",
    "fit_goes_on_from_a_checkpoint",
    "fit_goes_on_from_a_checkpoint_with_optimizer_states",
]


def symbol(prefix: str) -> mx.sym.Symbol:
    x = mx.sym.Variable("data")
    x = mx.sym.Convolution(x, kernel=(3, 3), num_filter=32, name=f"{prefix}_conv")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=20, name=f"{prefix}_hidden")
    x = mx.sym.FullyConnected(mx.sym.tanh(x), num_hidden=4, name=f"{prefix}_last")
    return mx.sym.SoftmaxOutput(x, name="softmax")


def data(rank: int) -> mx.io.NDArrayIter:
    generator = np.random.RandomState(rank)
    x = generator.standard_normal((BATCHES * BATCH, *DATA)).astype(np.float32)
    y = generator.randint(0, 4, BATCHES * BATCH)
    return mx.io.NDArrayIter(x, y, BATCH)


def initial(prefix: str) -> Weights:
    shapes, _, _ = symbol(prefix).infer_shape(data=(BATCH, *DATA))
    names = symbol(prefix).list_arguments()
    generator = np.random.RandomState(7)
    return {
        name: (0.2 * generator.standard_normal(shape)).astype(np.float32)
        for name, shape in zip(names, shapes)
        if name.startswith(prefix)
    }


def alone(
    prefix: str, num_workers: int, num_devices: int, fixed: List[str], fresh: bool = False
) -> Weights:
    """The weights after all epochs, with all parts of a batch one after the other.

    `fresh`: each epoch begins with a new optimizer.
    """
    graph = symbol(prefix)
    share = BATCH // num_devices
    executor = graph.simple_bind(mx.cpu(), data=(share, *DATA))
    weights = {name: mx.nd.array(value) for name, value in initial(prefix).items()}
    trained = [name for name in weights if name not in fixed]
    batches = [list(data(rank)) for rank in range(num_workers)]
    for epoch in range(EPOCHS):
        if fresh or epoch == 0:
            optimizer = mx.optimizer.create(
                "sgd", sym=graph, param_idx2name=dict(enumerate(trained)),
                rescale_grad=1 / (BATCH * num_workers), **SGD,
            )  # fmt: skip
            updater = mx.optimizer.get_updater(optimizer)
        for number in range(BATCHES):
            executor.copy_params_from(weights)
            totals = {}
            for rank in range(num_workers):
                of_rank: Weights = {}
                batch = batches[rank][number]
                for device in range(num_devices):
                    rows = slice(device * share, (device + 1) * share)
                    executor.forward(
                        is_train=True, data=batch.data[0][rows], softmax_label=batch.label[0][rows]
                    )
                    executor.backward()
                    for name in trained:
                        gradient = executor.grad_dict[name].asnumpy()
                        of_rank[name] = of_rank[name] + gradient if device else gradient
                for name in trained:
                    totals[name] = totals[name] + of_rank[name] if rank else of_rank[name]
            for index, name in enumerate(trained):
                updater(index, mx.nd.array(totals[name]), weights[name])
    return {name: value.asnumpy() for name, value in weights.items()}


def fit(
    prefix: str, store: Union[str, KVStoreBase], rank: int, devices: List[mx.Context],
    fixed: List[str],
) -> mx.mod.Module:  # fmt: skip
    module = mx.mod.Module(symbol(prefix), context=devices, fixed_param_names=fixed)
    iterator = data(rank)
    module.fit(
        iterator,
        eval_data=data(99),  # an epoch ends with inference, which leaves its layout in weights
        kvstore=store,
        num_epoch=EPOCHS,
        optimizer="sgd",
        optimizer_params=SGD,
        arg_params={name: mx.nd.array(value) for name, value in initial(prefix).items()},
        aux_params={},
    )
    return module


def compare(module: mx.mod.Module, expected: Weights) -> None:
    weights = module.get_params()[0]
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(value.asnumpy(), expected[name], err_msg=name)


class Fits:
    """Stores: created by Module from their names, or given to it."""

    def __init__(self) -> None:
        self.on_servers = os.environ["MXNET_UPDATE_ON_KVSTORE"] == "1"
        self._rank = int(os.environ["DMLC_WORKER_ID"])
        self._fixed = ["name_hidden_bias"]
        self._first = self._fit("p3")
        self.store = self._first._kvstore
        assert self.store.rank == self._rank

    def _fit(self, name: str) -> mx.mod.Module:
        return fit("name", name, self._rank, [mx.cpu()], self._fixed)

    def _compare(self, module: mx.mod.Module) -> None:
        assert module._kvstore.type == "dist_sync_p3"
        assert module._update_on_kvstore is self.on_servers
        compare(module, alone("name", self.store.num_workers, 1, self._fixed))

    def fit_by_the_name_p3(self, store: KVStoreBase) -> None:
        self._compare(self._first)

    def fit_by_the_name_dist_sync_p3(self, store: KVStoreBase) -> None:
        self._compare(self._fit("dist_sync_p3"))

    def fit_with_the_store_on_two_devices(self, store: KVStoreBase) -> None:
        given = mx.kv.create("p3")
        module = fit("object", given, store.rank, [mx.cpu(0), mx.cpu(1)], [])
        assert module._kvstore is given
        assert module._update_on_kvstore is self.on_servers
        compare(module, alone("object", store.num_workers, 2, []))

    def fit_goes_on_from_a_checkpoint(self, store: KVStoreBase) -> None:
        """As after a restart. Both Modules have the same keys, each in a store of its own."""
        saved = f"{sys.argv[1]}/saved{store.rank}"
        settings = {"kvstore": store, "optimizer": "sgd", "optimizer_params": SGD}
        values = {name: mx.nd.array(value) for name, value in initial("saved").items()}
        first = mx.mod.Module(symbol("saved"))
        first.fit(
            data(store.rank), num_epoch=1, arg_params=values, aux_params={},
            epoch_end_callback=mx.callback.do_checkpoint(saved), **settings,
        )  # fmt: skip
        second = mx.mod.Module.load(saved, 1)
        second.fit(data(store.rank), begin_epoch=1, num_epoch=EPOCHS, **settings)
        compare(second, alone("saved", store.num_workers, 1, [], fresh=True))

    def fit_goes_on_from_a_checkpoint_with_optimizer_states(self, store: KVStoreBase) -> None:
        """Momentum goes on, as without an interruption."""
        saved = f"{sys.argv[1]}/with_states{store.rank}"
        settings = {"kvstore": store, "optimizer": "sgd", "optimizer_params": SGD}
        values = {name: mx.nd.array(value) for name, value in initial("kept").items()}
        first = mx.mod.Module(symbol("kept"))
        first.fit(
            data(store.rank), num_epoch=1, arg_params=values, aux_params={},
            epoch_end_callback=mx.callback.module_checkpoint(
                first, saved, save_optimizer_states=True
            ), **settings,
        )  # fmt: skip
        second = mx.mod.Module.load(saved, 1, load_optimizer_states=True)
        second.fit(data(store.rank), begin_epoch=1, num_epoch=EPOCHS, **settings)
        compare(second, alone("kept", store.num_workers, 1, []))


if __name__ == "__main__":
    fits = Fits()
    run([getattr(fits, name) for name in CHECKS], fits.store, sys.argv[1])
