"""One store object that is given to several Modules and Trainers: each has an optimizer of its own.

All workers have the same gradients.
"""

from typing import List

import mxnet as mx
import numpy as np
from checks import equal, random
from mxnet import autograd, gluon
from mxnet.io import DataBatch, DataDesc
from mxnet.kvstore import KVStoreBase

BATCH, INPUTS = 4, 3


def _line(prefix: str) -> mx.sym.Symbol:
    """The gradient of each weight is the sum of the batch."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=1, name=f"{prefix}_line")
    return mx.sym.MakeLoss(x)


def _module(symbol: mx.sym.Symbol) -> mx.mod.Module:
    module = mx.mod.Module(symbol, label_names=[])
    module.bind([DataDesc("data", (BATCH, INPUTS))])
    module.init_params(mx.init.One())
    return module


def _sgd(rate: float) -> dict:
    return {"learning_rate": rate, "wd": 0.0}


def _step(module: mx.mod.BaseModule) -> None:
    module.forward_backward(DataBatch([mx.nd.ones((BATCH, INPUTS))], label=None))
    module.update()


def _one_weight(module: mx.mod.Module) -> float:
    [weight] = [
        value for name, value in module.get_params()[0].items() if name.endswith("line_weight")
    ]
    return float(weight.asnumpy()[0, 0])


def modules_may_be_given_the_same_store(store: KVStoreBase) -> None:
    given, rates = mx.kv.create("p3"), (0.1, 0.001)
    modules = [_module(_line(f"module{n}")) for n in range(2)]
    for module, rate in zip(modules, rates):
        module.init_optimizer(given, "sgd", _sgd(rate))
    for _ in range(3):
        for module in modules:
            _step(module)
    for module, rate in zip(modules, rates):
        np.testing.assert_allclose(_one_weight(module), 1 - 3 * rate, rtol=1e-6)
    # An owner may set another optimizer, and goes on from its own weights.
    modules[0].init_optimizer(given, "sgd", _sgd(0.01), force_init=True)
    for module in modules:
        _step(module)
    np.testing.assert_allclose(_one_weight(modules[0]), 0.69, rtol=1e-6)
    np.testing.assert_allclose(_one_weight(modules[1]), 0.996, rtol=1e-6)


def parts_of_a_sequential_module_have_optimizers_of_their_own(store: KVStoreBase) -> None:
    """With one optimizer for all, the names of the last part would say which weights decay."""

    def trained(kvstore: object) -> List[np.ndarray]:
        whole = mx.mod.SequentialModule()
        for n in range(2):
            x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name=f"part{n}")
            whole.add(
                mx.mod.Module(mx.sym.MakeLoss(x) if n else x, label_names=[]), auto_wiring=bool(n)
            )
        whole.bind([DataDesc("data", (BATCH, INPUTS))])
        whole.init_params(mx.init.One())
        alone = kvstore is None
        whole.init_optimizer(
            kvstore, "sgd",
            {
                "learning_rate": 0.01, "wd": 0.5,
                # Without a store, one worker computes what all workers' sum is.
                "rescale_grad": 1.0 if alone else 1 / store.num_workers,
            },
        )  # fmt: skip
        for _ in range(3):
            _step(whole)
        return [value.asnumpy() for _, value in sorted(whole.get_params()[0].items())]

    for kvstore in (mx.kv.create("p3"), "p3"):
        for mine, expected in zip(trained(kvstore), trained(None)):
            np.testing.assert_allclose(mine, expected, rtol=1e-5)


def buckets_share_one_optimizer_on_purpose(store: KVStoreBase) -> None:
    given = mx.kv.create("p3")

    def bucket(length: int) -> tuple:
        x = mx.sym.sum(mx.sym.Variable("data"), axis=1, keepdims=True)
        x = mx.sym.FullyConnected(x, num_hidden=1, name="bucket_line")
        return mx.sym.MakeLoss(x), ["data"], []

    module = mx.mod.BucketingModule(bucket, default_bucket_key=4)
    module.bind([DataDesc("data", (BATCH, 4))])
    module.init_params(mx.init.One())
    module.init_optimizer(given, "sgd", _sgd(0.01))
    for length in (4, 2, 4, 3):
        data = mx.nd.ones((BATCH, length))
        module.forward_backward(
            DataBatch([data], None, bucket_key=length, provide_data=[DataDesc("data", data.shape)])
        )
        module.update()
        assert module._curr_module._kvstore is given
    weight = module.get_params()[0]["bucket_line_weight"].asnumpy()
    np.testing.assert_allclose(weight, [[1 - 0.01 * 13]], rtol=1e-6)


def a_trainer_and_a_module_leave_a_script_s_own_keys_alone(store: KVStoreBase) -> None:
    given, total = mx.kv.create("p3"), mx.nd.ones(3)
    given.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
    given.init("own", mx.nd.zeros(3))
    module = _module(_line("beside"))
    module.init_optimizer(given, "sgd", _sgd(0.1))
    net = gluon.nn.Dense(2, in_units=INPUTS, prefix="beside_")
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(net.collect_params(), "sgd", _sgd(0.5), kvstore=given)
    with autograd.record():
        loss = net(mx.nd.ones((1, INPUTS))).sum()
    loss.backward()
    trainer.step(store.num_workers)
    _step(module)
    given.pushpull("own", total)
    equal(total, np.full(3, store.num_workers, np.float32))
    np.testing.assert_allclose(_one_weight(module), 0.9, rtol=1e-6)
    np.testing.assert_allclose(net.weight.data().asnumpy(), 0.5, rtol=1e-6)


def trainers_of_sparse_weights_get_stores_of_the_same_kind(store: KVStoreBase) -> None:
    given, rates = mx.kv.create("dist_async_p3"), (0.25, 0.5)
    blocks = [gluon.contrib.nn.SparseEmbedding(5, 2) for _ in rates]
    trainers = []
    for block, rate in zip(blocks, rates):
        block.initialize(mx.init.Constant(mx.nd.array(random((5, 2), 3))))
        trainers.append(gluon.Trainer(block.collect_params(), "sgd", _sgd(rate), kvstore=given))
    for block, trainer in zip(blocks, trainers):
        with autograd.record():
            loss = block(mx.nd.array([1, 3])).sum()
        loss.backward()
        trainer.step(1)
        assert trainer._kvstore.type == "dist_async_p3"
    ids = mx.nd.arange(5, dtype="int64")
    for block in blocks:
        block.weight.row_sparse_data(ids).wait_to_read()  # this worker's pushes have arrived
    store._barrier()
    for block, rate in zip(blocks, rates):
        weight = block.weight.row_sparse_data(ids).asnumpy()
        expected = random((5, 2), 3)
        for _ in range(store.num_workers):
            expected[[1, 3]] -= np.float32(rate)
        np.testing.assert_array_equal(weight, expected)
    assert trainers[0]._kvstore is given and trainers[1]._kvstore is not given


CHECKS = [
    modules_may_be_given_the_same_store,
    parts_of_a_sequential_module_have_optimizers_of_their_own,
    buckets_share_one_optimizer_on_purpose,
    a_trainer_and_a_module_leave_a_script_s_own_keys_alone,
    trainers_of_sparse_weights_get_stores_of_the_same_kind,
]
