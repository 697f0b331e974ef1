"""Optimizers on servers beside MXNet's own Updater: equal bit for bit.

Argument: the folder for the names of the checks that pass. One worker, so that no sum is rounded;
one store, on which one optimizer is set after the other.
"""

import p3kv  # noqa: F401, I001
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
import numpy as np
import own_mxnet_optimizers  # noqa: F401  it registers some
import pytest
from checks import equal, random, run
from mxnet import lr_scheduler
from mxnet.kvstore import KVStoreBase

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet.optimizers.server_optimizer import _mixed
from p3kv.server.optimizer import WHOLE

STEPS = 5
SHAPES = [(1,), (37,), (100,), (23, 17)]
OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "sgd": {},
    "sgd momentum": {"momentum": 0.9},
    "sgd clipped": {"momentum": 0.5, "clip_gradient": 0.3},
    "sgd not lazy": {"momentum": 0.9, "lazy_update": False},
    "sgd continued": {"momentum": 0.9, "begin_num_update": 20},
    "ccsgd": {"momentum": 0.9},
    "nag": {},
    "nag momentum": {"momentum": 0.9, "clip_gradient": 0.3},
    "signum": {"momentum": 0.9, "wd_lh": 0.01},
    "signum without momentum": {"momentum": 0.0},
    "adagrad": {"eps": 1e-6},
    "adagrad clipped": {"clip_gradient": 0.3},
    "rmsprop": {"gamma1": 0.8},
    "rmsprop centered": {"centered": True, "gamma1": 0.8, "gamma2": 0.7, "clip_weights": 0.5},
    "adadelta": {"rho": 0.8, "clip_gradient": 0.3},
    "ftrl": {"lamda1": 0.02, "beta": 0.5},
    "ftrl clipped": {"clip_gradient": 0.3},
    "adam": {},
    "adam clipped": {"beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "clip_gradient": 0.3},
    "adam continued": {"begin_num_update": 7},
    "adamax": {"beta1": 0.8, "clip_gradient": 0.3},
    "ftml": {"beta1": 0.5},
    "ftml clipped": {"clip_gradient": 0.3},
    "dcasgd": {"lamda": 0.1, "clip_gradient": 0.3},
    "test": {},
}
"""Slice by slice."""
WHOLE_OPTIMIZERS: Dict[str, Dict[str, Any]] = {
    "lars": {},
    "lars momentum": {"momentum": 0.9, "eta": 0.5, "clip_gradient": 0.3},
    "lamb": {},
    "lamb bounded": {"lower_bound": 0.1, "upper_bound": 0.2, "clip_gradient": 0.3},
    "lamb uncorrected": {"bias_correction": False, "begin_num_update": 4},
    "lbsgd": {"momentum": 0.9, "updates_per_epoch": 1},
    "lbsgd by lars": {"momentum": 0.9, "warmup_strategy": "lars"},
    "lbsgd in large batches": {"batch_scale": 2, "warmup_strategy": "sqrt", "begin_epoch": 1},
    "groupadagrad": {"wd": 0.0, "eps": 1e-3},
    "groupadagrad clipped": {"wd": 0.0, "clip_gradient": 0.3},
    "bynorm": {"needed": {"least": 0.01}},
}
IN_ORDER: Dict[str, Dict[str, Any]] = {
    "nadam": {},
    "nadam clipped": {"beta1": 0.8, "schedule_decay": 0.1, "clip_gradient": 0.3},
    "nadam continued": {"begin_num_update": 7},
}
"""Slice by slice, by numbers that depend on the order of the keys."""
OTHERS: Dict[str, Dict[str, Any]] = {"cubic": {}, "counting": {}, "sgld": {}, "jittering": {}}
ALL = {**OPTIMIZERS, **WHOLE_OPTIMIZERS, **IN_ORDER, **OTHERS}


class Sawtooth(lr_scheduler.LRScheduler):
    """A user's own."""

    def __call__(self, num_update: int) -> float:
        return self.base_lr / (1 + num_update % 3)


SCHEDULERS: Dict[str, Callable[[], lr_scheduler.LRScheduler]] = {
    "factor": partial(lr_scheduler.FactorScheduler, 2, 0.5, base_lr=0.3),
    "factor that stops": partial(
        lr_scheduler.FactorScheduler, 1, 0.5, stop_factor_lr=0.06, base_lr=0.3
    ),
    "factor after a warm-up": partial(
        lr_scheduler.FactorScheduler, 2, 0.5, base_lr=0.3, warmup_steps=3, warmup_begin_lr=0.01
    ),
    "multifactor": partial(lr_scheduler.MultiFactorScheduler, [2, 3, 7], 0.3, base_lr=0.3),
    "poly": partial(lr_scheduler.PolyScheduler, 8, base_lr=0.3, pwr=3, final_lr=0.01),
    "user": partial(Sawtooth, base_lr=0.3),
    "cosine": partial(
        lr_scheduler.CosineScheduler, 8, base_lr=0.3, final_lr=0.01, warmup_steps=2,
        warmup_mode="constant",
    ),
}  # fmt: skip
Make = Callable[[], mx.optimizer.Optimizer]


class Beside:
    """The same keys and gradients for the store and for MXNet's Updater."""

    _numbers = iter(range(10**6))

    def __init__(
        self, store: KVStoreBase, make: Make, dtype: str = "float32", shapes: List[tuple] = SHAPES
    ) -> None:
        self._store = store
        self._dtype = dtype
        self.optimizer, self._reference = make(), make()
        self._updater = mx.optimizer.get_updater(self._reference)
        store.set_optimizer(self.optimizer)
        self._weights: Dict[str, List[mx.nd.NDArray]] = {}
        for name, shape in zip("abcdefgh", shapes):
            self.add_key(name, shape)

    def add_key(self, name: str, shape: tuple) -> None:
        """Declares a key; its number is new, its name is the same in every check."""
        number = next(self._numbers)
        for optimizer in (self.optimizer, self._reference):
            optimizer.idx2name[number] = f"{name}_weight"
        value = random(shape, number, dtype=self._dtype)
        pair = [mx.nd.array(value, dtype=self._dtype) for _ in range(2)]
        self._store.init(number, pair[0])
        self._weights[number] = pair

    def set_again(self, make: Make) -> None:
        """Another optimizer for the same keys, which knows nothing of the first."""
        old = self._reference
        self.optimizer, self._reference = make(), make()
        for optimizer in (self.optimizer, self._reference):
            optimizer.idx2name = dict(old.idx2name)
        self._updater = mx.optimizer.get_updater(self._reference)
        self._store.set_optimizer(self.optimizer)

    def change(self, change: Callable[[mx.optimizer.Optimizer], Any]) -> None:
        """Changes both optimizers alike."""
        change(self.optimizer)
        change(self._reference)

    def before_update(self, number: int) -> None:
        """Called before the reference is updated."""

    def step(self, steps: int = 1, but: str = "") -> None:
        """Trains all keys but those with these names."""
        for step in range(steps):
            for number, (weight, reference) in self._weights.items():
                if self.optimizer.idx2name[number][0] in but:
                    continue
                value = random(weight.shape, number, step, 1, dtype=self._dtype)
                gradient = mx.nd.array(value, dtype=self._dtype)
                self._store.pushpull(number, gradient, out=weight)
                self.before_update(number)
                self._updater(number, gradient.copy(), reference)
                equal(gradient, value)
        for weight, reference in self._weights.values():
            assert np.isfinite(weight.asnumpy()).all()
            equal(weight, reference.asnumpy())
        # What trainer.learning_rate tells is true, too.
        assert self.optimizer.learning_rate == self._reference.learning_rate


def made(name: str, **more: Any) -> mx.optimizer.Optimizer:
    # A rate would take the place of the scheduler's own.
    rate = None if "lr_scheduler" in more else 0.1
    settings = {"learning_rate": rate, "wd": 0.01, "rescale_grad": 0.5, **ALL[name], **more}
    return mx.optimizer.create(name.split()[0], param_idx2name={}, **settings)


def shapes_for(name: str) -> List[tuple]:
    return [(5, 60), (37, 1), (1, 1)] if name.startswith("group") else SHAPES


def the_optimizer(name: str, store: KVStoreBase) -> None:
    Beside(store, partial(made, name), shapes=shapes_for(name)).step(STEPS)


def schedulers_of_optimizers_that_need_whole_tensors(store: KVStoreBase) -> None:
    for name in SCHEDULERS:
        the_scheduler(name, store, ("lars momentum", "lbsgd", "lbsgd in large batches"))


def the_scheduler(
    name: str, store: KVStoreBase, names: Sequence[str] = ("sgd momentum", "adam", "nadam")
) -> None:
    for optimizer in names:
        beside = Beside(store, lambda o=optimizer: made(o, lr_scheduler=SCHEDULERS[name]()))
        rates = set()
        for _ in range(10):
            beside.step()
            rates.add(beside.optimizer.learning_rate)
        assert len(rates) > 2, "this scheduler changes nothing"
        # A setting that changes does not turn the schedule back, also where it is at its end.
        beside.change(lambda o: setattr(o, "wd", 0.5))
        beside.step(4)


def float64_is_updated_in_float64(store: KVStoreBase) -> None:
    for name in ("sgd momentum", "adam"):
        Beside(store, partial(made, name), "float64").step(STEPS)


def float64_on_whole_tensors(store: KVStoreBase) -> None:
    # MXNet's own GroupAdaGrad can't update float64.
    for name in ("lars momentum", "lamb", "lbsgd by lars", "bynorm"):
        Beside(store, partial(made, name), "float64").step(STEPS)


def random_numbers_follow_from_worker_0_s_seed(store: KVStoreBase) -> None:
    for name in ("sgld", "jittering"):
        found = []
        for seed in (3, 3, 4):
            mx.random.seed(seed)
            beside = Beside(store, partial(made, name))
            updates: Dict[int, int] = {}

            def seed_reference(
                number: int, drawn: int = store._pushes.optimizer._seed, updates: dict = updates
            ) -> None:
                updates[number] = updates.get(number, 0) + 1
                mx.random.seed(_mixed(drawn, number, WHOLE, updates[number]))

            beside.before_update = seed_reference  # type: ignore[method-assign]
            beside.step(2)
            found.append(store._pushes.optimizer._seed)
        assert found[0] == found[1] != found[2]


def rates_and_keys_that_change_with_numbers_that_keys_share(name: str, store: KVStoreBase) -> None:
    """The first update after a change has other numbers than the next."""
    beside = Beside(store, partial(made, name))
    beside.step(2, but="d")
    beside.change(lambda o: o.set_learning_rate(0.3))
    beside.step(1, but="bc")
    beside.change(lambda o: o.set_learning_rate(0.2))
    beside.add_key("late", (301,))
    beside.step(2)
    beside.change(lambda o: o.set_learning_rate(0.3))
    beside.step(2, but="bd")
    beside.set_again(lambda: made(name, lr_scheduler=SCHEDULERS["user"]()))
    beside.step(3, but="l")
    beside.step(3)


def updates_are_counted_by_the_store(store: KVStoreBase) -> None:
    """And not those of other stores, which step between."""
    besides = [Beside(mx.kv.create("p3"), partial(made, "counting")) for _ in range(2)]
    for number, steps in ((0, 2), (1, 1), (0, 1), (1, 3), (0, 2)):
        besides[number].step(steps)


def multipliers_by_name_are_honoured(store: KVStoreBase) -> None:
    beside = Beside(store, partial(made, "sgd momentum"))
    beside.change(lambda o: o.set_lr_mult({"a_weight": 0.1, "c_weight": 0.0}))
    beside.change(lambda o: o.set_wd_mult({"b_weight": 5.0, "d_weight": 0.0}))
    beside.step(STEPS)


def multipliers_of_parameters_are_honoured_and_may_change(store: KVStoreBase) -> None:
    """gluon's Trainer puts its Parameters there; MXNet's own servers lose them."""
    beside = Beside(store, partial(made, "adam"))
    parameters = {
        number: SimpleNamespace(lr_mult=0.5 + i, wd_mult=2.0 * i)
        for i, number in enumerate(beside._weights)
    }
    beside.change(lambda o: setattr(o, "param_dict", parameters))
    beside.step(2)
    next(iter(parameters.values())).lr_mult = 0.25
    beside.step(2)


def a_changed_setting_holds_from_the_next_step_on(store: KVStoreBase) -> None:
    beside = Beside(store, partial(made, "sgd momentum"))
    beside.step(2)
    beside.change(lambda o: o.set_learning_rate(0.3))
    beside.step(2)
    beside.change(lambda o: setattr(o, "wd", 0.5))
    beside.step()
    beside.change(lambda o: setattr(o, "rescale_grad", 2.0))
    beside.change(lambda o: setattr(o, "momentum", 0.1))
    beside.step(2)
    for rate in np.linspace(0.1, 0.2, 10):
        beside.change(lambda o, rate=rate: o.set_learning_rate(rate))
        beside.step()


def a_key_that_joins_later_has_a_count_of_its_own(store: KVStoreBase) -> None:
    make = partial(made, "adam")
    beside = Beside(store, lambda: make(lr_scheduler=SCHEDULERS["multifactor"]()))
    beside.step(3)
    beside.add_key("late", (301,))
    beside.step(3)


def an_optimizer_set_again_begins_afresh(store: KVStoreBase) -> None:
    beside = Beside(store, partial(made, "adam"))
    beside.step(3)
    beside.change(lambda o: o.set_learning_rate(0.3))
    beside.step(3)
    for name in ("adam", "sgd momentum", "sgd momentum", "adam clipped"):
        make = partial(made, name)
        beside.set_again(lambda make=make: make(lr_scheduler=SCHEDULERS["factor"]()))
        beside.step(4)


def pushes_before_a_new_optimizer_are_updated_by_the_old_one(store: KVStoreBase) -> None:
    shape = (4001,)
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
    store.init("old and new", mx.nd.zeros(shape))
    gradient, out = mx.nd.ones(shape), mx.nd.zeros(shape)
    for rate in range(1, 6):
        # Nobody waits here: pushes are still under way when the next optimizer comes.
        store.set_optimizer(mx.optimizer.create("test", rescale_grad=10.0**rate))
        for _ in range(rate):
            store.push("old and new", gradient)
    store.pull("old and new", out=out)
    equal(out, np.full(shape, 10 + 200 + 3000 + 40000 + 500000, np.float32))


def keys_of_several_servers_are_refused_to_an_optimizer_of_whole_tensors(
    store: KVStoreBase,
) -> None:
    beside = Beside(store, partial(made, "sgd momentum"))
    beside.step()
    for name in ("lars", "lamb", "lbsgd", "sgld", "groupadagrad", "bynorm"):
        said = rf"(?i){name}, set after .*: it needs whole.*before kv\."
        with pytest.raises(NotSupportedError, match=said):
            store.set_optimizer(made(name))
    beside.step()


def keys_of_one_server_may_get_an_optimizer_of_whole_tensors_later(store: KVStoreBase) -> None:
    shapes = [(90,), (3, 30), (1,)]
    beside = Beside(store, partial(made, "sgd momentum"), shapes=shapes)
    beside.step(2)
    for name in ("lamb", "adam", "lars momentum", "nadam"):
        beside.set_again(partial(made, name))
        beside.step(3)


class Unknown(mx.optimizer.SGD):
    """Not registered, so nobody on the servers knows it."""


class SGD(mx.optimizer.SGD):
    """Not MXNet's, but of the same name."""


def what_no_server_can_make_is_refused(store: KVStoreBase) -> None:
    with pytest.raises(NotSupportedError, match=r"Unknown of __main__.* P3KV_OPTIMIZERS"):
        store.set_optimizer(Unknown())
    with pytest.raises(NotSupportedError, match="give it another name"):
        store.set_optimizer(SGD())
    Beside(store, partial(made, "sgd")).step()


def named(kind: Callable[[str, KVStoreBase], None], name: str) -> Callable[[KVStoreBase], None]:
    check = partial(kind, name)
    check.__name__ = f"{kind.__name__}_{name.replace(' ', '_')}"  # type: ignore[attr-defined]
    return check


CHECKS = [
    # First, while no key lies on several servers.
    *[named(the_optimizer, name) for name in WHOLE_OPTIMIZERS],
    *[
        named(rates_and_keys_that_change_with_numbers_that_keys_share, name)
        for name in ("lars momentum", "lbsgd")
    ],
    float64_on_whole_tensors,
    schedulers_of_optimizers_that_need_whole_tensors,
    random_numbers_follow_from_worker_0_s_seed,
    keys_of_one_server_may_get_an_optimizer_of_whole_tensors_later,
    *[named(the_optimizer, name) for name in (*IN_ORDER, "cubic")],
    named(rates_and_keys_that_change_with_numbers_that_keys_share, "nadam"),
    *[named(the_optimizer, name) for name in OPTIMIZERS],
    *[named(the_scheduler, name) for name in SCHEDULERS],
    float64_is_updated_in_float64,
    updates_are_counted_by_the_store,
    multipliers_by_name_are_honoured,
    multipliers_of_parameters_are_honoured_and_may_change,
    a_changed_setting_holds_from_the_next_step_on,
    a_key_that_joins_later_has_a_count_of_its_own,
    an_optimizer_set_again_begins_afresh,
    pushes_before_a_new_optimizer_are_updated_by_the_old_one,
    keys_of_several_servers_are_refused_to_an_optimizer_of_whole_tensors,
    what_no_server_can_make_is_refused,
]

if __name__ == "__main__":
    run(CHECKS, mx.kv.create("p3"), sys.argv[1])
