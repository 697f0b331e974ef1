"""One worker that trains ResNet-50 on tiny images and times gluon's `Trainer.step`.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the measured
steps begin and one, with their times, when they end.
"""

import sys
import time

from experiments.emulation.systems import SYSTEMS, import_p3kv

_system = SYSTEMS[sys.argv[1]]
import_p3kv(_system)

import mxnet as mx  # noqa: E402
from mxnet import autograd, gluon  # noqa: E402

from experiments.emulation.stream import Stream  # noqa: E402
from experiments.emulation.telling import say  # noqa: E402

_WARM_UP, _STEPS = 6, 80
_IMAGES = (2, 3, 32, 32)
_BACKWARD_S = 0.1


def main() -> None:
    """Trains, and has nothing else run during a step: what is timed is Python's part alone.

    In every second step an operation of the engine, which takes a while and no processor, still
    holds all gradients, as backward does on a GPU. In the others all gradients are ready, so
    their transfers begin in the engine's threads while the step goes on.
    """
    network = gluon.model_zoo.vision.resnet50_v1()
    network.initialize()
    trainer = gluon.Trainer(
        network.collect_params(), "sgd", {"learning_rate": 0.001}, kvstore=_system.store
    )
    images = mx.nd.random.uniform(shape=_IMAGES)
    trained = [p for p in network.collect_params().values() if p.grad_req != "null"]
    stream = Stream()
    pending_s, ready_s = [], []
    for number in range(_WARM_UP + _STEPS):
        with autograd.record():
            loss = network(images).square().mean()
        loss.backward()
        mx.nd.waitall()
        if number == _WARM_UP:
            say(event="begin")
        pending = number % 2 == 0
        if pending:
            gradients = [parameter.grad() for parameter in trained]
            stream.submit("all", "backward", number, _BACKWARD_S, [], gradients)
        began = time.perf_counter()
        trainer.step(_IMAGES[0])
        took_s = time.perf_counter() - began
        if number >= _WARM_UP:
            (pending_s if pending else ready_s).append(took_s)
    mx.nd.waitall()
    stream.close()
    say(event="end", parameters=len(trained), pending_step_s=pending_s, ready_step_s=ready_s)


main()
