"""Runs a list of checks in one job and notes which have passed, so that they share its start."""

import time
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, List, Sequence

import mxnet as mx
import numpy as np

from p3kv.frontends.mxnet import engine

Check = Callable[[mx.kvstore.KVStoreBase], None]


def run(checks: Sequence[Check], store: mx.kvstore.KVStoreBase, folder: str) -> None:
    """Runs `checks` one after the other; what fails ends the job.

    Leaves their names in a file of this worker's.
    """
    with open(Path(folder) / f"rank{store.rank}", "w") as passed:
        for check in checks:
            check(store)
            mx.nd.waitall()
            passed.write(f"{check.__name__}\n")
            passed.flush()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Returns when `condition()` is true; fails when that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


@contextmanager
def read(array: mx.nd.NDArray) -> Iterator[None]:
    """An operation of MXNet's engine reads the array, so that nothing can be written into it."""
    begun: List[engine.Operation] = []
    engine.push(begun.append, [array], [])
    until(lambda: bool(begun))
    yield
    begun[0].complete()


def random(shape: tuple, *seeds: int, dtype: str = "float32") -> np.ndarray:
    """Normal numbers that everybody draws alike who has the same seeds."""
    return np.random.RandomState([*seeds, 1]).standard_normal(shape).astype(dtype)


def equal(array: mx.nd.NDArray, expected: np.ndarray) -> None:
    """Bit for bit, shape and dtype included."""
    actual = array.asnumpy()
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    np.testing.assert_array_equal(actual, expected)
