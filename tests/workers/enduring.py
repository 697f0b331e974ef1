"""Trains until the test says stop, and beside it in this process: weights must be the same.

Servers update with Adam. After each step every worker compares its weights, bit for bit, with
those of a training in its own process that nothing disturbs. With three workers and more that
needs P3KV_DETERMINISTIC. Arguments: a folder, and seconds between two steps. In the folder each
worker leaves a file `trains-<rank>` once it is in mid-training, and worker 0 writes the number of
its steps into `rounds`; a file `stop` there, seen by worker 0, ends the training.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np

_WARM_STEPS = 5
_SHAPES = {"first": (4, 300), "second": (2500,), "third": (70, 7), "stop": (1,)}
"""The value of the last one changes when worker 0 wishes to stop."""


def gradient(key: str, worker: int, step: int) -> np.ndarray:
    seed = np.random.RandomState([ord(key[0]), worker, step])
    return seed.standard_normal(_SHAPES[key]).astype(np.float32)


def total(key: str, workers: int, step: int) -> np.ndarray:
    """The sum of all workers' gradients, in the order of ranks."""
    gradients = [gradient(key, worker, step) for worker in range(workers)]
    return sum(gradients[1:], gradients[0])


def adam() -> mx.optimizer.Optimizer:
    return mx.optimizer.Adam(learning_rate=0.1)


def main() -> None:
    folder, pause_s = Path(sys.argv[1]), float(sys.argv[2])
    store = mx.kv.create("p3")
    store.set_optimizer(adam())
    update = mx.optimizer.get_updater(adam())
    weights = {key: mx.nd.zeros(shape) for key, shape in _SHAPES.items()}
    alone = {key: mx.nd.zeros(shape) for key, shape in _SHAPES.items()}
    for key, weight in weights.items():
        store.init(key, weight)
    step = 0
    while not weights["stop"].asscalar():
        step += 1
        for key, weight in weights.items():
            if key == "stop":
                wish = store.rank == 0 and (folder / "stop").exists()
                mine = mx.nd.full(1, float(wish))
            else:
                mine = mx.nd.array(gradient(key, store.rank, step))
            store.pushpull(key, mine, out=weight)
        for key in weights.keys() - {"stop"}:
            update(key, mx.nd.array(total(key, store.num_workers, step)), alone[key])
            found, expected = weights[key].asnumpy(), alone[key].asnumpy()
            assert (found == expected).all(), f"{key} in step {step}: {found} is not {expected}"
        if store.rank == 0:
            (folder / "new").write_text(str(step))
            (folder / "new").rename(folder / "rounds")
        if step == _WARM_STEPS:
            (folder / f"trains-{store.rank}").touch()
        time.sleep(pause_s)
    print(f"worker {store.rank}: bit for bit the weights of one process in {step} steps")


main()
