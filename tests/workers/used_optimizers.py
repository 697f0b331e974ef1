"""Optimizers that train with p3kv after they have trained in this process, and the reverse.

Two workers with the same gradients; each compares with training in this process alone, whose
counts, rates and weights must be the same. Argument: a folder for files of states.
"""

import p3kv  # noqa: F401, I001
import sys
from pathlib import Path
from typing import Any, Callable, List, Sequence, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon, nd

FOLDER = Path(sys.argv[1])
RANK = mx.kv.create("p3").rank
ONES = nd.ones((1, 4))
Found = Tuple[List[Any], List[np.ndarray]]


def scheduled() -> mx.optimizer.Optimizer:
    schedule = mx.lr_scheduler.FactorScheduler(3, 0.1, base_lr=0.1)
    return mx.optimizer.SGD(learning_rate=0.1, lr_scheduler=schedule)


def dense(units: int = 2) -> gluon.nn.Dense:
    net = gluon.nn.Dense(units, in_units=4)
    net.initialize(mx.init.One())
    return net


def trainer_of(net: gluon.nn.Dense, optimizer: mx.optimizer.Optimizer, store: Any) -> gluon.Trainer:
    return gluon.Trainer(net.collect_params(), optimizer, kvstore=store)


def step(net: gluon.nn.Dense, trainer: gluon.Trainer, count: int = 1) -> None:
    for _ in range(count):
        with autograd.record():
            loss = (net(ONES) ** 2).sum()
        loss.backward()
        trainer.step(1 if trainer._kvstore_params["kvstore"] is None else 2)


def counted(optimizer: mx.optimizer.Optimizer) -> Any:
    return optimizer.num_update, optimizer.learning_rate, dict(optimizer._index_update_count)


def weights(*nets: gluon.nn.Dense) -> List[np.ndarray]:
    return [one.data().asnumpy() for net in nets for one in net.collect_params().values()]


def in_phases(make: Callable[[], mx.optimizer.Optimizer], store: Any) -> Found:
    """By turns without a store and with one."""
    net, optimizer, found = dense(), make(), []
    for kvstore, count in ((None, 4), (store, 3), (None, 2), (store, 2)):
        step(net, trainer_of(net, optimizer, kvstore), count)
        found.append(counted(optimizer))
    return found, weights(net)


def shared(store: Any) -> Found:
    """By two Trainers at once, whose parameters have the same places."""
    optimizer = mx.optimizer.Adam(learning_rate=0.05)
    nets = [dense(units) for units in (2, 3)]
    trainers = [trainer_of(net, optimizer, store) for net in nets]
    for _ in range(3):
        for more, (net, trainer) in enumerate(zip(nets, trainers)):
            step(net, trainer, 1 + more)
    return [counted(optimizer)], weights(*nets)


def loaded(store: Any) -> Found:
    """Goes back to states that were saved in mid-training."""
    net, optimizer = dense(), mx.optimizer.Adam(learning_rate=0.05)
    step(net, trainer_of(net, optimizer, None), 3)
    trainer = trainer_of(net, optimizer, store)
    step(net, trainer, 2)
    file = str(FOLDER / f"{RANK} {store}")
    trainer.save_states(file)
    step(net, trainer, 2)
    trainer.load_states(file)
    step(net, trainer, 2)
    return [counted(trainer._optimizer)], weights(net)


def by_modules(store: Any) -> Found:
    """Modules call keys by names, and without a store by places."""
    value = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="layer")
    symbol = mx.sym.LinearRegressionOutput(value, mx.sym.var("label"), name="out")
    optimizer = mx.optimizer.Adam(learning_rate=0.05)
    of_all: Sequence[Any] = ()
    found = []
    for kvstore, count in ((None, 3), (store, 2), (None, 2), (store, 2)):
        module = mx.mod.Module(symbol, ["data"], ["label"])
        module.bind([("data", (1, 4))], [("label", (1, 2))])
        if of_all:
            module.set_params(*of_all)
        else:
            module.init_params(mx.init.One())
        optimizer.rescale_grad = 1.0 if kvstore is None else 0.5
        module.init_optimizer(kvstore=kvstore and mx.kv.create(kvstore), optimizer=optimizer)
        for _ in range(count):
            module.forward_backward(mx.io.DataBatch([ONES], [nd.zeros((1, 2))]))
            module.update()
        of_all = module.get_params()
        found.append(optimizer.num_update)
    return found, [one.asnumpy() for one in of_all[0].values()]


def check(name: str, train: Callable[[Any], Found]) -> None:
    (counts, values), (expected, alone) = train("p3"), train(None)
    assert counts == expected, (name, counts, expected)
    for one, other in zip(values, alone):
        np.testing.assert_array_equal(one, other, name)


for kind in (mx.optimizer.Adam, mx.optimizer.Nadam, mx.optimizer.LARS):
    check(kind.__name__, lambda store, kind=kind: in_phases(lambda: kind(0.05), store))
check("a schedule", lambda store: in_phases(scheduled, store))
for train in (shared, loaded, by_modules):
    check(train.__name__, train)
print(f"worker {RANK} has counted on")
