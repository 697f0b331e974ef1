"""Uses the store as in a job, in a process that belongs to none; weights are compared exactly."""

import p3kv  # noqa: F401, I001

import mxnet as mx
from checks import equal, random
from mxnet import autograd, gluon


def trained(store: object, update_on_kvstore: object) -> list:
    mx.random.seed(3)
    net = gluon.nn.HybridSequential(prefix="alone_")
    with net.name_scope():
        net.add(gluon.nn.Dense(7, in_units=5, activation="tanh"), gluon.nn.Dense(2, in_units=7))
    net.initialize()
    trainer = gluon.Trainer(
        net.collect_params(), "adam", kvstore=store, update_on_kvstore=update_on_kvstore
    )
    for step in range(5):
        if step == 3:
            trainer.set_learning_rate(0.05)
        with autograd.record():
            loss = (net(mx.nd.array(random((4, 5), step))) ** 2).sum()
        loss.backward()
        trainer.step(4 + step % 2)
    return [p.data().asnumpy() for p in net.collect_params().values()]


expected = trained(None, None)
for store in ("p3", "dist_sync_p3"):
    for update_on_kvstore in (None, True, False):
        for weight, wish in zip(trained(store, update_on_kvstore), expected):
            equal(mx.nd.array(weight), wish)

kv = mx.kv.create("p3")
for _ in range(2):  # two Trainers that are given the same store
    for weight, wish in zip(trained(kv, None), expected):
        equal(mx.nd.array(weight), wish)

kv = mx.kv.create("p3")
assert (kv.type, kv.rank, kv.num_workers) == ("dist_sync_p3", 0, 1)
assert (kv.stats(), kv.forward_order) == ({}, [])
kv.init("w", mx.nd.ones(3))
value = mx.nd.full(3, 2)
kv.pushpull("w", value)
equal(value, 2 * mx.nd.ones(3).asnumpy())
kv._barrier()
print("all weights are right")
