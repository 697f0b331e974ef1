"""A worker that lags behind, where workers train by themselves: P3KV_CONSISTENCY=local:steps=4.

Argument: a folder in which workers tell each other where they are. P3KV_WARN_AFTER_S is less than
`LAG_S`.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from pathlib import Path

import mxnet as mx
from p3kv.report.verdict import PARTS

FOLDER = Path(sys.argv[1])
LAG_S = 3.0

store = mx.kv.create("p3")
weight = mx.nd.zeros(6)
store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0))
store.broadcast("w", weight, weight)


def steps(count: int) -> None:
    for _ in range(count):
        store.pushpull("w", mx.nd.ones(6), out=weight)


def lag(name: str) -> None:
    """Worker 1 waits until worker 0 says that it begins to wait, and longer."""
    while not (FOLDER / name).exists():
        time.sleep(0.01)
    time.sleep(LAG_S)


if store.rank == 0:
    steps(4)  # the value of the first step is taken after the fifth
    weight.wait_to_read()
    time.sleep(LAG_S)
    print("worker 0 has not waited", file=sys.stderr)
    (FOLDER / "weight").touch()
    steps(4)
    weight.wait_to_read()
    steps(1)
    print("worker 0 waits for all", file=sys.stderr)
    (FOLDER / "all").touch()
    mx.nd.waitall()
    deadline = time.monotonic() + LAG_S
    while (seen := store.stats())["steps"] < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    parts = [seen[f"{part}_s"] for part in PARTS]
    assert seen["steps"] == 8 and abs(sum(parts) - seen["step_s"]) < 1e-6, seen
    assert LAG_S / 2 < seen["straggler_s"] < seen["step_s"] - LAG_S / 2, seen
else:
    lag("weight")
    steps(8)
    weight.wait_to_read()
    lag("all")
    steps(1)
