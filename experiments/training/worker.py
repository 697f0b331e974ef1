"""One worker that trains a task, and validates it after each epoch.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when training begins
and one, with the results, when it ends.
"""

from experiments.emulation.systems import SYSTEMS, import_p3kv

import_p3kv(SYSTEMS["p3kv"])

import argparse  # noqa: E402
import time  # noqa: E402
from typing import Dict, List  # noqa: E402

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

from experiments.emulation.telling import say  # noqa: E402
from experiments.training.tasks import TASKS, Recipe  # noqa: E402
from experiments.training.validation import LOSS, validate  # noqa: E402


def main() -> None:
    """Trains as the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    for name in Recipe._fields:
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--constant-rate", action="store_true", help="it does not fall")
    parser.add_argument("--in-turn", action="store_true", help="compute, then send and wait")
    parser.add_argument("--own-batch", action="store_true", help="a step is of this worker's only")
    options = parser.parse_args()
    task = TASKS[options.task]
    store = mx.kv.create("p3")
    # All begin with the same weights, and each has samples of its own.
    mx.random.seed(options.seed)
    random = np.random.RandomState([options.seed, store.rank])
    data = task.data()
    steps = task.steps(store.num_workers)
    network = task.network()
    network.initialize(mx.init.Xavier())
    network.hybridize()
    scheduler = None
    if not options.constant_rate:
        scheduler = mx.lr_scheduler.CosineScheduler(
            options.epochs * steps, base_lr=options.learning_rate
        )
    trainer = gluon.Trainer(
        network.collect_params(), "sgd", kvstore=store,
        optimizer_params={
            "lr_scheduler": scheduler, "learning_rate": options.learning_rate,
            "momentum": options.momentum, "wd": options.weight_decay,
        },
    )  # fmt: skip
    together = 1 if options.own_batch else store.num_workers
    """Of how many workers' batches a step is."""
    mine = np.arange(store.rank, len(data.training), store.num_workers)
    epoch_s: List[float] = []
    validated: List[Dict[str, float]] = []
    say(event="begin")
    for epoch in range(options.epochs):
        began = time.perf_counter()
        order = random.permutation(mine)
        for step in range(steps):
            batch = order[step * task.batch :][: task.batch]
            x, y = (mx.nd.array(of[batch]) for of in (data.training, data.training_labels))
            with autograd.record():
                loss = LOSS(network(x), y)
            loss.backward()
            if options.in_turn:
                mx.nd.waitall()
            trainer.step(task.batch * together)
            if options.in_turn:
                mx.nd.waitall()
        if epoch == options.epochs - 1:
            store.synchronize()  # what a worker lacks of values must not count at the end
        mx.nd.waitall()
        epoch_s.append(time.perf_counter() - began)
        if store.rank == 0:
            validated.append(validate(network, data))
    trained = [p for p in network.collect_params().values() if p.grad_req != "null"]
    exact = options.epochs * steps * sum(4 * np.prod(p.shape) for p in trained)
    stats = store.stats()
    say(
        event="end",
        rank=store.rank,
        epoch_s=epoch_s,
        validated=validated,
        sent_share=stats["bytes_sent"] / exact,
        received_share=stats["bytes_received"] / exact,
    )


main()
