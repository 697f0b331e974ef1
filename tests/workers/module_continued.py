"""Module.fit goes on from a checkpoint; the weights at the end are those of a single run.

The first run ends after all epochs, too; the second one is to find that of its first epoch's end.
"""

import p3kv  # noqa: F401, I001
import mxnet as mx
from module import BATCHES, EPOCHS, SGD, alone, compare, data, initial, symbol


def main() -> None:
    store = mx.kv.create("p3")
    module = mx.mod.Module(symbol("continued"))
    module.fit(
        data(store.rank),
        kvstore=store,
        begin_epoch=store.resumed_steps // BATCHES,
        num_epoch=EPOCHS,
        optimizer="sgd",
        optimizer_params=SGD,
        arg_params={name: mx.nd.array(value) for name, value in initial("continued").items()},
        aux_params={},
    )
    compare(module, alone("continued", store.num_workers, 1, []))
    print(f"right from step {store.resumed_steps} on")


main()
