"""A worker in Horovod's environment that sums arrays, and tells how much of what arrived is wrong.

Runs as a worker of `experiments.campaign.job`: prints a line of JSON when it begins and one, with
counts of wrong elements by array, when it ends.
"""

import json
import os

import p3kv  # noqa: F401  before mxnet, as in the experiments

import mxnet as mx  # isort: skip
import numpy as np

from experiments.emulation.all_reduce import AllReduce

# Horovod joins the small ones and sends the last, which is above 128 MiB, alone.
ELEMS = (1, 7, 1000, 50_000, 34_000_000)
ROUNDS = 2


def say(**facts):
    """Tells the measuring process, whole lines only."""
    os.write(1, (json.dumps(facts) + "\n").encode())


def pattern(elems):
    """Small whole numbers, whose sums float32 has exactly in any order."""
    return np.arange(elems) % 8


store = AllReduce()
arrays = [mx.nd.full((elems,), store.rank + 1) for elems in ELEMS]
for key, array in enumerate(arrays):
    store.broadcast(key, array, [array])
wrong = {"broadcast": [int((array.asnumpy() != 1).sum()) for array in arrays]}
say(event="begin")
ranks = range(store.num_workers)
for number in range(ROUNDS):
    for array in arrays:
        array[:] = (pattern(array.size) + number) * (store.rank + 1)
    for key, array in enumerate(arrays):
        store.pushpull(key, [array], priority=-key)
    factor = sum(rank + 1 for rank in ranks)
    wrong[f"round {number}"] = [
        int((array.asnumpy() != (pattern(array.size) + number) * factor).sum()) for array in arrays
    ]
say(event="end", rank=store.rank, workers=store.num_workers, wrong=wrong)
