"""Trains by a rule of a user's own that sees the workers' clocks, or exchanges seldom.

The last worker is slow. Each gradient is a number that says whose it is, so every weight tells how
many pushes of each worker it has. Prints that, and by how many pushes this worker has led at most.
"""

import p3kv  # noqa: I001
import time

import mxnet as mx
import numpy as np

STEPS = 12
SIZE = 1000
UNIT = 64.0

store = mx.kv.create("p3")
store.init("early", mx.nd.zeros(1))
try:
    store.push("early", mx.nd.ones(1))
except p3kv.errors.NotSupportedError as error:  # by both rules
    assert "without an optimizer" in str(error), error
else:
    raise AssertionError("a sum would lack a push, and nobody is told")
store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, rescale_grad=-1.0))
rank, workers = store.rank, store.num_workers


def pushes(weight):
    """By rank, how many pushes a weight has."""
    found = np.unique(weight.asnumpy())
    assert len(found) == 1, "slices differ"
    return [int(found[0] // UNIT**one % UNIT) for one in range(workers)]


weight = mx.nd.zeros(SIZE)
store.broadcast("w", mx.nd.zeros(SIZE), weight)
mx.nd.waitall()
lead = 0
for step in range(1, STEPS + 1):
    if rank == workers - 1:
        time.sleep(0.05)
    store.pushpull("w", mx.nd.full(SIZE, UNIT**rank), out=weight)
    has = pushes(weight)
    lead = max(lead, has[rank] - min(has))
    print(f"step {step} has {has}", flush=True)
store._barrier()
store.pull("w", out=weight)
seen = store.stats()
assert seen["most_stale_rounds"] == lead, f"{seen} tells another lead than {lead}"
assert seen["stale_values"] in (0, STEPS), seen  # 0 by a rule that exchanges seldom
print(f"worker {rank} led by {lead} and ended with {pushes(weight)}")
