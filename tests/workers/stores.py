"""Several stores in a process, and Trainers that take turns: compared bit for bit with one process.

Two workers: then no order of a sum differs from another.
"""

from functools import partial
from itertools import count
from typing import Any, Dict, List

import mxnet as mx
import numpy as np
import pytest
from checks import equal, random
from mxnet import autograd, gluon, lr_scheduler
from mxnet.gluon import nn
from mxnet.kvstore import KVStoreBase

from p3kv.errors import KeyMismatchError
from p3kv.wire.messages import SliceSizes

WORKERS = 2
STEPS = 6
ROWS, NOISE, DATA = 4, 5, 60
KINDS = ("generator", "critic")
_prefixes = (f"gan{number}_" for number in count())


def stores_have_keys_of_their_own(store: KVStoreBase) -> None:
    other = mx.kv.create("dist_sync_p3")
    assert other is not store
    assert (other.rank, other.num_workers) == (store.rank, WORKERS)
    shapes = {store: (3, 7), other: (1201,)}
    for one, shape in shapes.items():
        one.init(0, mx.nd.full(shape, 5 + store.rank))
        out = mx.nd.zeros(shape)
        one.pull(0, out=out)
        equal(out, np.full(shape, 5, np.float32))
    other.init("only here", mx.nd.zeros(3))
    with pytest.raises(KeyMismatchError, match=r"'only here' is unknown .* Known keys: 0$"):
        store.push("only here", mx.nd.zeros(3))
    with pytest.raises(KeyMismatchError, match="initialised before"):
        other.init(0, mx.nd.zeros((1201,)))
    for step in range(3):
        outs = {one: mx.nd.array(random(shape, store.rank, step)) for one, shape in shapes.items()}
        for one, out in outs.items():
            one.pushpull(0, out)
        for one, shape in shapes.items():
            equal(outs[one], random(shape, 0, step) + random(shape, 1, step))


def one_store_updates_while_another_sums(store: KVStoreBase) -> None:
    updating, adding = mx.kv.create("p3"), mx.kv.create("p3")
    updating.set_optimizer(mx.optimizer.create("test", rescale_grad=2))
    for one in (updating, adding):
        one.init("w", mx.nd.ones(1000))
    weight = mx.nd.zeros(1000)
    for step in range(1, 4):
        gradient = mx.nd.full(1000, store.rank + 1)
        updating.pushpull("w", gradient, out=weight)
        adding.pushpull("w", gradient)
        equal(weight, np.full(1000, 1 + 6 * step, np.float32))
        equal(gradient, np.full(1000, 3, np.float32))
    # Integers are summed beside a store that updates.
    counts = mx.nd.array([1, 2], dtype="int64")
    adding.init("counts", counts)
    adding.pushpull("counts", counts)
    equal(counts, np.array([2, 4]))


def steps_of_two_stores_may_overlap(store: KVStoreBase) -> None:
    """Nobody waits, and a setting changes in each step: each push is updated with its own."""
    stores = [mx.kv.create("p3") for _ in range(2)]
    optimizers = [mx.optimizer.create("test", rescale_grad=0) for _ in stores]
    weights = [[mx.nd.zeros(301) for _ in range(2)] for _ in stores]
    for one, optimizer in zip(stores, optimizers):
        one.set_optimizer(optimizer)
        one.init([0, 1], [mx.nd.zeros(301)] * 2)
    gradient = mx.nd.ones(301)
    for step in range(1, 21):
        for n, optimizer in enumerate(optimizers):
            optimizer.rescale_grad = step * 1000**n
        for key in range(2):
            for n, one in enumerate(stores):
                if n == 0 or step % 5 == 0:
                    one.pushpull(key, gradient, out=weights[n][key])
    for n, rates in enumerate((range(1, 21), range(5, 21, 5))):
        for weight in weights[n]:
            equal(weight, np.full(301, WORKERS * sum(rates) * 1000**n, np.float32))


def slices_of_all_stores_change_their_size(store: KVStoreBase) -> None:
    """Each store's optimizer states are cut anew. The wish for another size is made here."""
    worker = store._worker
    first_round = worker._joined.steps._newest + 4
    trained = []
    for name, settings in (("sgd", {"momentum": 0.9}), ("adam", {})):
        make = partial(mx.optimizer.create, name, learning_rate=0.01, **settings)
        one, value = mx.kv.create("p3"), mx.nd.array(random((1201,), 1))
        one.set_optimizer(make())
        one.init("w", value)
        trained.append((one, mx.optimizer.get_updater(make()), value, mx.nd.zeros(1201)))
    for step in range(first_round + 4):
        if step == 1 and store.rank == 0:
            # Before the first slice of the step two older.
            assert worker._joined.steps._newest == first_round - 2
            worker.loop.call_soon(worker._joined.tuning.announce, first_round + 1, SliceSizes(37))
        gradients = [random((1201,), rank, step) for rank in range(WORKERS)]
        for one, updater, value, weight in trained:
            one.pushpull("w", mx.nd.array(gradients[store.rank]), out=weight)
            updater(0, mx.nd.array(gradients[0] + gradients[1]), value)
    for _, _, value, weight in trained:
        equal(weight, value.asnumpy())
    assert worker._joined.tuning._sizes.generation(first_round + 1) == 1


class Gan:
    """A generator and a critic; gradients of a worker's rows, and a Trainer's way to step."""

    def __init__(self) -> None:
        mx.random.seed(3)
        self.nets: Dict[str, nn.Block] = {}
        prefix = next(_prefixes)
        for kind, units, inputs in (("generator", DATA, NOISE), ("critic", 1, DATA)):
            net = nn.HybridSequential(prefix=f"{prefix}{kind}_")
            with net.name_scope():
                net.add(nn.Dense(40, activation="tanh", in_units=inputs))
                net.add(nn.Dense(units, in_units=40))
            net.initialize(mx.init.Xavier())
            net.hybridize()
            self.nets[kind] = net
        self.nets["generator"](mx.nd.zeros((ROWS, NOISE)))
        self.nets["critic"](mx.nd.zeros((ROWS, DATA)))

    def backward(self, kind: str, step: int, rank: int) -> None:
        generator, critic = self.nets["generator"], self.nets["critic"]
        noise = mx.nd.array(random((ROWS, NOISE), step, rank, 0))
        with autograd.record():
            made = generator(noise)
            if kind == "critic":
                real = mx.nd.array(random((ROWS, DATA), step, rank, 2))
                loss = (critic(made.detach()) - 1) ** 2 + critic(real) ** 2
            else:
                loss = critic(made) ** 2
        loss.backward()

    def parameters(self, kind: str) -> List[gluon.Parameter]:
        return [p for _, p in sorted(self.nets[kind].collect_params().items())]


def _optimizer(kind: str) -> mx.optimizer.Optimizer:
    if kind == "critic":
        return mx.optimizer.create("adam", learning_rate=0.01, rescale_grad=1 / ROWS)
    schedule = lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.2)
    return mx.optimizer.create("sgd", momentum=0.9, lr_scheduler=schedule, rescale_grad=1 / ROWS)


def _turns() -> List[tuple]:
    """The critic steps twice as often."""
    return [(step, kind) for step in range(STEPS) for kind in ("critic", "critic", "generator")]


def _train_beside_one_process(rank: int, *makes: Any, **settings: Any) -> List[gluon.Trainer]:
    """Trains a GAN with Trainers, and the same without a store; returns the Trainers.

    Each Trainer learns its forward order, which is not the order of its keys.
    `makes` gives each Trainer's `kvstore`.
    """
    gan, alone = Gan(), Gan()
    trainers = {
        kind: gluon.Trainer(gan.nets[kind].collect_params(), _optimizer(kind), kvstore=store,
                            **settings)
        for kind, store in zip(KINDS, makes)
    }  # fmt: skip
    updaters = {kind: mx.optimizer.get_updater(_optimizer(kind)) for kind in KINDS}
    for turn, (step, kind) in enumerate(_turns()):
        if step == 3:
            trainers["critic"].set_learning_rate(0.02)
            updaters["critic"].optimizer.set_learning_rate(0.02)
        gan.backward(kind, turn, rank)
        trainers[kind].step(1)
        totals: List[np.ndarray] = []
        for other in range(WORKERS):
            alone.backward(kind, turn, other)
            mine = [p.grad().asnumpy() for p in alone.parameters(kind)]
            totals = [a + b for a, b in zip(totals, mine)] if totals else mine
        for place, (parameter, total) in enumerate(zip(alone.parameters(kind), totals)):
            updaters[kind](place, mx.nd.array(total), parameter.data())
    for trainer in trainers.values():
        names = [trainer._params[key].name for key in trainer._kvstore.forward_order]
        order = [name.split("_", 2)[2] for name in names]
        assert order == ["dense0_weight", "dense0_bias", "dense1_weight", "dense1_bias"], order
    for kind in KINDS:
        for mine, other in zip(gan.parameters(kind), alone.parameters(kind)):
            equal(mine.data(), other.data().asnumpy())
    return list(trainers.values())


def trainers_that_take_turns_are_exact(store: KVStoreBase) -> None:
    for trainer in _train_beside_one_process(store.rank, "p3", "p3"):
        assert trainer._update_on_kvstore is True


def trainers_that_update_on_workers_take_turns(store: KVStoreBase) -> None:
    for trainer in _train_beside_one_process(store.rank, "p3", "p3", update_on_kvstore=False):
        assert trainer._update_on_kvstore is False


def trainers_may_be_given_the_same_store(store: KVStoreBase) -> None:
    given = mx.kv.create("p3")
    trainers = _train_beside_one_process(store.rank, given, given)
    stores = [trainer._kvstore for trainer in trainers]
    assert given in stores and stores[0] is not stores[1]


CHECKS = [
    slices_of_all_stores_change_their_size,
    stores_have_keys_of_their_own,
    one_store_updates_while_another_sums,
    steps_of_two_stores_may_overlap,
    trainers_that_take_turns_are_exact,
    trainers_that_update_on_workers_take_turns,
    trainers_may_be_given_the_same_store,
]
