"""Trains with p3kv and numpy alone, as another framework's front end would: no MXNet anywhere.

One weight is a matrix whose layout is a user's own, rows; another one is of bfloat16. Slices get
other sizes meanwhile. Every value is checked against the same computation here, exactly.
"""

import p3kv  # noqa: F401, I001
import sys
import threading

import numpy as np
from p3kv import config
from p3kv.errors import ConfigError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import SliceSizes
from p3kv.worker import this_process
from p3kv.worker.transfers import Push, WorkerKey

_ROW = 750
_SIZE = 600 * _ROW
"""More elements than the largest slice has, so that both servers keep some."""
_ROUNDS = 12
_SIZES = {3: 10_000, 6: 500, 9: 90_000}
_RATE = "0.25"

worker = this_process.worker()
worker.start(config.freeze())
store = worker.new_store()


def tensor(round_: int, rank: int = 0) -> np.ndarray:
    """Whole numbers, so that no sum is rounded."""
    numbers = np.random.RandomState([round_, rank]).randint(-8, 9, _SIZE)
    return numbers.astype(np.float32)


def exchange(key: WorkerKey, round_: int, source: np.ndarray, target: np.ndarray) -> None:
    """Pushes `source` for a round, if it has elements, and waits for the value in `target`."""
    done = threading.Event()
    addresses = [array.ctypes.data if array.size else None for array in (source, target)]
    store.count_push(round_)
    worker.begin(Push(key, round_, round_, *addresses, lambda _: done.set()))
    assert done.wait(20)
    worker.check()


def main() -> None:
    nothing, value = np.zeros(0, np.float32), np.zeros(_SIZE, np.float32)
    refusal = ""
    try:
        store.declare("v", (3,), "float32", layout="columns")
    except ConfigError as error:
        refusal = str(error)
    assert "no layout 'columns', only bucket, dense, rows" in refusal
    key = store.declare("w", (_SIZE // _ROW, _ROW), "float32", layout="rows")
    assert len(key.runs) == 2 and not any(length % _ROW for _, length in key.runs)
    for size in _SIZES.values():
        assert not any(piece.offset % _ROW or piece.length % _ROW for piece in key.slices(size))
    of_halves = store.declare("h", (_SIZE,), "bfloat16")
    halves, half_state, received = np.zeros((3, _SIZE), "bfloat16")
    if worker.rank == 0:
        store.set_optimizer(1, "toy", _RATE.encode())
        exchange(key, INITIAL_ROUND, tensor(0), nothing)
        exchange(of_halves, INITIAL_ROUND, halves, nothing)
    weight, state = tensor(0), np.zeros(_SIZE, np.float32)
    for round_ in range(1, _ROUNDS + 1):
        if worker.rank == 0 and round_ in _SIZES:
            worker.loop.call_soon(worker._joined.tuning.want, SliceSizes(_SIZES[round_]))
        exchange(key, round_, tensor(round_, worker.rank), value)
        state = state * np.float32(0.5) + sum(tensor(round_, rank) for rank in range(2))
        weight = weight - np.float32(_RATE) * state
        np.testing.assert_array_equal(value, weight)
        gradients = [(tensor(round_, rank) / 3).astype("bfloat16") for rank in range(2)]
        exchange(of_halves, round_, gradients[worker.rank], received)
        half_state *= np.float32(0.5)
        half_state += gradients[0].astype(np.float32) + gradients[1]
        halves -= np.float32(_RATE) * half_state
        np.testing.assert_array_equal(received, halves)
    assert worker._joined.tuning._sizes.generation(_ROUNDS) >= len(_SIZES)
    assert "mxnet" not in sys.modules
    print(f"worker {worker.rank}: right")


main()
