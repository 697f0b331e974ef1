"""The operations of MXNet's engine by which the values of a store's keys travel."""

from __future__ import annotations

from typing import List, Optional, Sequence

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, Staging, spread
from p3kv.frontends.mxnet.forward_order import OrderLearner
from p3kv.frontends.mxnet.pushes import Pushes
from p3kv.frontends.mxnet.rows import Rows
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import Transfer, WorkerKey
from p3kv.worker.worker import Worker

_PUSHPULL, _PUSH, _PULL = b"p3kv_pushpull", b"p3kv_push", b"p3kv_pull"
"""Names of operations in MXNet's profiler."""


class Operations:
    """Pushes and pulls declared keys for a store, whole or by rows.

    Calls return at once and come from the script's thread; operations start in any. Arrays are
    lists, with one for each device.
    """

    def __init__(self, worker: Worker, pushes: Pushes, order: OrderLearner) -> None:
        self._worker = worker
        self._pushes = pushes
        self._order = order
        self._staging = Staging()
        self._rows = Rows(worker.begin, worker.abort, order.ready)

    def push_initial(self, key: WorkerKey, value: NDArray, outs: Sequence[NDArray] = ()) -> None:
        """Gives a key its initial value; `outs` are the arrays that get it."""
        if key.touched_only:
            source = value.as_in_context(mx.cpu())
            kept = source.stype == DENSE and any(out is source for out in outs)
            self._rows.push(key, INITIAL_ROUND, self._pushes.step, 0, source, kept)
            return
        source = self._staging.source(key, [value])
        self._begin_when_ready(key, INITIAL_ROUND, self._pushes.step, 0, source, None)

    def push(self, key: WorkerKey, sources: List[NDArray], priority: int) -> None:
        """Pushes the sum of gradients."""
        if key.touched_only:
            source = self._rows.source(key, sources)
            self._rows.push(key, *self._pushes.next(key), priority, source)
            return
        source = self._staging.source(key, sources)
        round_, step = self._pushes.next(key)
        self._begin_when_ready(key, round_, step, priority, source, None)

    def pushpull(
        self, key: WorkerKey, sources: List[NDArray], targets: List[NDArray], priority: int
    ) -> None:
        """Pushes the sum of gradients, and gives the round's result to all targets."""
        if key.touched_only:
            self.push(key, sources, priority)
            self.pull(key, targets, priority)
            return
        source = self._staging.source(key, sources)
        target = self._staging.target(key, targets)
        round_, step = self._pushes.next(key)
        self._begin_when_ready(key, round_, step, priority, source, target)
        spread(target, targets)

    def pull(self, key: WorkerKey, targets: Sequence[NDArray], priority: int) -> None:
        """Gives the value of the last round that was pushed to all targets."""
        target = self._staging.target(key, targets)
        if key.touched_only:
            self._rows.pull(key, self._pushes.step, priority, target)
        else:
            self._begin_when_ready(key, key.round, self._pushes.step, priority, None, target)
        spread(target, targets)

    def pull_dense(self, key: WorkerKey, targets: Sequence[NDArray], priority: int) -> None:
        """Like `pull`, and leaves sparse targets as they are."""
        targets = self._staging.dense_targets(key, targets)
        if targets:
            self.pull(key, targets, priority)

    def pull_rows(
        self, key: WorkerKey, targets: List[NDArray], priority: int, ids: NDArray
    ) -> None:
        """Gives the rows with these numbers to row_sparse arrays."""
        self._rows.pull_named(key, self._pushes.step, priority, targets, ids)

    def _begin_when_ready(
        self,
        key: WorkerKey,
        round_: int,
        step: int,
        priority: int,
        source: Optional[NDArray],
        target: Optional[NDArray],
    ) -> None:
        """Has the worker begin a transfer when its arrays are ready."""
        asks = (key.ask(),) if source is None else key.asks()

        def start(operation: engine.Operation) -> None:
            if source is not None and round_ != INITIAL_ROUND:
                self._order.ready(key.key)
            source_at = None if source is None else engine.address(source)
            target_at = None if target is None else engine.address(target)
            self._worker.begin(
                Transfer(
                    key, round_, step, priority, source_at, target_at, operation.complete, asks
                )
            )

        reads = [] if source is None or source is target else [source]
        writes = [] if target is None else [target]
        name = _PUSH if target is None else _PULL if source is None else _PUSHPULL
        engine.push(start, reads, writes, name)
