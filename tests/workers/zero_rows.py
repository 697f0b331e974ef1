"""MXNet: a dense key whose gradients have mostly zero rows, beside the optimizer in this process.

The gradient is dense for a while, and the script writes to the weight now and then.
Argument: the momentum.
"""

import sys

import p3kv  # noqa: F401  # isort: skip
import mxnet as mx
import numpy as np

SHAPE, STEPS, DENSE = (600, 32), 24, range(15, 18)


def gradient(rank: int, step: int) -> np.ndarray:
    random = np.random.RandomState([rank, step])
    dense = random.standard_normal(SHAPE).astype(np.float32)
    if step in DENSE:
        return dense
    gradient = np.zeros(SHAPE, np.float32)
    some = random.randint(SHAPE[0], size=20)
    gradient[some] = dense[some]
    gradient[random.randint(SHAPE[0]), 3] = -0.0
    if step == STEPS - 1:
        gradient[0, 0] = np.nan
    return gradient


store = mx.kv.create("p3")
settings = {"learning_rate": 0.5, "momentum": float(sys.argv[1]), "wd": 0.01 * float(sys.argv[1])}
store.set_optimizer(mx.optimizer.SGD(**settings))
update = mx.optimizer.get_updater(mx.optimizer.SGD(**settings))
weight, expected = mx.nd.ones(SHAPE), mx.nd.ones(SHAPE)
store.init("w", weight)
size_bytes = 4 * weight.size
for step in range(STEPS):
    mx.nd.waitall()
    before = store.stats()
    total = gradient(0, step)
    for rank in range(1, store.num_workers):
        total += gradient(rank, step)
    update("w", mx.nd.array(total), expected)
    if step % 5 == 0:
        weight[:] = 7  # which the servers' value takes the place of
    store.pushpull("w", mx.nd.array(gradient(store.rank, step)), out=weight)
    assert weight.asnumpy().tobytes() == expected.asnumpy().tobytes(), step
    after = store.stats()
    sent = after["bytes_sent"] - before["bytes_sent"]
    received = after["bytes_received"] - before["bytes_received"]
    if 4 <= step < DENSE[0]:
        assert sent < size_bytes / 8, (step, sent)
        assert after["travels"]["w"].startswith("by rows: 9"), after["travels"]
        changes = settings["momentum"] == 0 and step >= 9 and step % 5
        assert (received < size_bytes / 4) == bool(changes), (step, received, after["travels"])
assert after["travels"]["w"].startswith("whole: "), after["travels"]
print(f"exact: {after['travels']['w']}", flush=True)
