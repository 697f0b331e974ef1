"""Children that make MXNet's store: two that the script gives ranks, and one that has none."""

import p3kv  # noqa: F401, I001
import multiprocessing
import os
import sys


def sums() -> None:
    import mxnet as mx

    store = mx.kv.create("p3")
    total = mx.nd.full(1, store.rank + 1)
    store.init(0, mx.nd.zeros(1))
    store.pushpull(0, total, out=total)
    print(f"{store.rank} of {store.num_workers} has {total.asscalar()}", flush=True)


def ranked(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost")
    os.environ["MASTER_PORT"] = sys.argv[1]
    sums()


if __name__ == "__main__":
    processes = [multiprocessing.Process(target=ranked, args=(rank,)) for rank in range(2)]
    processes.append(multiprocessing.Process(target=sums))
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("exit codes", *[process.exitcode for process in processes])
