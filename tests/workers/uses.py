"""The checks of several files in one job, whose start takes the time.

Argument: the folder for the names of the checks that pass.
"""

import p3kv  # noqa: F401, I001
import sys

import dtypes
import mxnet as mx
import owners
import stores
import training
from checks import run

CHECKS = [
    *stores.CHECKS,
    *owners.CHECKS,
    *training.CHECKS,
    # They end with optimizers on the servers.
    *dtypes.CHECKS,
]

if __name__ == "__main__":
    run(CHECKS, mx.kv.create("p3"), sys.argv[1])
