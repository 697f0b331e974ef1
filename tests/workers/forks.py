"""Trains, and forks in every way that Python has, while gradients are on their way.

First both workers fork, then only worker 1.
"""

import p3kv  # noqa: I001
import multiprocessing
import os
import subprocess
import sys
from itertools import product

import mxnet as mx
import numpy as np

_ARRAYS, _ELEMS = 20, 100_000
_STEPS_EACH = 3


def square(number: int) -> int:
    return number * number


def with_fork_and_exit() -> None:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitpid(child, 0)[1] == 7 << 8


def with_fork_and_a_use_of_the_store() -> None:
    child = os.fork()
    if child == 0:
        try:
            store.push(0, gradients[0])
        except p3kv.errors.ClosedError as error:
            os._exit(9 if "forked from worker" in str(error) else 1)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 9 << 8


def with_a_pool() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(4)) == [0, 1, 4, 9]


def with_subprocess() -> None:
    assert subprocess.run(["true"], check=False).returncode == 0


def with_subprocess_and_preexec_fn() -> None:
    assert subprocess.run(["true"], preexec_fn=os.getpid, check=False).returncode == 0


def with_system() -> None:
    assert os.system("exit 4") == 4 << 8


WAYS = [
    with_fork_and_exit,
    with_fork_and_a_use_of_the_store,
    with_a_pool,
    with_subprocess,
    with_subprocess_and_preexec_fn,
    with_system,
]

store = mx.kv.create("p3")
weights = [mx.nd.zeros(_ELEMS) for _ in range(_ARRAYS)]
gradients = [mx.nd.full(_ELEMS, store.rank + 1) for _ in range(_ARRAYS)]
for key, weight in enumerate(weights):
    store.broadcast(key, weight, out=weight)
store.set_optimizer(mx.optimizer.create("test"))
steps = 0
for all_fork, way in product((True, False), WAYS):
    for _ in range(_STEPS_EACH):
        steps += 1
        for key in range(_ARRAYS):
            store.pushpull(key, gradients[key], out=weights[key], priority=-key)
        if all_fork or store.rank == 1:
            way()
    print(f"{way.__name__} in {'both' if all_fork else 'one'}: done", flush=True)
for weight in weights:
    np.testing.assert_array_equal(weight.asnumpy(), np.full(_ELEMS, 3.0 * steps, np.float32))
print("all weights are right")
