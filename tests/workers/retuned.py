"""Trains over a network that becomes slow, until slices have another size, and checks weights.

Says each round. Weights must be those of MXNet's own Updater, bit for bit: with two workers, no
order of the sum gives another one.
"""

import p3kv  # noqa: F401, I001
import logging
import re
import sys

import mxnet as mx
from checks import equal, random

_SHAPES = [(700, 1000), (33,), (300, 501)]
_MOST_ROUNDS = 60
_ROUNDS_AFTER = 4


class Changes(logging.Handler):
    """Notices the round from which on slices have another size, before it begins."""

    from_round = _MOST_ROUNDS

    def emit(self, record: logging.LogRecord) -> None:
        said = re.search(r"elements from round (\d+) on", record.getMessage())
        if said:
            self.from_round = int(said[1])


def main() -> None:
    """Runs rounds until some have been made with slices of another size."""
    changes = Changes()
    logging.getLogger("p3kv").addHandler(changes)
    store = mx.kv.create("p3")
    make = lambda: mx.optimizer.Adam(learning_rate=0.01)  # noqa: E731
    store.set_optimizer(make())
    updater = mx.optimizer.get_updater(make())
    weights = [mx.nd.array(random(shape, key)) for key, shape in enumerate(_SHAPES)]
    references = [weight.copy() for weight in weights]
    for key, weight in enumerate(weights):
        store.init(key, weight)
    round_ = 0
    while round_ < changes.from_round + _ROUNDS_AFTER:
        round_ += 1
        for key, weight in enumerate(weights):
            mine, others = (
                mx.nd.array(random(weight.shape, key, round_, rank)) for rank in range(2)
            )
            store.pushpull(key, (mine, others)[store.rank], out=weight)
            updater(key, mine + others, references[key])
        mx.nd.waitall()
        for weight, reference in zip(weights, references):
            equal(weight, reference.asnumpy())
        print(f"round {round_}", flush=True)
    if changes.from_round == _MOST_ROUNDS:
        sys.exit(f"slices had the same size for {round_} rounds")


main()
