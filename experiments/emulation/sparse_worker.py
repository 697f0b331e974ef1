"""One worker of a measured run: trains an emulated model of Parallax's over a real store.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the measured
iterations begin and one, with the results, when they end.
"""

import sys

from experiments.emulation.systems import SYSTEMS, import_p3kv

_system = SYSTEMS[sys.argv[2]]
import_p3kv(_system)

import argparse  # noqa: E402
import resource  # noqa: E402
from typing import Any  # noqa: E402

import mxnet as mx  # noqa: E402

from experiments.emulation.emulator import EmulatedModel  # noqa: E402
from experiments.emulation.sparse_emulator import SparseEmulatedModel  # noqa: E402
from experiments.emulation.telling import say  # noqa: E402
from experiments.models.parallax import NAMES, sparse_model  # noqa: E402


def main() -> None:
    """Runs the iterations that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=NAMES)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--dense", action="store_true", help="tables travel whole")
    parser.add_argument("--alpha", type=float, help="with rows for this alpha_model")
    parser.add_argument("--dilation", type=float, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    options = parser.parse_args()
    of = sparse_model(options.model)
    if options.alpha is not None:
        of = of.with_alpha(options.alpha)
    store = create()
    how = {"update_on_kvstore": _system.update_on_kvstore, "stall_s": 300.0}
    if options.dense:
        model = EmulatedModel(of.model, options.dilation, **how)
    else:
        gathers = _system.all_reduce
        model = SparseEmulatedModel(of, store.rank, options.dilation, gathers, **how)
    if _system.update_on_kvstore:
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    model.broadcast(store)
    # The links get their limit now, in the iterations before the measured ones.
    say(event="begin", rank=store.rank)
    model.run(store, options.warm_up + options.iterations)
    mx.nd.waitall()  # the bytes of the last iteration count, too
    say(
        event="end",
        rank=store.rank,
        iteration_s=model.iteration_s[options.warm_up :],
        compute_s=model.compute_s,
        max_rss_kib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    )
    model.close()


def create() -> Any:
    """Makes what the model's gradients are given to."""
    if _system.all_reduce:
        # Only its own environment has Horovod.
        from experiments.emulation.all_reduce import AllReduce

        return AllReduce()
    return mx.kv.create(_system.store)


main()
