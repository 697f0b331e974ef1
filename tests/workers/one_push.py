"""Ends right after one large push; with the argument `look`, worker 1 sees the result first, and
with `all` all workers."""

import p3kv  # noqa: F401, I001
import sys

import mxnet as mx
from checks import equal

_ELEMS = 10_000_000


def main() -> None:
    store = mx.kv.create("p3")
    store.init("w", mx.nd.zeros(_ELEMS))
    store.push("w", mx.nd.full(_ELEMS, store.rank + 1))
    if "all" in sys.argv or (store.rank == 1 and "look" in sys.argv):
        out = mx.nd.zeros(_ELEMS)
        store.pull("w", out=out)
        equal(out, mx.nd.full(_ELEMS, 3).asnumpy())
        print(f"worker {store.rank}: the sum is right")


main()
