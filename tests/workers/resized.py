"""Slices get other sizes while worker 1 pushes ahead and worker 0 looks at every round.

The scheduler's wish for another size, which comes when the network changes, is made here.
"""

import p3kv  # noqa: F401, I001

import mxnet as mx
from checks import equal, random

from p3kv.wire.messages import SliceSizes

_SHAPE = (700, 500)
_ROUNDS = 40
_SIZES = (12_500, 50_000, 5_000, 200_000)
_EVERY = 8


def main() -> None:
    store = mx.kv.create("p3")
    store.set_optimizer(mx.optimizer.create("test", rescale_grad=1))
    weight, out = mx.nd.array(random(_SHAPE, 0)), mx.nd.zeros(_SHAPE)
    store.broadcast("w", weight, out=out)
    gradients = [
        [mx.nd.array(random(_SHAPE, round_, rank)) for rank in range(2)]
        for round_ in range(1, _ROUNDS + 1)
    ]
    mx.nd.waitall()
    for number, pair in enumerate(gradients):
        weight += pair[0] + pair[1]
        store.push("w", pair[store.rank])
        if store.rank == 0:
            worker = store._worker
            if number % _EVERY == 0 and number // _EVERY < len(_SIZES):
                sizes = SliceSizes(_SIZES[number // _EVERY])
                worker.loop.call_soon(worker._joined.tuning.want, sizes)
            store.pull("w", out=out)
            equal(out, weight.asnumpy())  # nobody is further without this worker
    store.pull("w", out=out)
    equal(out, weight.asnumpy())
    sizes = store._worker._joined.tuning._sizes
    assert sizes.generation(_ROUNDS) >= len(_SIZES)  # the network may have changed, too
    print(f"worker {store.rank}: right whatever the size")


main()
