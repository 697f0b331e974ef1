"""One worker that trains a task with weights that may be stale or predicted, and sees how far they
are from the servers'.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when training begins
and one, with the results, when it ends.
"""

from experiments.emulation.systems import SYSTEMS, import_p3kv

import_p3kv(SYSTEMS["p3kv"])

import argparse  # noqa: E402
from typing import Dict, Iterator, List  # noqa: E402

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402
from experiments.training.tasks import TASKS, Recipe  # noqa: E402
from experiments.training.true_weights import Errors, TrueWeights  # noqa: E402
from experiments.training.validation import LOSS, validate  # noqa: E402


def main() -> None:
    """Trains as the command line asks for. A momentum of 0 means Adam."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    for name in ("seed", "steps", "staleness", "validations"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in Recipe._fields:
        parser.add_argument(f"--{name}", type=float, required=True)
    options = parser.parse_args()
    task = TASKS[options.task]
    store = mx.kv.create("p3")
    mx.random.seed(options.seed)
    data = task.data()
    batches = _batches(len(data.training), task.batch, options.seed)
    network, judged = task.network(), task.network()
    for one in (network, judged):
        one.initialize(mx.init.Xavier())
        one.hybridize()
    parameters = list(network.collect_params().values())
    rate = options.learning_rate
    momentum = {"momentum": options.momentum} if options.momentum else {}
    trainer = gluon.Trainer(
        parameters, "sgd" if options.momentum else "adam", kvstore=store,
        optimizer_params={
            "lr_scheduler": mx.lr_scheduler.CosineScheduler(options.steps, base_lr=rate),
            "learning_rate": rate, "wd": options.weight_decay, **momentum,
        },
    )  # fmt: skip
    true, errors = TrueWeights(store, parameters), Errors(options.staleness)
    losses: List[float] = []
    validated: List[Dict[str, float]] = []
    say(event="begin")
    for step in range(1, options.steps + 1):
        batch = next(batches)
        x, y = (mx.nd.array(of[batch]) for of in (data.training, data.training_labels))
        with autograd.record():
            loss = LOSS(network(x), y)
        own = true.own()
        # Before the first push the servers have no weights yet.
        errors.add(own, true.pulled() if step > 1 else own)
        loss.backward()
        trainer.step(task.batch)
        losses.append(float(loss.mean().asscalar()))
        if step % (options.steps // options.validations) == 0:
            judged(x)  # which gives its parameters their shapes
            true.copy_into(list(judged.collect_params().values()))
            validated.append(validate(judged, data))
    say(
        event="end", losses=losses, validated=validated, errors=errors.own,
        stale_errors=errors.stale,
    )  # fmt: skip


def _batches(samples: int, size: int, seed: int) -> Iterator[np.ndarray]:
    """Numbers of samples, all once before any again; what is left of them waits for the next."""
    random = np.random.RandomState(seed)
    while True:
        order = random.permutation(samples)
        for first in range(0, samples - size + 1, size):
            yield order[first:][:size]


main()
