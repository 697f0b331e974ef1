"""Synchronises while the script sleeps, and while worker 0's computes in Python; says how long.

Prints a line of JSON: the seconds of the rounds of each kind.
"""

import p3kv  # noqa: F401, I001
import json
import time

import mxnet as mx
from mxnet.kvstore import KVStoreBase

_ARRAYS, _ELEMS = 40, 160_000
_ROUNDS = 5


def main() -> None:
    """Alternates rounds of both kinds, after one that warms up."""
    store = mx.kv.create("p3")
    weights = [mx.nd.zeros(_ELEMS) for _ in range(_ARRAYS)]
    gradients = [mx.nd.ones(_ELEMS) for _ in range(_ARRAYS)]
    for key, weight in enumerate(weights):
        store.broadcast(key, weight, out=weight)
    seconds = {"calm": [], "busy": []}
    for number in range(2 * _ROUNDS + 2):
        kind = ("calm", "busy")[number % 2]
        start = time.monotonic()
        expected = store.stats()["bytes_received"] + 4 * _ARRAYS * _ELEMS
        for key in range(_ARRAYS):
            store.pushpull(key, gradients[key], out=weights[key], priority=-key)
        if kind == "busy" and store.rank == 0:
            compute_until_received(store, expected)
        mx.nd.waitall()
        if number >= 2:
            seconds[kind].append(time.monotonic() - start)
    print(json.dumps(seconds), flush=True)


def compute_until_received(store: KVStoreBase, expected_bytes: int) -> None:
    """Keeps Python's lock as long as Python lets a thread keep it."""
    while store.stats()["bytes_received"] < expected_bytes:
        sum(range(1000))


main()
