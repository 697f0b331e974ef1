"""One worker that trains ResNet-50 on tiny images and times gluon's `Trainer.step`.

Started by `experiments.job` in a worker's role; prints a JSON line when the measured steps begin
and one, with their times, when they end.
"""

import json
import os
import sys
import time

from experiments.systems import SYSTEMS

_system = SYSTEMS[sys.argv[1]]
if _system.store == "p3":
    import p3kv  # noqa: F401  before mxnet, as in any script

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

_WARM_UP, _STEPS = 5, 40
_IMAGES = (2, 3, 32, 32)


def main() -> None:
    """Trains, and waits for everything before each step: what is timed is Python's part alone."""
    network = gluon.model_zoo.vision.resnet50_v1()
    network.initialize()
    trainer = gluon.Trainer(
        network.collect_params(), "sgd", {"learning_rate": 0.001}, kvstore=_system.store
    )
    images = mx.nd.random.uniform(shape=_IMAGES)
    times = []
    for number in range(_WARM_UP + _STEPS):
        with autograd.record():
            loss = network(images).square().mean()
        loss.backward()
        mx.nd.waitall()
        if number == _WARM_UP:
            say(event="begin")
        began = time.perf_counter()
        trainer.step(_IMAGES[0])
        times.append(time.perf_counter() - began)
    mx.nd.waitall()
    trained = [p for p in network.collect_params().values() if p.grad_req != "null"]
    say(event="end", parameters=len(trained), step_s=times[_WARM_UP:])


def say(**facts: object) -> None:
    """Tells the measuring process, whole lines only."""
    os.write(1, (json.dumps(facts) + "\n").encode())


main()
