"""Trains until the test says stop, with numbers that are known exactly.

Arguments: a folder, and for a worker that goes wrong its rank, the step, and how: `raise`, or
`exit` with code 3, or `leave` in order; `saves` instead has workers save at SIGTERM. In the folder
each worker leaves a file `trains-<rank>` once it is in mid-training; a file `stop` there, seen by
worker 0, ends the training.
"""

import p3kv  # noqa: F401, I001
import signal
import sys
import time
from pathlib import Path
from typing import List

import mxnet as mx
from mxnet import autograd, gluon

_WARM_STEPS = 5
_RATE = 0.5
_INPUTS, _UNITS = 50, 120


def main() -> None:
    folder = Path(sys.argv[1])
    wrong_rank, wrong_step, how = -1, 0, ""
    wishes: List[Path] = []
    if sys.argv[2:] == ["saves"]:
        signal.signal(signal.SIGTERM, lambda *_: wishes.append(folder))
    elif len(sys.argv) > 2:
        wrong_rank, wrong_step, how = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    store = mx.kv.create("p3")
    stop = mx.nd.zeros(1)
    store.broadcast("stop", stop, out=stop)
    net = gluon.nn.Dense(_UNITS, in_units=_INPUTS)
    net.initialize(mx.init.Zero())
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": _RATE}, kvstore=store)
    x = mx.nd.full((1, _INPUTS), store.rank + 1)
    step = 0
    while not stop.asscalar():
        step += 1
        if store.rank == wrong_rank and step == wrong_step:
            if how == "raise":
                raise ValueError("there is no such label")
            if how == "exit":
                sys.exit(3)
            return
        with autograd.record():
            loss = net(x).sum()
        loss.backward()
        trainer.step(1)
        wish = bool(wishes) or (store.rank == 0 and (folder / "stop").exists())
        store.pushpull("stop", mx.nd.full(1, float(wish)), out=stop)
        if step == _WARM_STEPS:
            net.weight.data().wait_to_read()
            (folder / f"trains-{store.rank}").touch()
        time.sleep(0.005)  # as if it computed
    if wishes:
        time.sleep(1.0)
        trainer.save_states(str(folder / f"states-{store.rank}"))
    expected = -_RATE * step * sum(range(1, store.num_workers + 1))
    weight = net.weight.data().asnumpy()
    assert (weight == expected).all(), f"{weight} is not {expected} after {step} steps"
    print(f"worker {store.rank}: all weights are right after {step} steps")


main()
