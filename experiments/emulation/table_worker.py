"""One worker that trains a table which servers hold, by batches of several sizes, and times it.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the table's pages
are in the servers' memory, and one with the results.
"""

import p3kv.torch  # noqa: I001
import argparse
import os
import time
from typing import Dict, List

import numpy as np
import torch

from experiments.emulation.telling import rss_kib, say

_PAGE_BYTES = 4096
_READ_AT_ONCE = 10_000


def main() -> None:
    """Makes the steps that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", nargs=2, type=int)
    parser.add_argument("--ids", nargs="+", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--more", nargs=2, type=int)
    parser.add_argument("--checkpoint")
    options = parser.parse_args()
    rows, columns = options.shape
    before_kib = rss_kib()
    table = p3kv.torch.Embedding(rows, columns, std=0.01, uniform=True)
    optimizer = p3kv.torch.Optimizer(table, torch.optim.SGD(table.parameters(), lr=0.1))
    began = time.perf_counter()
    _touch(table, optimizer, max(1, _PAGE_BYTES // (4 * columns)))
    touched_s = time.perf_counter() - began
    say(event="begin", rank=optimizer.rank)
    measured: Dict[str, List[float]] = {}
    most_kib = 0
    for turn in range(3):  # the first warms up
        for ids in options.ids:
            for prefetches in (False, True):
                taken_s = _train(table, optimizer, ids, options.steps, prefetches, turn)
                most_kib = max(most_kib, rss_kib())
                if turn:
                    measured.setdefault(f"{ids} {prefetches}", []).extend(taken_s)
    # Of the step before, servers write a checkpoint from now on.
    steps, ids = options.more
    while_written = _train(table, optimizer, ids, steps, False, 3)
    began = time.perf_counter()
    while not _written(options.checkpoint, optimizer.num_workers):
        time.sleep(0.1)
    say(
        event="end",
        while_written=while_written,
        waited_s=time.perf_counter() - began,
        rank=optimizer.rank,
        measured=measured,
        touched_s=touched_s,
        stats=table.stats(),
        grown_kib=most_kib - before_kib,
    )


def _written(folder: str, servers: int) -> bool:
    return sum(name.endswith(".npz") for name in os.listdir(folder)) == servers


def _touch(table: p3kv.torch.Embedding, optimizer: p3kv.torch.Optimizer, every: int) -> None:
    """Reads a row of each page, each worker its part: the servers make them, and hold all pages."""
    starts = range(
        optimizer.rank * _READ_AT_ONCE * every,
        table.num_embeddings,
        optimizer.num_workers * _READ_AT_ONCE * every,
    )
    with torch.no_grad():
        for start in starts:
            end = min(start + _READ_AT_ONCE * every, table.num_embeddings)
            table(torch.arange(start, end, every))


def _train(
    table: p3kv.torch.Embedding,
    optimizer: p3kv.torch.Optimizer,
    ids: int,
    steps: int,
    prefetches: bool,
    turn: int,
) -> List[float]:
    """Seconds of each step: from the rows of a batch until those of the next are there."""
    random = np.random.RandomState([optimizer.rank, ids, prefetches, turn])
    batches = [
        torch.from_numpy(random.randint(table.num_embeddings, size=ids)) for _ in range(steps + 2)
    ]
    taken_s = []
    found = table(batches[0])
    for following in batches[1:]:
        began = time.perf_counter()
        optimizer.zero_grad()
        if prefetches:
            table.prefetch(following)
        found.sum().backward()
        optimizer.step()
        found = table(following)
        taken_s.append(round(time.perf_counter() - began, 5))
    found.sum().backward()
    optimizer.step()
    return taken_s[1:]


main()
