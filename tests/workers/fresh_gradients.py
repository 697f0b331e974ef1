"""Gradients that not every worker has computed, compared bit for bit with one process.

Arguments: a folder, and names of checks (by default all). Gradients are whole numbers, so their sum
is the same in every order. Each check has a Trainer and a store of its own.
"""

import p3kv  # noqa: F401, I001
import os
import sys
from functools import partial
from itertools import count
from tempfile import TemporaryDirectory
from typing import Any, Callable, Dict, List, Optional, Sequence

import mxnet as mx
import numpy as np
import pytest
from checks import Check, equal, run
from mxnet import autograd, gluon
from mxnet.kvstore import KVStoreBase

WORKERS = int(os.environ.get("DMLC_NUM_WORKER", "1"))
"""Without a job this process trains alone."""
SHAPES = [(37, 3), (1,), (5, 40), (64,)]
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
ADAM = {"learning_rate": 0.1, "wd": 0.01}

Has = Callable[[int], bool]
"""Whether a replica of the network, counted over all workers and their devices, has a gradient."""
ALL: Has = lambda replica: True  # noqa: E731
NONE: Has = lambda replica: False  # noqa: E731
FIRST: Has = lambda replica: replica == 0  # noqa: E731
OTHERS: Has = lambda replica: replica > 0  # noqa: E731
TABLE = [
    (ALL, ALL, ALL, ALL),
    (ALL, FIRST, OTHERS, NONE),
    (NONE, NONE, NONE, NONE),
    (OTHERS, NONE, FIRST, ALL),
    (NONE, OTHERS, ALL, FIRST),
    (FIRST, FIRST, FIRST, FIRST),
    (OTHERS, OTHERS, OTHERS, OTHERS),
    (ALL, NONE, NONE, NONE),
    (FIRST, ALL, OTHERS, NONE),
]
"""By step: who has a gradient of each parameter. The third is never computed again by some."""
ALIKE = [(ALL, ALL, NONE, NONE), (NONE, NONE, ALL, ALL)] * 3 + [(NONE,) * 4, (ALL,) * 4] * 2
_seeds = count(1)


class Beside:
    """The same training twice: with a Trainer and a store, and in one process without any."""

    def __init__(
        self,
        store: KVStoreBase,
        on_servers: bool = True,
        optimizer: str = "sgd",
        settings: Optional[Dict[str, Any]] = None,
        dtype: str = "float32",
        devices: int = 1,
        kvstore: Any = "p3",
        seed: Optional[int] = None,
    ) -> None:
        self._rank = store.rank
        self._devices = [mx.cpu(device) for device in range(devices)]
        self._dtype = dtype
        self._seed = next(_seeds) if seed is None else seed
        self.mine, self.alone = self._parameters(self._devices), self._parameters([mx.cpu()])
        settings = dict(settings or MOMENTUM)
        scheduled = settings.pop("scheduled", False)
        make = partial(_made, optimizer, settings, scheduled)
        self.trainer = gluon.Trainer(
            self.mine, make(), kvstore=kvstore, update_on_kvstore=on_servers
        )
        self.trainer_alone = gluon.Trainer(self.alone, make(), kvstore=None)
        self.steps = 0

    def _parameters(self, devices: Sequence[mx.Context]) -> List[gluon.Parameter]:
        made = []
        for place, shape in enumerate(SHAPES):
            parameter = gluon.Parameter(f"fresh{place}", shape=shape, dtype=self._dtype)
            parameter.initialize(ctx=list(devices))
            first = np.random.RandomState([self._seed, place]).standard_normal(shape)
            parameter.set_data(mx.nd.array(first, dtype=self._dtype))
            made.append(parameter)
        return made

    def backward(self, has: Sequence[Has]) -> None:
        """Computes gradients: this worker's, and in the one process those of all workers."""
        step, devices = self.steps, len(self._devices)
        mine, alone = [], []
        for place, (has_one, shape) in enumerate(zip(has, SHAPES)):
            for replica in filter(has_one, range(WORKERS * devices)):
                seeds = [self._seed, place, step, replica]
                given = np.random.RandomState(seeds).randint(-9, 10, shape)
                alone.append((self.alone[place], mx.cpu(), given))
                if replica // devices == self._rank:
                    mine.append((self.mine[place], self._devices[replica % devices], given))
        for losses in (mine, alone):
            with autograd.record():
                terms = [
                    (one.data(device) * mx.nd.array(given, device, self._dtype)).sum()
                    for one, device, given in losses
                ]
            if terms:
                autograd.backward(terms)
        self.steps += 1

    def step(self, has: Sequence[Has]) -> None:
        """One step of both, and compares all weights."""
        self.backward(has)
        self.trainer.step(2, ignore_stale_grad=True)
        self.trainer_alone.step(2, ignore_stale_grad=True)
        self.compare()

    def compare(self) -> None:
        """All weights on all devices are those of one process."""
        for mine, alone in zip(self.mine, self.alone):
            for array in mine.list_data():
                equal(array, alone.data().asnumpy())


def _made(optimizer: str, settings: Dict[str, Any], scheduled: bool) -> mx.optimizer.Optimizer:
    more = {}
    if scheduled:
        more["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    return mx.optimizer.create(optimizer, **settings, **more)


def weights_are_those_of_one_process(on_servers: bool, store: KVStoreBase) -> None:
    for optimizer, settings in (("sgd", MOMENTUM), ("adam", ADAM)):
        beside = Beside(store, on_servers, optimizer, settings)
        for has in TABLE:
            beside.step(has)


def a_gradient_is_not_sent_again(on_servers: bool, store: KVStoreBase) -> None:
    """One parameter that is used in the first step only."""
    parameter = gluon.Parameter("once", shape=(1,), init="ones")
    parameter.initialize()
    other = gluon.Parameter("always", shape=(1,), init="ones")
    other.initialize()
    trainer = gluon.Trainer(
        [parameter, other], "sgd", {"learning_rate": 0.1}, kvstore="p3",
        update_on_kvstore=on_servers,
    )  # fmt: skip
    for step in range(3):
        with autograd.record():
            loss = other.data() + (0 if step else parameter.data())
        loss.backward()
        trainer.step(2, ignore_stale_grad=True)
        np.testing.assert_allclose(parameter.data().asnumpy(), [1 - 0.1 * WORKERS / 2], rtol=1e-6)


def a_schedule_counts_updates(on_servers: bool, store: KVStoreBase) -> None:
    for optimizer, settings in (("sgd", MOMENTUM), ("adam", ADAM)):
        beside = Beside(store, on_servers, optimizer, {**settings, "scheduled": True})
        for has in ALIKE:
            beside.step(has)


def several_devices_have_gradients_or_not(on_servers: bool, store: KVStoreBase) -> None:
    beside = Beside(store, on_servers, devices=2)
    second: Has = lambda replica: replica == 1  # noqa: E731
    last: Has = lambda replica: replica == 2 * WORKERS - 1  # noqa: E731
    for has in [*TABLE, (second, last, NONE, ALL), (last, NONE, second, NONE)]:
        beside.step(has)


def half_precision_is_right(on_servers: bool, store: KVStoreBase) -> None:
    settings = {**MOMENTUM, "multi_precision": True}
    beside = Beside(store, on_servers, settings=settings, dtype="float16")
    for has in TABLE:
        beside.step(has)


def steps_are_clipped_by_the_norm_of_what_is_fresh(store: KVStoreBase) -> None:
    own = mx.kv.create("p3")
    own.clip_global_norm(3.0)
    beside = Beside(store, kvstore=own)
    for has in TABLE:
        beside.backward(has)
        beside.trainer.step(2, ignore_stale_grad=True)
        fresh = [one.grad() for one in beside.alone if one.data()._fresh_grad]
        norm = gluon.utils.clip_global_norm(fresh, 3.0) if fresh else 0.0
        beside.trainer_alone.step(2, ignore_stale_grad=True)
        assert own.global_norm() == pytest.approx(norm, rel=1e-6)
        for mine, alone in zip(beside.mine, beside.alone):
            actual, expected = mine.data().asnumpy(), alone.data().asnumpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def a_codec_keeps_what_is_left_for_the_next_gradient(store: KVStoreBase) -> None:
    parameter = gluon.Parameter("coded", shape=(9,), init="ones")
    parameter.initialize()
    other = gluon.Parameter("always", shape=(1,), init="ones")
    other.initialize()
    trainer = gluon.Trainer(
        [parameter, other], "sgd", {"learning_rate": 1.0}, kvstore="p3",
        compression_params={"type": "2bit", "threshold": 0.5},
    )  # fmt: skip
    # Worker 0 sends nothing of its first 0.375, and 0.5 when it has 0.75.
    for has, expected in ((FIRST, 1.0), (NONE, 1.0), (OTHERS, 1.0), (FIRST, 0.5), (NONE, 0.5)):
        with autograd.record():
            loss = other.data() * 0
            if has(store.rank):
                loss = loss + (parameter.data() * 0.375).sum()
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
        equal(parameter.data(), np.full(9, expected, np.float32))


def rows_are_updated_where_any_worker_has_a_gradient(store: KVStoreBase) -> None:
    """Momentum changes all rows, also those that are not touched."""
    rows, columns = 50, 3
    for lazy in (False, True):
        settings = {**MOMENTUM, "lazy_update": lazy}
        both = []
        for kvstore in ("p3", None):
            parameter = gluon.Parameter(
                "table", shape=(rows, columns), grad_stype="row_sparse", init="ones"
            )
            parameter.initialize()
            both.append((parameter, gluon.Trainer([parameter], "sgd", settings, kvstore=kvstore)))
        for step, has in enumerate([ALL, FIRST, NONE, OTHERS, NONE, NONE, ALL, OTHERS]):
            for (parameter, _), ranks in zip(both, ([store.rank], range(WORKERS))):
                chosen = [
                    mx.nd.array(np.random.RandomState([step, rank]).randint(0, rows, 7))
                    for rank in filter(has, ranks)
                ]
                if chosen:
                    numbers = mx.nd.concat(*chosen, dim=0)
                    with autograd.record():
                        found = mx.nd.Embedding(
                            numbers, parameter.data(), rows, columns, sparse_grad=True
                        )
                    found.backward()
            for _, trainer in both:
                trainer.step(2, ignore_stale_grad=True)
            equal(both[0][0].data(), both[1][0].data().asnumpy())


def an_asynchronous_store_updates_with_what_is_fresh(store: KVStoreBase) -> None:
    beside = Beside(store, settings={"learning_rate": 0.5}, kvstore="dist_async_p3")
    for has in TABLE:
        beside.backward(has)
        beside.trainer.step(2, ignore_stale_grad=True)
        beside.trainer_alone.step(2, ignore_stale_grad=True)
    mx.nd.waitall()
    store._barrier()
    beside.backward((NONE,) * 4)
    beside.trainer.step(2, ignore_stale_grad=True)  # brings the newest values
    for mine, alone in zip(beside.mine, beside.alone):
        np.testing.assert_allclose(
            mine.data().asnumpy(), alone.data().asnumpy(), rtol=1e-5, atol=1e-5
        )
    store._barrier()


def sums_and_updates_may_be_called_apart(store: KVStoreBase) -> None:
    beside = Beside(store, on_servers=False)
    for has in TABLE:
        beside.backward(has)
        beside.trainer.allreduce_grads()
        beside.trainer.update(2, ignore_stale_grad=True)
        beside.trainer_alone.step(2, ignore_stale_grad=True)
        beside.compare()
    if WORKERS == 1:
        return
    beside.backward((ALL, ALL, OTHERS, ALL))
    beside.trainer.allreduce_grads()
    if store.rank == 0:
        with pytest.raises(UserWarning, match="Parameter `fresh2` on context cpu"):
            beside.trainer.update(2)
    beside.trainer.update(2, ignore_stale_grad=store.rank == 0)
    beside.trainer_alone.step(2)
    beside.compare()


def a_stale_gradient_is_refused_before_anything_is_sent(
    on_servers: bool, store: KVStoreBase
) -> None:
    beside = Beside(store, on_servers)
    with pytest.raises(UserWarning, match="Parameter `fresh0` on context cpu"):
        beside.trainer.step(2)
    beside.step(TABLE[0])
    beside.backward((ALL, ALL, NONE, ALL))
    for trainer in (beside.trainer, beside.trainer_alone):
        with pytest.raises(UserWarning, match="Gradient of Parameter `fresh2` on context cpu"):
            trainer.step(2)
    # In one process, too, what came before it has not been used: the step is made up for.
    beside.compare()
    for has in TABLE:
        beside.step(has)


def saved_states_have_the_counts_of_updates(store: KVStoreBase) -> None:
    beside = Beside(store, optimizer="adam", settings={**ADAM, "scheduled": True})
    for has in ALIKE[:5]:
        beside.step(has)
    with TemporaryDirectory() as folder:
        for name, trainer in (("mine", beside.trainer), ("alone", beside.trainer_alone)):
            trainer.save_states(f"{folder}/{name}")
        loaded = {}
        for name in ("mine", "alone"):
            updater = mx.optimizer.get_updater(mx.optimizer.create("adam"))
            with open(f"{folder}/{name}", "rb") as file:
                updater.set_states(file.read())
            optimizer = updater.optimizer
            loaded[name] = dict(optimizer._index_update_count), optimizer.num_update
        assert loaded["mine"] == loaded["alone"]
        beside.trainer.load_states(f"{folder}/mine")
        beside.trainer_alone.load_states(f"{folder}/alone")
    for has in ALIKE[5:]:
        beside.step(has)


def on(who: str, check: Callable[[bool, KVStoreBase], None]) -> Check:
    """The check with the optimizer on the servers or on the workers."""
    named = partial(check, who == "servers")
    named.__name__ = f"{check.__name__}_on_{who}"  # type: ignore[attr-defined]
    return named


TABLES = [
    on(who, check)
    for who in ("servers", "workers")
    for check in (weights_are_those_of_one_process, several_devices_have_gradients_or_not)
]
CHECKS = [
    *TABLES,
    *[
        on(who, check)
        for who in ("servers", "workers")
        for check in (
            a_gradient_is_not_sent_again,
            a_schedule_counts_updates,
            half_precision_is_right,
            a_stale_gradient_is_refused_before_anything_is_sent,
        )
    ],
    steps_are_clipped_by_the_norm_of_what_is_fresh,
    a_codec_keeps_what_is_left_for_the_next_gradient,
    rows_are_updated_where_any_worker_has_a_gradient,
    an_asynchronous_store_updates_with_what_is_fresh,
    sums_and_updates_may_be_called_apart,
    saved_states_have_the_counts_of_updates,
]

if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    chosen = [check for check in CHECKS if not names or check.__name__ in names]
    run(chosen, mx.kv.create("p3"), folder)
