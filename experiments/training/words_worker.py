"""One worker that trains a language model with a table of rows; or all of the training, alone.

Started by `experiments.campaign.job` in a worker's role, or by itself with the system "alone":
then a step has the batches of all workers. Prints a JSON line when training begins and one, with
the results, when it ends.
"""

import sys

from experiments.emulation.systems import SYSTEMS, import_p3kv

ALONE = "alone"
if sys.argv[1] != ALONE:
    import_p3kv(SYSTEMS[sys.argv[1]])

import argparse  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from typing import List  # noqa: E402

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402
from experiments.training import data, networks  # noqa: E402
from experiments.training.validation import LOSS, validate  # noqa: E402

LENGTH, VOCABULARY, EMBEDDING, HIDDEN, BATCH = 16, 5000, 64, 64, 8
LEARNING_RATE = 4.0
_TRAINING_ELEMS, _VALIDATION_ELEMS = 400_000, 16_000


def main() -> None:
    """Trains as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system")
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--validate-every", type=int, required=True)
    options = parser.parse_args()
    alone = options.system == ALONE
    store = mx.kv.create("local" if alone else SYSTEMS[options.system].store)
    mx.random.seed(0)
    words = data.source_words(LENGTH, VOCABULARY, _TRAINING_ELEMS, _VALIDATION_ELEMS)
    network = networks.WordModel(VOCABULARY, EMBEDDING, HIDDEN)
    network.initialize(mx.init.Xavier())
    together = BATCH * options.workers
    # dist_sync takes no other scale once rows have been pulled, which is before the first step.
    trainer = gluon.Trainer(
        network.collect_params(), "sgd", kvstore=store, update_on_kvstore=True,
        optimizer_params={"learning_rate": LEARNING_RATE, "rescale_grad": 1 / together},
    )  # fmt: skip
    random = np.random.RandomState(0)
    order = np.concatenate(
        [random.permutation(len(words.training)) for _ in range(_epochs(options.steps, together))]
    )
    first, count = (0, together) if alone else (store.rank * BATCH, BATCH)
    step_s: List[float] = []
    losses: List[float] = []
    perplexities: List[float] = []
    say(event="begin", rank=store.rank)
    for step in range(options.steps):
        if step % options.validate_every == 0 and store.rank == 0:
            perplexities.append(math.exp(validate(network, words)["loss"]))
        began = time.perf_counter()
        batch = order[step * together + first :][:count]
        x, y = (mx.nd.array(of[batch]) for of in (words.training, words.training_labels))
        with autograd.record():
            loss = LOSS(network(x), y)
        loss.backward()
        trainer.step(1)
        losses.append(float(loss.mean().asscalar()))
        step_s.append(time.perf_counter() - began)
    mx.nd.waitall()
    say(
        event="end",
        rank=store.rank,
        step_s=step_s,
        losses=losses,
        perplexities=[*perplexities, math.exp(validate(network, words)["loss"])]
        if store.rank == 0
        else [],
    )
    mx.nd.waitall()


def _epochs(steps: int, together: int) -> int:
    return math.ceil(steps * together / (_TRAINING_ELEMS // LENGTH - 1))


main()
