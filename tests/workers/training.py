"""What scripts do with gluon's Trainer beside plain steps, compared bit for bit with one process.

Each check has a Trainer and a store of its own. Two workers: then no order of a sum differs from
another.
"""

from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any, Callable, Dict

import mxnet as mx
import numpy as np
import pytest
from checks import Check, equal, random
from mxnet import autograd, gluon
from mxnet.gluon import nn
from mxnet.kvstore import KVStoreBase

from p3kv.errors import NotSupportedError

WORKERS = 2
ROWS, INPUTS = 4, 30
ADAM = {"learning_rate": 0.01, "wd": 0.01}
_seeds = count(1)


class Net(nn.Block):
    """A body and two heads, of which a forward pass takes one."""

    def __init__(self) -> None:
        super().__init__(prefix="training_")
        with self.name_scope():
            self.body = nn.Dense(20, activation="tanh", in_units=INPUTS)
            self.heads = [nn.Dense(3, in_units=20, prefix=f"head{n}_") for n in range(2)]
            for head in self.heads:
                self.register_child(head)

    def forward(self, x: mx.nd.NDArray, head: int) -> mx.nd.NDArray:
        return self.heads[head](self.body(x))


class Beside:
    """The same training twice: with a Trainer and a store, and in one process without any."""

    def __init__(self, rank: int, on_servers: bool) -> None:
        self._rank = rank
        self._seed = next(_seeds)
        self.mine, self._alone = self._net(), self._net()
        self._on_servers = on_servers
        self.begin_training()
        self._step = 0

    def begin_training(self) -> None:
        """A Trainer, whose optimizer has no states yet."""
        self._trainer = gluon.Trainer(
            self.mine.collect_params(), "adam", dict(ADAM), kvstore="p3",
            update_on_kvstore=self._on_servers,
        )  # fmt: skip
        self._optimizer = mx.optimizer.create("adam", **ADAM)
        self._updater = mx.optimizer.get_updater(self._optimizer)

    def set_grad_req(self, places: str, grad_req: str) -> None:
        """Changes grad_req where a parameter's name contains `places`."""
        for net in (self.mine, self._alone):
            for name, parameter in net.collect_params().items():
                if places in name:
                    parameter.grad_req = grad_req

    def change_weights(self, change: Callable[[nn.Block], None]) -> None:
        """Has `change` give the network other weights."""
        for net in (self.mine, self._alone):
            mx.random.seed(self._seed)
            change(net)

    def step(self, rows: int = ROWS, head: int = 0, passes: int = 1, **more: Any) -> None:
        """One step with `passes` backward passes; compares all weights."""
        self._backward(self.mine, self._rank, rows, head, passes)
        self._trainer.step(rows, **more)
        self._update_alone(rows, head, passes)
        self._step += 1
        for name, parameter in self._alone.collect_params().items():
            equal(self.mine.collect_params()[name].data(), parameter.data().asnumpy())

    def _net(self) -> Net:
        mx.random.seed(self._seed)
        net = Net()
        net.initialize(mx.init.Xavier())
        return net

    def _backward(self, net: Net, rank: int, rows: int, head: int, passes: int) -> None:
        for parameter in net.collect_params().values():
            if parameter.grad_req == "add":
                parameter.zero_grad()
        for number in range(passes):
            x = mx.nd.array(random((rows, INPUTS), self._seed, self._step, rank, number))
            with autograd.record():
                loss = (net(x, head) ** 2).sum()
            loss.backward()

    def _update_alone(self, rows: int, head: int, passes: int) -> None:
        used = [name for name in self._alone.collect_params() if f"head{1 - head}" not in name]
        parameters = {
            name: parameter
            for name, parameter in self._alone.collect_params().items()
            if name in used and parameter.grad_req != "null"
        }
        totals: Dict[str, np.ndarray] = {}
        for rank in range(WORKERS):
            self._backward(self._alone, rank, rows, head, passes)
            for name, parameter in parameters.items():
                mine = parameter.grad().asnumpy()
                totals[name] = totals[name] + mine if rank else mine
        self._optimizer.rescale_grad = 1 / rows
        for name, parameter in parameters.items():
            self._updater(name, mx.nd.array(totals[name]), parameter.data())


def a_batch_size_may_change_at_any_step(on_servers: bool, store: KVStoreBase) -> None:
    """MXNet's own distributed stores refuse it if they update on servers."""
    beside = Beside(store.rank, on_servers)
    beside.set_grad_req("head1", "null")
    for rows in (4, 4, 7, 1, 4):
        beside.step(rows)


def a_layer_may_be_frozen_and_trained_again(on_servers: bool, store: KVStoreBase) -> None:
    beside = Beside(store.rank, on_servers)
    beside.set_grad_req("head1", "null")
    # The first layer is the first to be pushed: it has the batch size of its step, too.
    for rows, grad_req in ((4, "write"), (3, "null"), (6, "write"), (5, "null"), (2, "write")):
        beside.set_grad_req("dense0", grad_req)
        beside.step(rows)
        beside.step(rows)


def gradients_may_add_up_over_several_passes(on_servers: bool, store: KVStoreBase) -> None:
    beside = Beside(store.rank, on_servers)
    beside.set_grad_req("", "add")
    beside.set_grad_req("head1", "null")
    for passes in (3, 1, 2):
        beside.step(passes=passes)


def set_data(net: nn.Block) -> None:
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)


def initialize_again(net: nn.Block) -> None:
    net.initialize(mx.init.Xavier(), force_reinit=True)


def load_parameters(net: nn.Block) -> None:
    with TemporaryDirectory() as folder:
        net.save_parameters(f"{folder}/weights")
        net.load_parameters(f"{folder}/weights")


WAYS_TO_CHANGE_WEIGHTS = (set_data, initialize_again, load_parameters)


def weights_that_a_script_changes_are_trained_on_on_workers(store: KVStoreBase) -> None:
    beside = Beside(store.rank, False)
    beside.set_grad_req("head1", "null")
    for change in WAYS_TO_CHANGE_WEIGHTS:
        beside.step()
        beside.change_weights(change)
    beside.step()


def weights_on_servers_change_for_a_new_trainer_only(store: KVStoreBase) -> None:
    beside = Beside(store.rank, True)
    beside.set_grad_req("head1", "null")
    for change in WAYS_TO_CHANGE_WEIGHTS:
        beside.change_weights(change)  # there are none on servers yet
        beside.step()
        with pytest.raises(NotSupportedError, match=r"update_on_kvstore=False.*a new Trainer"):
            beside.change_weights(change)
        beside.step()
        beside.begin_training()


def running_statistics_may_be_changed_at_any_time(store: KVStoreBase) -> None:
    """Each worker has its own, which are never pushed."""
    layer = nn.BatchNorm(in_channels=3, prefix="statistics_")
    layer.initialize()
    trainer = gluon.Trainer(layer.collect_params(), "sgd", kvstore="p3")
    mean, own = layer.running_mean, np.full(3, 5 + store.rank, np.float32)

    def step() -> np.ndarray:
        before = mean.data().asnumpy()
        with autograd.record():
            loss = layer(mx.nd.array(random((ROWS, 3), store.rank))).sum()
        loss.backward()
        trainer.step(ROWS)
        return before

    for _ in range(2):
        step()
        mean.initialize(force_reinit=True)
        equal(mean.data(), np.zeros(3, np.float32))
        mean.set_data(mx.nd.array(own))
        np.testing.assert_array_equal(step(), own)
        assert abs(mean.data().asnumpy() - own).max() < 1  # it goes on from there
        with TemporaryDirectory() as folder:
            mean.set_data(mx.nd.array(own + 1))
            mx.nd.save(f"{folder}/mean", {mean.name: mean.data()})
            mean.set_data(mx.nd.zeros(3))
            layer.collect_params(".*running_mean").load(f"{folder}/mean")
        np.testing.assert_array_equal(step(), own + 1)
    with pytest.raises(NotSupportedError, match="a new Trainer"):
        layer.gamma.set_data(mx.nd.ones(3))


def a_frozen_layer_that_was_changed_is_trained_by_a_new_trainer_only(store: KVStoreBase) -> None:
    net = nn.Dense(3, in_units=INPUTS, prefix="thawed_")
    net.initialize(mx.init.One())

    def step(trainer: gluon.Trainer) -> None:
        with autograd.record():
            loss = net(mx.nd.ones((1, INPUTS))).sum()
        loss.backward()
        trainer.step(store.num_workers)

    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="p3")
    step(trainer)
    changes = (
        lambda: net.weight.set_data(mx.nd.full((3, INPUTS), 7)),
        lambda: net.weight.initialize(mx.init.Constant(7), force_reinit=True),
    )
    for change in changes:
        net.weight.grad_req = "null"
        change()
        step(trainer)
        equal(net.weight.data(), np.full((3, INPUTS), 7, np.float32))
        net.weight.grad_req = "write"
        with pytest.raises(NotSupportedError, match=r"'thawed_weight' is trained again.*frozen"):
            step(trainer)
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="p3")
        step(trainer)
        equal(net.weight.data(), np.full((3, INPUTS), 6, np.float32))


def stale_gradients_update_nothing_on_workers(store: KVStoreBase) -> None:
    beside = Beside(store.rank, False)
    for head in (0, 1, 1, 0):
        beside.step(head=head, ignore_stale_grad=True)


def summed_gradients_can_be_changed_before_the_update(store: KVStoreBase) -> None:
    """`allreduce_grads` and `update` apart."""
    net = nn.Dense(3, in_units=INPUTS, prefix="apart_")
    net.initialize(mx.init.One())
    trainer = gluon.Trainer(
        net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="p3", update_on_kvstore=False
    )
    x = mx.nd.full((1, INPUTS), store.rank + 1)
    for _ in range(2):
        with autograd.record():
            loss = net(x).sum()
        loss.backward()
        trainer.allreduce_grads()
        equal(net.weight.grad(), np.full((3, INPUTS), 3, np.float32))
        net.weight.grad()[:] = 0.25
        trainer.update(1)
    equal(net.weight.data(), np.full((3, INPUTS), 0.5, np.float32))


def on(who: str, check: Callable[[bool, KVStoreBase], None]) -> Check:
    """The check with the optimizer on the servers or on the workers."""
    named = partial(check, who == "servers")
    named.__name__ = f"{check.__name__}_on_{who}"  # type: ignore[attr-defined]
    return named


CHECKS = [
    *[
        on(who, check)
        for who in ("servers", "workers")
        for check in (
            a_batch_size_may_change_at_any_step,
            a_layer_may_be_frozen_and_trained_again,
            gradients_may_add_up_over_several_passes,
        )
    ],
    weights_that_a_script_changes_are_trained_on_on_workers,
    weights_on_servers_change_for_a_new_trainer_only,
    running_statistics_may_be_changed_at_any_time,
    a_frozen_layer_that_was_changed_is_trained_by_a_new_trainer_only,
    stale_gradients_update_nothing_on_workers,
    summed_gradients_can_be_changed_before_the_update,
]
