"""Counts with all workers, until the folder of the first argument has a file `stop`.

Each worker pushes the number of the round in every element, and the sum that comes back must be
exact. Worker 0 writes the number of its rounds into the file `rounds`.
"""

import p3kv  # noqa: F401, I001
import sys
import time
from pathlib import Path

import mxnet as mx

_KEYS, _ELEMS = 4, 3000
_PAUSE_S = 0.02


def main() -> None:
    """Each round has a key more, by which worker 0 says that it is the last one."""
    folder = Path(sys.argv[1])
    store = mx.kv.create("p3")
    sums = [mx.nd.zeros(_ELEMS) for _ in range(_KEYS)]
    last = mx.nd.zeros(1)
    for key, array in enumerate([*sums, last]):
        store.broadcast(key, array, out=array)
    number = 0
    while last.asscalar() == 0:
        number += 1
        for key, array in enumerate(sums):
            array[:] = number
            store.pushpull(key, array, out=array)
        last[:] = (folder / "stop").exists() and store.rank == 0
        store.pushpull(_KEYS, last, out=last)
        for array in sums:
            assert (array.asnumpy() == number * store.num_workers).all(), number
        if store.rank == 0:
            (folder / "new").write_text(str(number))
            (folder / "new").rename(folder / "rounds")
        time.sleep(_PAUSE_S)
    print(f"exact in {number} rounds", flush=True)


main()
