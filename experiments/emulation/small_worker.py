"""One worker that synchronises a few small keys again and again, and times each round trip.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the measured
rounds begin and one, with their times, when they end.
"""

import sys

from experiments.emulation.systems import SYSTEMS, import_p3kv
from experiments.emulation.telling import say

_system = SYSTEMS[sys.argv[1]]
import_p3kv(_system)

import argparse  # noqa: E402
import time  # noqa: E402

import mxnet as mx  # noqa: E402


def main() -> None:
    """Each round gives all gradients to the store, and waits for all new weights: what it takes is
    latency, since the bytes are few."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("keys", type=int)
    parser.add_argument("elements", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("--warm-up", type=int, default=100)
    options = parser.parse_args()
    store = mx.kv.create(_system.store)
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    keys = list(range(options.keys))
    weights = [mx.nd.zeros((options.elements,)) for _ in keys]
    gradients = [mx.nd.ones((options.elements,)) for _ in keys]
    for key, weight in zip(keys, weights):
        store.init(key, weight)
    taken_s = []
    for number in range(options.warm_up + options.rounds):
        if number == options.warm_up:
            say(event="begin")
        began = time.perf_counter()
        for key, weight, gradient in zip(keys, weights, gradients):
            store.push(key, gradient, priority=-key)
            store.pull(key, weight, priority=-key)
        mx.nd.waitall()
        taken_s.append(time.perf_counter() - began)
    say(event="end", iteration_s=taken_s[options.warm_up :])


main()
