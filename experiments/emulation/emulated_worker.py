"""One worker of a measured run: trains an emulated model over a real store.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the measured
iterations begin and one, with the results, when they end.
"""

import sys

from experiments.emulation.systems import SYSTEMS, System, import_p3kv

import_p3kv(SYSTEMS[sys.argv[2]])

import argparse  # noqa: E402
import resource  # noqa: E402
from typing import Any  # noqa: E402

import mxnet as mx  # noqa: E402

from experiments.emulation.emulator import EmulatedModel  # noqa: E402
from experiments.emulation.telling import rss_kib, say  # noqa: E402
from experiments.models import load  # noqa: E402

_NOISE = 0.01
"""Standard deviation of gradients that are encoded: the thresholds of two bits are of its size."""


def main() -> None:
    """Runs the iterations that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--dilation", type=float, default=1.0)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--spans", action="store_true")
    options = parser.parse_args()
    system = SYSTEMS[options.system]
    model = EmulatedModel(
        load(options.model),
        dilation=options.dilation,
        noise=_NOISE if system.encodes else 0.0,
        update_on_kvstore=system.update_on_kvstore,
        apart=system.apart,
        in_turn=system.in_turn,
        straggling=system.straggling,
    )
    arrays_rss_kib = rss_kib()
    store = create(system)
    if system.compression:
        store.set_gradient_compression(dict(system.compression))
    if system.update_on_kvstore:
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=system.momentum))
    model.broadcast(store)
    model.run(store, options.warm_up)
    say(event="begin", rank=store.rank)
    model.run(store, options.iterations)
    say(
        event="end",
        rank=store.rank,
        iteration_s=model.iteration_s[options.warm_up :],
        compute_s=model.compute_s,
        arrays_rss_kib=arrays_rss_kib,
        versions={store.type: store.version} if system.all_reduce else {},
        max_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        spans=[span._asdict() for span in model.spans] if options.spans else [],
    )
    mx.nd.waitall()
    model.close()


def create(system: System) -> Any:
    """Makes what the model's gradients are given to."""
    if system.all_reduce:
        # Only its own environment has Horovod.
        from experiments.emulation.all_reduce import AllReduce

        return AllReduce()
    return mx.kv.create(system.store)


main()
