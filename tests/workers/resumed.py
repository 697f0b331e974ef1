"""Trains and saves optimizer states, or goes on from them: bit for bit as without an interruption.

Arguments: a folder, and "saves" or "loads". Both must have the same number of workers. Beside the
store, MXNet's own Updater trains in one process, writes files and goes on from the store's.
"""

import p3kv  # noqa: F401, I001
import os
import sys
from typing import Any, Dict, List, NamedTuple

import mxnet as mx
import numpy as np
import own_mxnet_optimizers  # noqa: F401  it registers some
from checks import random
from mxnet import autograd, gluon

SAVED, ALL = 4, 8
"""Steps until states are saved, and in all."""
SHAPES = [(37, 23), (1,), (64,)]
MATRICES = [(37, 23), (1, 1), (64, 1)]
SELDOM, EVERY = 2, 3
"""The parameter that is trained in one of so many steps only."""


class Case(NamedTuple):
    optimizer: str
    settings: Dict[str, Any]
    dtype: str = "float32"
    shapes: List[tuple] = SHAPES
    scheduled: bool = False
    random: bool = False
    """Whether one process draws other numbers."""


CASES = {
    "momentum": Case("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "scheduled": Case("adam", {"begin_num_update": 3}, scheduled=True),
    "stateless": Case("sgd", {"learning_rate": 0.1}),
    "half": Case("sgd", {"momentum": 0.9, "multi_precision": True}, "float16"),
    # These share numbers.
    "nadam": Case("nadam", {"learning_rate": 0.1}),
    "lars": Case("lars", {"momentum": 0.9}, scheduled=True),
    # States are saved after one of three gradients.
    "lbsgd": Case(
        "lbsgd", {"momentum": 0.9, "batch_scale": 3, "warmup_strategy": "sqrt"}, scheduled=True
    ),
    # On whole tensors.
    "lamb": Case("lamb", {"learning_rate": 0.1}),
    "group": Case("groupadagrad", {"learning_rate": 0.1}, shapes=MATRICES),
    "own": Case("bynorm", {"needed": {"least": 0.01}}),
    "sgld": Case("sgld", {"learning_rate": 0.1}, random=True),
    "own random": Case("jittering", {}, random=True),
}


def made(case: Case) -> mx.optimizer.Optimizer:
    more = {}
    if case.scheduled:
        more["lr_scheduler"] = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.1)
    return mx.optimizer.create(case.optimizer, **case.settings, **more)


def gradients(name: str, step: int, rank: int) -> List[np.ndarray]:
    seeds = list(CASES).index(name), step, rank
    dtype = CASES[name].dtype
    drawn = [random(shape, i, *seeds) for i, shape in enumerate(CASES[name].shapes)]
    if dtype == "float16":
        # Eighths: their sum is exact in float16.
        drawn = [np.rint(8 * one) / 8 for one in drawn]
    return [one.astype(dtype) for one in drawn]


def trained_in(step: int) -> List[int]:
    """The parameters that a step trains."""
    return [i for i in range(len(SHAPES)) if i != SELDOM or step % EVERY == 0]


class Training:
    """One Trainer, with a store and keys of its own."""

    def __init__(self, name: str, values: List[np.ndarray]) -> None:
        self._name = name
        self.parameters = []
        for i, value in enumerate(values):
            parameter = gluon.Parameter(f"{name}{i}", shape=value.shape, dtype=value.dtype)
            parameter.initialize()
            parameter.set_data(mx.nd.array(value, dtype=value.dtype))
            self.parameters.append(parameter)
        self.parameters[0].lr_mult = 0.5
        self.store = mx.kv.create("p3")
        self.trainer = gluon.Trainer(self.parameters, made(CASES[name]), kvstore=self.store)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            rank = self.store.rank
            given = gradients(self._name, step, rank)
            chosen = trained_in(step)
            for i, parameter in enumerate(self.parameters):
                parameter.grad_req = "write" if i in chosen else "null"
            with autograd.record():
                losses = [
                    (self.parameters[i].data() * mx.nd.array(given[i], dtype=given[i].dtype)).sum()
                    for i in chosen
                ]
            autograd.backward(losses)
            self.trainer.step(2)

    def weights(self) -> List[np.ndarray]:
        return [parameter.data().asnumpy() for parameter in self.parameters]


class Alone:
    """MXNet's own Updater on the sums of all workers' gradients."""

    def __init__(self, name: str, values: List[np.ndarray], num_workers: int) -> None:
        self._name = name
        self._num_workers = num_workers
        self.values = [mx.nd.array(value, dtype=value.dtype) for value in values]
        optimizer = made(CASES[name])
        optimizer.rescale_grad = 0.5
        self.updater = mx.optimizer.get_updater(optimizer)

    def train(self, first: int, last: int) -> None:
        self.updater.optimizer.set_lr_mult({0: 0.5})
        for step in range(first, last):
            of_ranks = [gradients(self._name, step, rank) for rank in range(self._num_workers)]
            for i in trained_in(step):
                total = sum(of_rank[i] for of_rank in of_ranks[1:]) + of_ranks[0][i]
                self.updater(i, mx.nd.array(total, dtype=total.dtype), self.values[i])

    def weights(self) -> List[np.ndarray]:
        return [value.asnumpy() for value in self.values]


def same(actual: List[np.ndarray], expected: List[np.ndarray], what: str) -> None:
    for i, (one, other) in enumerate(zip(actual, expected)):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=f"{what}, parameter {i}")


def contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def as_scripts_see_them(training: Training, path: str) -> None:
    """What Trainer and scripts take from the store's `_updater` is what the file has."""
    saved = mx.optimizer.get_updater(made(CASES["momentum"]))
    saved.set_states(contents(path))
    updater = training.store._updater
    assert updater.optimizer is training.trainer._optimizer
    assert updater.states.keys() == saved.states.keys()
    for key, state in updater.states.items():
        for one, other in zip(flat(state), flat(saved.states[key])):
            np.testing.assert_array_equal(one, other)


def flat(state: Any) -> List[np.ndarray]:
    if isinstance(state, (tuple, list, dict)):
        parts = state.values() if isinstance(state, dict) else state
        return [array for part in parts for array in flat(part)]
    return [
        state.asnumpy() if isinstance(state, mx.nd.NDArray) else np.array(state is None or state)
    ]


def saves(folder: str, name: str) -> None:
    begin = [random(shape, 5, dtype=CASES[name].dtype) for shape in CASES[name].shapes]
    training = Training(name, begin)
    training.train(0, SAVED)
    store = training.store
    mine = f"{folder}/{name}.by_rank{store.rank}"
    training.trainer.save_states(mine)
    as_scripts_see_them(training, mine)
    middle = training.weights()
    training.train(SAVED, ALL)
    end = training.weights()
    # The other worker goes on meanwhile.
    if store.rank == 0:
        training.trainer.save_states(f"{folder}/{name}.of_one")
    training.train(0, 1)
    # Workers that write the same file at the same time: it is whole.
    training.trainer.save_states(f"{folder}/{name}.all")
    mx.optimizer.get_updater(made(CASES[name])).set_states(contents(f"{folder}/{name}.all"))
    if store.rank == 0:
        np.savez(f"{folder}/{name}.middle.npz", *middle)
        np.savez(f"{folder}/{name}.end.npz", *end)
    if CASES[name].random:
        return
    alone = Alone(name, begin, store.num_workers)
    alone.train(0, SAVED)
    same(alone.weights(), middle, f"{name} alone")
    with open(f"{folder}/{name}.alone{store.rank}", "wb") as file:
        file.write(alone.updater.get_states(dump_optimizer=True))
    alone.updater.set_states(contents(mine))
    alone.train(SAVED, ALL)
    same(alone.weights(), end, f"{name} alone, from the store's states")
    if store.rank == 0:
        alone.updater.set_states(contents(f"{folder}/{name}.of_one"))
    alone.train(0, 1)
    same(alone.weights(), training.weights(), f"{name} alone, from what one worker has saved")
    # States of the past for the weights of now: what a store has is forgotten.
    training.trainer.load_states(mine)
    alone.updater.set_states(contents(mine))
    for one in (training, alone):
        one.train(0, 2)
    same(alone.weights(), training.weights(), f"{name} with old states")


def loads(folder: str, name: str) -> None:
    middle, end = (
        list(np.load(f"{folder}/{name}.{when}.npz").values()) for when in ("middle", "end")
    )
    for file in ("by_rank1", *([] if CASES[name].random else ["alone0"])):
        training = Training(name, middle)
        training.trainer.load_states(f"{folder}/{name}.{file}")
        assert training.store._updater.optimizer is training.trainer._optimizer
        training.train(SAVED, SAVED + 1)
        training.trainer.save_states(f"{folder}/{name}.{file}.again")
        training.train(SAVED + 1, ALL)
        same(training.weights(), end, f"{name}, from {file}")
    left = [path for path in os.listdir(folder) if path.endswith(str(os.getpid()))]
    assert not left, left


if __name__ == "__main__":
    for case in CASES:
        {"saves": saves, "loads": loads}[sys.argv[2]](sys.argv[1], case)
    print("all is as without an interruption")
