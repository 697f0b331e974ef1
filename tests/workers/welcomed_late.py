"""Worker rank 1 reaches the servers when rank 0 has announced slices of another size long ago.

Argument: the folder for the names of the checks that pass.
"""

import p3kv  # noqa: F401, I001
import sys
import time

import mxnet as mx
import stores
from checks import run
from p3kv.transport import Link
from p3kv.worker.joining import Joining

_link = Joining.link


def late(joining: Joining, server: int) -> Link:
    if joining._roster.rank == 1 and server == 0:
        time.sleep(2)
    return _link(joining, server)


if __name__ == "__main__":
    Joining.link = late
    run([stores.slices_of_all_stores_change_their_size], mx.kv.create("p3"), sys.argv[1])
