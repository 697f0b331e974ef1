"""Trains with gradients in 8 bits and values in half precision, by a codec of a user's own.

Every worker's gradient is the same in all rounds. So rounding errs the same way each time, and only
a residual keeps the weight near the one that exact gradients give.
"""

import p3kv  # noqa: F401, I001
import mxnet as mx
import numpy as np
from own_codec import LARGEST

ROUNDS = 8
SIZE = 3001
RATE = 0.25


def gradient(rank):
    return np.random.RandomState(rank).standard_normal(SIZE).astype(np.float32)


store = mx.kv.create("p3")
store.set_optimizer(mx.optimizer.SGD(learning_rate=RATE))
weight = np.linspace(-1, 1, SIZE, dtype=np.float32)
value = mx.nd.zeros(SIZE)
store.broadcast("w", mx.nd.array(weight), value)
np.testing.assert_array_equal(value.asnumpy(), weight)  # initial values are exact

gradients = [gradient(rank) for rank in range(store.num_workers)]
scales = [(abs(one).max() + 0.02) / LARGEST for one in gradients]
most_kept_back = RATE * sum(scales) / 2
mx.nd.waitall()  # the initial value has left
before = store.stats()
for round_ in range(1, ROUNDS + 1):
    store.pushpull("w", mx.nd.array(gradients[store.rank]), out=value)
    exact = weight - round_ * RATE * sum(gradients)
    off = abs(value.asnumpy() - exact) - abs(exact) * 2.0**-11
    assert off.max() < most_kept_back * 1.01, (round_, off.max(), most_kept_back)
    assert off.max() > 0, "nothing was rounded"
after = store.stats()
sent, received = (after[name] - before[name] for name in ("bytes_sent", "bytes_received"))
slices = after["slices_sent"] - before["slices_sent"]
assert sent == ROUNDS * SIZE + 8 * slices, (sent, slices)
assert received == ROUNDS * SIZE * 2, received
print("trained in eight bits")
