"""One worker that synchronises a table of which each iteration touches some rows, and times it.

Started by `experiments.campaign.job` in a worker's role; prints a JSON line when the table is on
the servers and one, with the results, when the measured iterations end.
"""

import sys

from experiments.emulation.systems import SYSTEMS, import_p3kv
from experiments.emulation.telling import say

_system = SYSTEMS[sys.argv[1]]
import_p3kv(_system)

import argparse  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, Callable, Dict, Tuple  # noqa: E402

import mxnet as mx  # noqa: E402
import numpy as np  # noqa: E402


def main() -> None:
    """Runs the iterations that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("way", choices=("rows", "dense"))
    parser.add_argument("shape", nargs=2, type=int)
    parser.add_argument("touched", type=int)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--warm-up", type=int)
    options = parser.parse_args()
    store = mx.kv.create(_system.store)
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1))
    begin = _rows if options.way == "rows" else _dense
    prepare = begin(store, tuple(options.shape), options.touched)
    taken_s, before = [], {}
    prepare(0)()
    # The links get their limit now, in the iterations before the measured ones.
    say(event="begin", rank=store.rank)
    for number in range(options.warm_up + options.iterations):
        synchronise = prepare(number + 1)
        store._barrier()
        if number == options.warm_up:
            before = _counts(store)
        began = time.perf_counter()
        synchronise()
        taken_s.append(time.perf_counter() - began)
    store._barrier()
    after = _counts(store)
    say(
        event="end",
        rank=store.rank,
        iteration_s=taken_s[options.warm_up :],
        counts={name: after[name] - before[name] for name in after},
    )
    mx.nd.waitall()


def _rows(store: Any, shape: Tuple[int, int], touched: int) -> Callable[[int], Callable[[], None]]:
    """A row_sparse weight; returns what prepares an iteration, which then pushes a batch's rows and
    pulls those of the next one."""
    initial = mx.nd.sparse.zeros("row_sparse", shape)
    if store.rank == 0:
        every = np.arange(shape[0])
        initial = mx.nd.sparse.row_sparse_array((mx.nd.zeros(shape), every), shape)
    store.init("table", initial)
    initial = None
    elements = mx.nd.ones((touched, shape[1]))
    out = mx.nd.sparse.zeros("row_sparse", shape)

    def prepare(number: int) -> Callable[[], None]:
        ids, following = (
            np.random.default_rng([store.rank, at]).choice(shape[0], touched, replace=False)
            for at in (number, number + 1)
        )
        gradient = mx.nd.sparse.row_sparse_array((elements, np.sort(ids)), shape)
        row_ids = mx.nd.array(following, dtype="int64")
        mx.nd.waitall()

        def synchronise() -> None:
            store.push("table", gradient)
            store.row_sparse_pull("table", out=out, row_ids=row_ids)
            out.wait_to_read()

        return synchronise

    return prepare


def _dense(store: Any, shape: Tuple[int, int], touched: int) -> Callable[[int], Callable[[], None]]:
    """A dense weight and a dense gradient, whatever part of it is touched."""
    weight, gradient = mx.nd.zeros(shape), mx.nd.ones(shape)
    store.broadcast("table", weight, out=weight)

    def prepare(number: int) -> Callable[[], None]:
        mx.nd.waitall()

        def synchronise() -> None:
            store.pushpull("table", gradient, out=weight)
            weight.wait_to_read()

        return synchronise

    return prepare


def _counts(store: Any) -> Dict[str, int]:
    """Bytes so far: of all that this host's link has carried, and as p3kv counts them."""
    counts = {"link_received": 0, "link_sent": 0}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, fields = line.partition(":")
        if name.strip() != "lo":
            counts["link_received"] += int(fields.split()[0])
            counts["link_sent"] += int(fields.split()[8])
    if _system.store == "p3":
        stats = store.stats()
        counts.update(sent=stats["bytes_sent"], received=stats["bytes_received"])
    return counts


main()
