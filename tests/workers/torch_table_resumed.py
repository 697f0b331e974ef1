"""Goes on with a table that is larger than what a worker may need. Argument: a step after which
each worker kills itself."""

import p3kv.torch  # noqa: I001
import os
import resource
import signal
import sys
import time

import torch

ROWS, WIDTH, STEPS = 800_000, 64, 6  # 200 MB


def resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    before = resident_bytes()
    table = p3kv.torch.Embedding(ROWS, WIDTH, std=0.0)
    optimizer = p3kv.torch.Optimizer(table, torch.optim.SGD(table.parameters(), lr=1.0))
    resumed = optimizer.resumed_steps
    ids = torch.arange(5, ROWS, ROWS // 7)
    for step in range(resumed, STEPS):
        optimizer.zero_grad()
        found = table(ids)
        assert (found == -step).all(), (step, found[:, 0])
        found.sum().backward()
        optimizer.step()
        if step == int(sys.argv[1]) and not resumed:
            optimizer.wait()
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    with torch.no_grad():
        assert (table(ids) == -STEPS).all() and not table(ids + 1).any()
    grown = resident_bytes() - before
    assert grown < 100e6, grown
    print(f"little memory after {resumed} steps")


main()
