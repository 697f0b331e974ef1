"""A worker leaves whose copies for checkpoints nobody will ask for: the first checkpoint is still
being written when the next ones are due. Where workers do not wait for each other, it is late, too,
and copies for the first one when the next ones are left out already."""

import p3kv  # noqa: F401, I001
import time
from typing import Any

import mxnet as mx

from p3kv.checkpoints.writing import Writer

STEPS, FEWER_STEPS = 20, 8
_begin = Writer.begin


def begin(writer: Writer, folder: str, outline: Any, contents: Any, *more: Any) -> None:
    def later() -> Any:
        time.sleep(3)
        return contents()

    _begin(writer, folder, outline, later, *more)


def main() -> None:
    store = mx.kv.create("p3")
    if store.rank == 0:
        Writer.begin = begin
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    weight = mx.nd.ones(1000)
    store.init("w", weight)
    if store.type == "dist_async" and store.rank == 1:
        time.sleep(2)
    for _ in range(FEWER_STEPS if store.rank == 1 else STEPS):
        store.pushpull("w", mx.nd.ones(1000), out=weight)
        if store.type != "dist_async":
            weight.wait_to_read()
    print(f"ends after {STEPS}")


main()
