"""Trains with gluon's Trainer by the rule `local`, and compares with the same training of all
workers in this process, bit for bit. P3KV_CONSISTENCY says how many steps there are between
exchanges. Where the job goes on from a checkpoint, only the rest of the steps is trained.

Arguments: a folder for files with optimizer states; perhaps after how many steps to end, when two
checkpoints are complete.
"""

import p3kv  # noqa: F401, I001
import os
import sys
from typing import List

import mxnet as mx
import numpy as np
from complete import Complete
from mxnet import autograd, gluon
from outer_reference import Outer
from p3kv.consistency import make_consistency
from p3kv.errors import NotSupportedError
from p3kv.store.turns import turns

STEPS, BATCH = 17, 8
LAST = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
RULE = make_consistency(os.environ["P3KV_CONSISTENCY"], 1).local
assert RULE is not None
FOLDER = sys.argv[1]


class Net(gluon.Block):
    """With a layer that only some steps use, and running statistics."""

    def __init__(self) -> None:
        super().__init__(prefix="")
        with self.name_scope():
            self.hidden = gluon.nn.Dense(16, activation="tanh", in_units=12, prefix="a_")
            self.norm = gluon.nn.BatchNorm(in_channels=16, prefix="b_")
            self.seldom = gluon.nn.Dense(16, in_units=16, prefix="c_")
            self.out = gluon.nn.Dense(3, in_units=16, prefix="d_")

    def forward(self, x: mx.nd.NDArray, uses_all: bool) -> mx.nd.NDArray:
        x = self.norm(self.hidden(x))
        return self.out(x + self.seldom(x) if uses_all else x)


def network(seed: int) -> Net:
    mx.random.seed(seed)
    net = Net()
    net.initialize(mx.init.Xavier())
    return net


def backward(net: Net, step: int, rank: int) -> None:
    random = np.random.RandomState(1000 * step + rank)
    x = mx.nd.array(random.standard_normal((BATCH, 12)))
    y = mx.nd.array(random.standard_normal((BATCH, 3)))
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(x, step % 4 == rank), y).sum()
    loss.backward()


def trainer(net: Net, store: object) -> gluon.Trainer:
    schedule = mx.lr_scheduler.FactorScheduler(5, 0.5)
    settings = {"learning_rate": 0.01, "wd": 1e-3, "lr_scheduler": schedule}
    return gluon.Trainer(net.collect_params(), "adam", settings, kvstore=store)


def trained(net: Net) -> List[mx.nd.NDArray]:
    """In the order of a Trainer's keys."""
    parameters = [one for _, one in sorted(net.collect_params().items())]
    return [one.data() for one in parameters if one.grad_req != "null"]


class Together:
    """All workers and the servers, in this process."""

    def __init__(self, workers: int) -> None:
        self.nets = [network(7) for _ in range(workers)]
        self.trainers = [trainer(one, None) for one in self.nets]
        every = [one.data() for _, one in sorted(self.nets[0].collect_params().items())]
        both = turns([one.size * 4 for one in every], RULE)  # a Trainer has keys of all
        kept = [one for _, one in sorted(self.nets[0].collect_params().items())]
        trains = [turn for turn, one in zip(both, kept) if one.grad_req != "null"]
        self.outer = Outer(RULE, trains, [one.asnumpy() for one in trained(self.nets[0])])

    def step(self, step: int) -> None:
        for rank, (net, one) in enumerate(zip(self.nets, self.trainers)):
            backward(net, step, rank)
            parts = len(self.nets) if RULE.adds else 1
            updated = [at for at, one_of in enumerate(trained(net)) if one_of._fresh_grad]
            self._multiply_learned(net, updated, parts)
            one.step(BATCH / parts, ignore_stale_grad=True)
            self._multiply_learned(net, updated, 1 / parts)
        for at, weights in enumerate(zip(*map(trained, self.nets))):
            learned = {rank: one.asnumpy() for rank, one in enumerate(weights)}
            for rank, now in self.outer.exchange(step, at, learned).items():
                weights[rank][:] = mx.nd.array(now)

    def average(self) -> None:
        for at, weights in enumerate(zip(*map(trained, self.nets))):
            learned = {rank: one.asnumpy() for rank, one in enumerate(weights)}
            self.outer.average(at, learned)
        self.take_values()

    def take_values(self) -> None:
        for value, weights in zip(self.outer.values, zip(*map(trained, self.nets))):
            for one in weights:
                one[:] = mx.nd.array(value)

    def _multiply_learned(self, net: Net, updated: List[int], by: float) -> None:
        """Where changes add up: what a worker does counts with its part."""
        for at in updated if RULE.adds else ():
            weight, base = trained(net)[at], mx.nd.array(self.outer.values[at])
            weight[:] = (weight - base) * by + base


def same(mine: List[mx.nd.NDArray], theirs: List[np.ndarray]) -> None:
    for one, other in zip(mine, theirs):
        np.testing.assert_array_equal(one.asnumpy(), other)


def count_once() -> None:
    """Where changes add up: gradients that do not depend on weights train as in one process."""
    for name, more in (("sgd", {"momentum": 0.9}), ("adam", {})):
        weights = []
        for store in (None, mx.kv.create("p3")):
            weight = gluon.Parameter(f"w_{name}", shape=(4,))
            weight.initialize(mx.init.One())
            settings = {"learning_rate": 0.05, "wd": 0.1, **more}
            one = gluon.Trainer([weight], name, settings, kvstore=store)
            for step in range(2 * RULE.steps):
                with autograd.record():
                    loss = (weight.data() * (step % 3)).sum() * BATCH
                loss.backward()
                one.step(BATCH * (1 if store is None else store.num_workers))
            weights.append(weight.data().asnumpy())
        np.testing.assert_allclose(weights[1], weights[0], rtol=1e-5)


def main() -> None:
    complete = Complete()
    store = mx.kv.create("p3")
    rank, workers = store.rank, store.num_workers
    net = network(7)
    training = trainer(net, store)
    together = Together(workers)
    begun = store.resumed_steps
    for step in range(1, LAST + 1):
        if step <= begun:
            together.step(step)
            continue
        if step == 7:  # MXNet makes other arrays of the same memory
            for one in (net, *together.nets):
                for grad_req in ("null", "write"):
                    one.hidden.weight.grad_req = grad_req
        backward(net, step, rank)
        training.step(BATCH, ignore_stale_grad=True)
        together.step(step)
        if step == 9:
            training.save_states(f"{FOLDER}/{rank}")
            training.load_states(f"{FOLDER}/{rank}")  # this worker's own
        if LAST < STEPS and rank == 0 and step in (6, LAST):
            complete.wait(2 if step == LAST else 1)
    store._barrier()
    same(trained(net), [one.asnumpy() for one in trained(together.nets[rank])])
    training._kvstore.synchronize()
    same(trained(net), together.outer.values)
    pulled = mx.nd.zeros(16)
    training._kvstore.pull(0, out=pulled)
    same([pulled], [together.outer.values[0]])
    try:
        training._kvstore.pull(0, out=trained(net)[0])
    except NotSupportedError as error:
        assert "call kv.synchronize" in str(error), error
    else:
        raise AssertionError("pulled into a weight")
    for call in (store.push, store.pushpull):
        try:
            call(0, mx.nd.zeros(16))
        except NotSupportedError as error:
            assert "kv.pushpull(key, gradient, out=weight)" in str(error), error
        else:
            raise AssertionError(call)
    if RULE.adds and LAST == STEPS and not begun:
        count_once()
    size_bytes = sum(parameter.data().size * 4 for parameter in net.collect_params().values())
    print(f"has sent the model {store.stats()['bytes_sent'] / size_bytes} times")
    if LAST == STEPS and not begun:
        together.outer.forget_sent()
        together.take_values()
        for step in range(STEPS + 1, STEPS + 2 * RULE.steps):
            training._kvstore.exchange()
            together.average()
            same(trained(net), [one.asnumpy() for one in trained(together.nets[rank])])
            backward(net, step, rank)
            training.step(BATCH, ignore_stale_grad=True)
            together.step(step)
    if "P3KV_CHECKPOINT_DIR" not in os.environ:
        sums = mx.kv.create("p3")  # has no optimizer
        sums.init("seen", mx.nd.zeros(2))
        total = mx.nd.ones(2)
        sums.pushpull("seen", total, out=total)
        same([total], [np.full(2, workers)])
    print(f"right by the rule local, after {begun} steps")


main()
