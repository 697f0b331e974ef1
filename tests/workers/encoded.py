"""Trains with gradients in two bits and values in half precision, as one process works it out.

The numbers of a round are known: what each worker sends and keeps back does not depend on slices.
"""

import p3kv  # noqa: F401, I001
import mxnet as mx
import numpy as np
from own_codec import THRESHOLD

ROUNDS = 8
SIZE = 3001


def gradient(rank, round_):
    return np.random.RandomState([rank, round_]).standard_normal(SIZE).astype(np.float32)


store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.SGD(learning_rate=0.25))
weight = np.linspace(-1, 1, SIZE, dtype=np.float32)
residuals = np.zeros((store.num_workers, SIZE), np.float32)
value = mx.nd.zeros(SIZE)
store.broadcast("w", mx.nd.array(weight), value)
np.testing.assert_array_equal(value.asnumpy(), weight)  # initial values are exact

before = store.stats()
for round_ in range(1, ROUNDS + 1):
    store.pushpull("w", mx.nd.array(gradient(store.rank, round_)), out=value)
    for rank, residual in enumerate(residuals):
        residual += gradient(rank, round_)
        sent = np.where(abs(residual) >= THRESHOLD, np.sign(residual), 0) * THRESHOLD
        residual -= sent
        weight -= np.float32(0.25) * sent.astype(np.float32)
    np.testing.assert_array_equal(value.asnumpy(), weight.astype(np.float16).astype(np.float32))
after = store.stats()
sent, received = (after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
assert ROUNDS * SIZE / 4 <= sent <= ROUNDS * SIZE / 4 * 1.05, sent
assert received == ROUNDS * SIZE * 2, received
print("trained in two bits")
