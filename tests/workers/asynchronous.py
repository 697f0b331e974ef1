"""A worker that trains while another has pushed nothing, and then ends while that one goes on.

All gradients, rates and weights are whole numbers, so sums are exact in any order. What is left at
the end follows from how often each worker has pushed.
"""

import p3kv  # noqa: F401, I001
import os
import sys
import time
from pathlib import Path

import mxnet as mx
import numpy as np
import psutil

from p3kv.errors import NotSupportedError, StatesError

SIZE = 1000
FAST, SLOW = 12, 3
"""Pushes of worker 0 and of worker 1."""

folder = Path(sys.argv[1])
rank = int(os.environ["DMLC_WORKER_ID"])


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def refuses(error, function, *arguments, **more):
    try:
        function(*arguments, **more)
    except error as refused:
        print(f"refused: {refused}")
    else:
        raise AssertionError(f"{function} was not refused")


def has(array, value):
    np.testing.assert_array_equal(array.asnumpy(), value)


store = mx.kv.create("dist_async_p3")
shared = mx.kv.create("p3")
assert (store.type, shared.type) == ("dist_async_p3", "dist_sync_p3")
assert "dist" in store.type and "_sync" not in store.type

# What it can't do is refused on this worker, and changes nothing.
weight, one = mx.nd.ones(SIZE), mx.nd.ones(SIZE)
pulled = mx.nd.zeros(SIZE)
store.init("w", weight)
refuses(NotSupportedError, store.push, "w", one)
refuses(NotSupportedError, store.set_optimizer, mx.optimizer.Nadam())
refuses(StatesError, store.save_optimizer_states, str(folder / "states"))
refuses(NotSupportedError, store._send_command_to_servers, 3, "")

optimizer = mx.optimizer.SGD(learning_rate=1.0)
store.set_optimizer(optimizer)
refuses(NotSupportedError, store.set_optimizer, mx.optimizer.LAMB())

# Worker 0 pushes and pulls while worker 1 does nothing.
done = folder / "done"
if rank == 0:
    for count in range(1, FAST + 1):
        store.pushpull("w", one, out=pulled)
        has(pulled, 1 - count)
    store.push("w", one)
    store.pull("w", out=pulled)
    has(pulled, -FAST)
    done.touch()
else:
    wait_for(done.exists)
    store.pull("w", out=pulled)
    has(pulled, -FAST)
    for count in range(1, SLOW + 1):
        store.push("w", one)
        store.pull("w", out=pulled)
        has(pulled, -FAST - count)
store._barrier()

# A rate that worker 0 sets holds for all, beside a store whose rounds both share.
if rank == 0:
    optimizer.set_learning_rate(2.0)
    store.pushpull("w", one, out=pulled)
    has(pulled, -FAST - SLOW - 2)
store._barrier()
shared.init("s", mx.nd.zeros(SIZE))
for round_ in range(1, 4):
    if rank == 1:
        for _ in range(3):
            store.push("w", one)
    shared.pushpull("s", one * round_, out=pulled)
    has(pulled, 2 * round_)
# A push may be under way when its worker is at a barrier, but not when that worker's pull is done.
store.pull("w", out=pulled)
pulled.wait_to_read()
store._barrier()
store.pull("w", out=pulled)
has(pulled, -FAST - SLOW - 2 - 9 * 2)

# Gluon's Trainer, with another number of steps on each worker, and whole tensors.
net = mx.gluon.nn.Dense(4, in_units=300, use_bias=False)
net.initialize(mx.init.One())
refusing = mx.gluon.Trainer(
    net.collect_params(), "sgd", kvstore="dist_async_p3", update_on_kvstore=False
)
refuses(ValueError, refusing._init_kvstore)
trainer = mx.gluon.Trainer(
    net.collect_params(), "sgd", {"learning_rate": 1.0}, kvstore="dist_async_p3"
)
for _ in range(2 + 3 * rank):
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 300))).sum()
    loss.backward()
    trainer.step(1)
mx.nd.waitall()
assert trainer._update_on_kvstore and trainer._kvstore.type == "dist_async_p3"
store._barrier()
trainer._kvstore.pull(0, out=net.weight.data())
has(net.weight.data(), 1 - 7)

whole = mx.kv.create("dist_async_p3")
whole.set_optimizer(mx.optimizer.SGLD(learning_rate=1.0))
whole.init("g", weight)
for _ in range(1 + rank):
    whole.pushpull("g", one, out=pulled)
assert np.isfinite(pulled.asnumpy()).all()

# Worker 0 ends, and worker 1 goes on.
gone = folder / "gone"
if rank == 0:
    gone.write_text(str(os.getpid()))
else:
    wait_for(lambda: gone.exists() and not psutil.pid_exists(int(gone.read_text())))
    before = store.stats()["slices_sent"]
    for count in range(1, 4):
        store.pushpull("w", one, out=pulled)
        has(pulled, -FAST - SLOW - 20 - 2 * count)
    assert store.stats()["slices_sent"] > before
print("every value is right")
