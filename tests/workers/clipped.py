"""Clipping by the norm of all gradients on the servers, beside one process.

Arguments: the folder for the names of the checks that pass, and "exact" for weights that are equal
bit for bit. Two workers: then no order of a sum differs from another.
"""

import p3kv  # noqa: F401, I001
import math
import sys
from itertools import count
from typing import Any, Dict, List, Optional, Sequence

import mxnet as mx
import numpy as np
import pytest
from checks import random, run
from mxnet import autograd, gluon
from mxnet.kvstore import KVStoreBase

from p3kv.errors import ConfigError, NotSupportedError

WORKERS, STEPS = 2, 6
SHAPES = [(1,), (37, 23), (301,), (2, 3)]
GROWTH = [0.01, 10.0, 1.0, 0.1, 30.0, 0.01]
"""Of the gradients, by step: most steps are clipped, the first is not."""
EXACT = sys.argv[2:] == ["exact"]
_numbers = count()


def gradients(step: int, rank: int, dtype: str = "float32") -> List[np.ndarray]:
    return [
        (GROWTH[step % STEPS] * random(shape, i, step, rank)).astype(dtype)
        for i, shape in enumerate(SHAPES)
    ]


class Alone:
    """One process that clips the sums of all workers' gradients and updates by them."""

    def __init__(self, optimizer: mx.optimizer.Optimizer, values: Sequence[np.ndarray]) -> None:
        self.values = [mx.nd.array(value) for value in values]
        self.updater = mx.optimizer.get_updater(optimizer)
        self.norm = 0.0

    def step(self, totals: Dict[int, np.ndarray], max_norm: Optional[float]) -> bool:
        """Returns whether a gradient was scaled."""
        arrays = {i: mx.nd.array(total) for i, total in totals.items()}
        clips = False
        if max_norm is not None:
            squares = [np.square(total, dtype=np.float64).ravel() for total in totals.values()]
            self.norm = math.sqrt(math.fsum(np.concatenate(squares)))
            scale = np.float32(max_norm / (self.norm + 1e-8))
            clips = scale < 1
            if EXACT:
                arrays = {i: array * float(min(scale, 1)) for i, array in arrays.items()}
            else:
                norm = gluon.utils.clip_global_norm(list(arrays.values()), max_norm)
                np.testing.assert_allclose(norm, self.norm, rtol=1e-6)
        for i, array in arrays.items():
            self.updater(i, array, self.values[i])
        return bool(clips)

    def check(self, weights: Sequence[mx.nd.NDArray]) -> None:
        for weight, value in zip(weights, self.values):
            found, wish = weight.asnumpy(), value.asnumpy().astype(weight.dtype)
            if EXACT:
                np.testing.assert_array_equal(found, wish)
            else:
                # A sum of rounded terms: relative to the largest, not to each.
                bound = 2e-6 * np.abs(wish).max()
                np.testing.assert_allclose(found, wish, rtol=2e-6, atol=bound)


class Training:
    """A Trainer beside `Alone`; the first parameter is trained in every third step."""

    def __init__(self, kv: Any, name: str, **settings: Any) -> None:
        number = next(_numbers)
        self.parameters = []
        for i, shape in enumerate(SHAPES):
            parameter = gluon.Parameter(f"clipped{number}_{i}", shape=shape)
            parameter.initialize()
            parameter.set_data(mx.nd.array(random(shape, i, 9)))
            self.parameters.append(parameter)
        made = [mx.optimizer.create(name, **settings) for _ in range(2)]
        self.trainer = gluon.Trainer(self.parameters, made[0], kvstore=kv)
        made[1].rescale_grad = 1 / 4
        self.alone = Alone(made[1], [random(shape, i, 9) for i, shape in enumerate(SHAPES)])

    def step(self, rank: int, step: int, max_norm: Optional[float]) -> bool:
        chosen = [i for i in range(len(SHAPES)) if i or step % 3 == 1]
        given = gradients(step, rank)
        for i, parameter in enumerate(self.parameters):
            parameter.grad_req = "write" if i in chosen else "null"
        with autograd.record():
            losses = [(self.parameters[i].data() * mx.nd.array(given[i])).sum() for i in chosen]
        autograd.backward(losses)
        self.trainer.step(4)
        parts = [gradients(step, one) for one in range(WORKERS)]
        return self.alone.step({i: parts[0][i] + parts[1][i] for i in chosen}, max_norm)

    def check(self) -> None:
        self.alone.check([parameter.data() for parameter in self.parameters])


def trainers_clip_as_one_process(store: KVStoreBase) -> None:
    for name, settings in (
        ("sgd", {"momentum": 0.9, "learning_rate": 0.1, "wd": 0.01}),
        ("adam", {"learning_rate": 0.1}),
        ("lamb", {"learning_rate": 0.1}),
        ("nadam", {"learning_rate": 0.1}),
    ):
        kv = mx.kv.create("p3")
        kv.clip_global_norm(5.0)
        training = Training(kv, name, **settings)
        assert kv.global_norm() is None
        clipped = []
        for step in range(STEPS):
            max_norm = 5.0
            if step == 3:
                # It may follow the batch size, or be off for a while.
                max_norm = 0.5
                kv.clip_global_norm(max_norm)
                training.trainer.set_learning_rate(0.05)
                training.alone.updater.optimizer.set_learning_rate(0.05)
            elif step == 4:
                max_norm = None
                kv.clip_global_norm(None)
            elif step == 5:
                max_norm = 0.25
                kv.clip_global_norm(max_norm)
            clipped.append(training.step(store.rank, step, max_norm))
            norm = kv.global_norm()
            np.testing.assert_allclose(norm, training.alone.norm, rtol=0 if EXACT else 1e-6)
        training.check()
        assert clipped == [False, True, True, True, False, True], clipped


def trainers_that_take_turns_clip_each_by_its_own_norm(store: KVStoreBase) -> None:
    kv = mx.kv.create("p3")
    kv.clip_global_norm(5.0)
    trainings = [Training(kv, "sgd", learning_rate=0.1) for _ in range(2)]
    trainings.append(Training("p3", "sgd", learning_rate=0.1))
    for step in range(STEPS):
        for n, training in enumerate(trainings):
            training.step(store.rank, (step + n) % STEPS, 5.0 if n < 2 else None)
    for training in trainings:
        training.check()
    stores = {training.trainer._kvstore for training in trainings}
    assert len(stores) == 3 and kv in stores


def a_call_with_all_keys_is_a_step(store: KVStoreBase) -> None:
    kv = mx.kv.create("p3")
    optimizer = [mx.optimizer.create("adam", learning_rate=0.1) for _ in range(2)]
    kv.set_optimizer(optimizer[0])
    values = [random(shape, i, 8) for i, shape in enumerate(SHAPES)]
    alone = Alone(optimizer[1], values)
    weights = [mx.nd.array(value) for value in values]
    kv.init([0, 1, 2], weights[:3])
    kv.clip_global_norm(3)
    for step in range(STEPS):
        keys = [0, 1, 2]
        if step == 1:
            with pytest.raises(NotSupportedError, match="a whole step: give it the lists"):
                # Twice the same key makes a step of its own; another key comes too late.
                kv.push(1, mx.nd.array(gradients(9, store.rank)[1]))
                kv.push(0, mx.nd.array(gradients(9, store.rank)[0]))
            alone.step({1: gradients(9, 0)[1] + gradients(9, 1)[1]}, 3)
        if step >= 2:
            if step == 2:
                kv.init(3, weights[3])
            keys = [3, 0, 1, 2]
        given = [mx.nd.array(gradients(step, store.rank)[i]) for i in keys]
        out = [weights[i] for i in keys]
        if step % 2:
            kv.push(keys, given)
            kv.pull(keys, out=out)
        else:
            kv.pushpull(keys, given, out=out)
        parts = [gradients(step, rank) for rank in range(WORKERS)]
        alone.step({i: parts[0][i] + parts[1][i] for i in keys}, 3)
    alone.check(weights)


def sums_of_float16_are_clipped_in_float32(store: KVStoreBase) -> None:
    kv = mx.kv.create("p3")
    settings = {"momentum": 0.9, "learning_rate": 0.1}
    kv.set_optimizer(mx.optimizer.create("sgd", multi_precision=True, **settings))
    kv.clip_global_norm(5)
    values = [random(shape, i, 8, dtype="float16") for i, shape in enumerate(SHAPES)]
    alone = Alone(
        mx.optimizer.create("sgd", **settings), [value.astype("float32") for value in values]
    )
    weights = [mx.nd.array(value, dtype="float16") for value in values]
    keys = list(range(len(SHAPES)))
    kv.init(keys, weights)
    for step in range(3):
        parts = [gradients(step, rank, "float16") for rank in range(WORKERS)]
        kv.pushpull(keys, [mx.nd.array(g, dtype=g.dtype) for g in parts[store.rank]], out=weights)
        alone.step({i: parts[0][i].astype("float32") + parts[1][i] for i in keys}, 5)
    if EXACT:
        alone.check(weights)


def gradients_that_are_not_finite_pass_as_in_one_process(store: KVStoreBase) -> None:
    for bad in (math.inf, math.nan):
        kv = mx.kv.create("p3")
        kv.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
        kv.clip_global_norm(1)
        arrays = [mx.nd.ones(3), mx.nd.array([bad, 2])]
        weights = [mx.nd.zeros(3), mx.nd.zeros(2)]
        kv.init([0, 1], weights)
        kv.pushpull([0, 1], arrays, out=weights)
        assert str(kv.global_norm()) == str(bad)
        with pytest.warns(UserWarning, match="nan or inf"):
            gluon.utils.clip_global_norm(arrays, 1)
        for weight, array in zip(weights, arrays):
            np.testing.assert_array_equal(weight.asnumpy(), array.asnumpy())


def gradients_by_rows_count_in_the_norm(store: KVStoreBase) -> None:
    """An embedding with sparse gradients beside a dense layer; in some steps a worker has none."""
    kv = mx.kv.create("p3")
    rows, columns, steps = 300, 8, 6
    table, dense = random((rows, columns), 7, 1), random((columns, 5), 7, 2)
    embedding = gluon.nn.Embedding(rows, columns, sparse_grad=True)
    embedding.initialize()
    embedding(mx.nd.array([0]))
    embedding.weight.set_data(mx.nd.array(table))
    layer = gluon.Parameter(f"clipped_by_rows{next(_numbers)}", shape=dense.shape)
    layer.initialize()
    layer.set_data(mx.nd.array(dense))
    parameters = [embedding.weight, layer]
    trainer = gluon.Trainer(parameters, "sgd", {"learning_rate": 0.5}, kvstore=kv)
    kv.clip_global_norm(2.0)
    alone = Alone(mx.optimizer.create("sgd", learning_rate=0.5, rescale_grad=1 / 4), [table, dense])

    def batch(step: int, rank: int) -> np.ndarray:
        return np.random.RandomState([step, rank]).randint(0, rows, 20)

    for step in range(steps):
        with autograd.record():
            one = embedding(mx.nd.array(batch(step, store.rank)))
            given = mx.nd.array(random(dense.shape, step, store.rank))
            loss = (one * one).sum() + (layer.data() * given).sum()
        loss.backward()
        trainer.step(4)
        touched = np.zeros_like(table)
        for rank in range(WORKERS):
            for row in batch(step, rank):
                touched[row] += 2 * alone.values[0].asnumpy()[row]
        total = sum(random(dense.shape, step, rank) for rank in range(WORKERS))
        assert alone.step({0: touched, 1: total}, 2.0)
    alone.check([embedding.weight.data(), layer.data()])


def what_can_not_be_clipped_is_refused(store: KVStoreBase) -> None:
    kv = mx.kv.create("p3")
    for wrong in (0, -1, math.nan, math.inf, "1", True, [1]):
        with pytest.raises(ConfigError, match="must be a number above 0"):
            kv.clip_global_norm(wrong)
    kv.clip_global_norm(1)
    kv.init("w", mx.nd.zeros(3))
    with pytest.raises(NotSupportedError, match=r"no optimizer.*update_on_kvstore=False"):
        kv.pushpull("w", mx.nd.ones(3))
    optimized = mx.kv.create("p3")
    optimized.set_optimizer(mx.optimizer.create("test"))
    optimized.init([0, 1], [mx.nd.zeros(3)] * 2)
    optimized.clip_global_norm(1)
    one, two = mx.nd.ones(3), mx.nd.ones(3)
    for values, outs in (([one, one], None), ([two, two], [one, one]), ([one, two], [two, one])):
        with pytest.raises(NotSupportedError, match="an array in common"):
            optimized.pushpull([0, 1], values, out=outs)
    optimized.pushpull([0, 1], [one, two])
    kv.clip_global_norm(None)
    value = mx.nd.ones(3)
    kv.pushpull("w", value)
    np.testing.assert_array_equal(value.asnumpy(), np.full(3, WORKERS))


def a_module_clips_as_one_process(store: KVStoreBase) -> None:
    rows, inputs = 4, 5
    kv = mx.kv.create("p3")
    kv.clip_global_norm(0.5)
    data = mx.sym.Variable("data")
    net = mx.sym.FullyConnected(data, num_hidden=3, name="first")
    net = mx.sym.LinearRegressionOutput(net, name="label")
    module = mx.mod.Module(net, label_names=["label_label"])
    module.bind([("data", (rows, inputs))], [("label_label", (rows, 3))])
    begin = {"first_weight": random((3, inputs), 1), "first_bias": random((3,), 2)}
    module.init_params(arg_params={n: mx.nd.array(v) for n, v in begin.items()})
    settings = {"learning_rate": 0.1, "rescale_grad": 1}
    module.init_optimizer(kvstore=kv, optimizer="sgd", optimizer_params=settings)
    alone = Alone(mx.optimizer.create("sgd", **settings), list(begin.values()))
    for step in range(3):
        totals: List[np.ndarray] = []
        for rank in range(WORKERS):
            x, y = random((rows, inputs), step, rank), random((rows, 3), step, rank)
            weight, bias = (value.asnumpy() for value in alone.values)
            error = (x @ weight.T + bias - y) / 3
            mine = [error.T @ x, error.sum(axis=0)]
            totals = [a + b for a, b in zip(totals, mine)] if totals else mine
            if rank == store.rank:
                batch = mx.io.DataBatch([mx.nd.array(x)], [mx.nd.array(y)])
                module.forward_backward(batch)
                module.update()
        assert alone.step(dict(enumerate(totals)), 0.5)
    args, _ = module.get_params()
    for name, value in zip(begin, alone.values):
        np.testing.assert_allclose(args[name].asnumpy(), value.asnumpy(), rtol=1e-4, atol=1e-5)


def a_push_may_be_a_script_s_last_word(store: KVStoreBase) -> None:
    """Worker 0 leaves, and the other one still waits for the value."""
    kv = mx.kv.create("p3")
    kv.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
    kv.clip_global_norm(1)
    kv.init([0, 1], [mx.nd.zeros(40)] * 2)
    kv.push([0, 1], [mx.nd.ones(40)] * 2)
    if store.rank == 1:
        weight = mx.nd.zeros(40)
        kv.pull(1, out=weight)
        np.testing.assert_allclose(weight.asnumpy(), 1 / math.sqrt(80), rtol=1e-6)


OF_NUMBERS = [
    trainers_clip_as_one_process,
    trainers_that_take_turns_clip_each_by_its_own_norm,
    a_call_with_all_keys_is_a_step,
    sums_of_float16_are_clipped_in_float32,
]
CHECKS = [
    *OF_NUMBERS,
    gradients_that_are_not_finite_pass_as_in_one_process,
    gradients_by_rows_count_in_the_norm,
    what_can_not_be_clipped_is_refused,
    a_module_clips_as_one_process,
    a_push_may_be_a_script_s_last_word,
]

if __name__ == "__main__":
    run(OF_NUMBERS if EXACT else CHECKS, mx.kv.create("p3"), sys.argv[1])
