"""Horovod with MXNet, in the form of a store: the calls that its `DistributedTrainer` makes."""

from __future__ import annotations

from typing import Any, Sequence

import horovod
import horovod.mxnet as hvd
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import engine


class AllReduce:
    """Horovod's all-reduce under a store's calls; one in a process, made by all workers.

    Read off horovod 0.28.1, `horovod/mxnet/__init__.py` (`_allreduce_grads`,
    `broadcast_parameters`): sums in place, with the keys as names and as priorities. Averages are
    the optimizer's. Fusion and cycle time are Horovod's defaults.
    """

    type = "horovod"
    version = horovod.__version__

    def __init__(self) -> None:
        hvd.init()
        self.rank = hvd.rank()
        self.num_workers = hvd.size()

    def broadcast(self, key: int, value: NDArray, out: Any, priority: int = 0) -> None:
        hvd.broadcast_(value, root_rank=0, name=f"weight {key}", priority=priority)

    def gather(
        self, key: int, value: NDArray, rows: NDArray, out: NDArray, priority: int = 0
    ) -> None:
        """Gathers all workers' rows of a gradient, as Horovod does with sparse ones of TensorFlow;
        `out` is ready then."""
        gathered = [
            hvd.allgather(one, name=f"{key} {what}", priority=priority)
            for what, one in (("rows", rows), ("elements", value))
        ]
        engine.push(engine.Operation.complete, gathered, [out], b"update")

    def pushpull(self, key: int, value: Sequence[NDArray], priority: int = 0) -> None:
        hvd.allreduce_(value[0], op=hvd.Sum, name=str(key), priority=priority)
