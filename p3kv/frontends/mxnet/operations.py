"""The operations of MXNet's engine by which the values of a store's keys travel."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import engine
from p3kv.frontends.mxnet.arrays import DENSE, Staging, spread
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.frontends.mxnet.rows import RowOperations
from p3kv.store.forward_order import OrderLearner
from p3kv.store.pushes import Pushes
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key
from p3kv.worker.transfers import Transfer, WorkerKey
from p3kv.worker.worker import Worker

_PUSHPULL, _PUSH, _PULL = b"p3kv_pushpull", b"p3kv_push", b"p3kv_pull"
"""Names of operations in MXNet's profiler."""


class Operations:
    """Pushes and pulls declared keys for a store, whole or by rows.

    Calls return at once and come from the script's thread; operations start in any. Arrays are
    lists, with one for each device.
    """

    def __init__(
        self, worker: Worker, pushes: Pushes[WorkerOptimizer], order: OrderLearner
    ) -> None:
        self._worker = worker
        self._pushes = pushes
        self._order = order
        self._staging = Staging()
        self._rows = RowOperations(worker.begin, worker.abort, order.note_ready)
        self._filled: Dict[Key, Tuple[NDArray, int]] = {}
        """By key of which rows may be left out: the array that has its last value, and how often it
        has been written with that."""

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
        if not key.is_next_exchanged():
            self._add_when_ready(key, source)
            return
        round_, step = self._pushes.next(key)
        self._begin_when_ready(key, round_, step, priority, source, None)

    def pushpull(
        self, key: WorkerKey, sources: List[NDArray], targets: List[NDArray], priority: int
    ) -> None:
        """Pushes the sum of gradients, and gives the result with which the worker goes on to all
        targets; where the push is not exchanged, they stay as they are."""
        if key.touched_only:
            self.push(key, sources, priority)
            self.pull(key, targets, priority)
            return
        source = self._staging.source(key, sources)
        if not key.is_next_exchanged():
            self._add_when_ready(key, source)
            return
        target = self._staging.target(key, targets)
        round_, step = self._pushes.next(key)
        self._begin_when_ready(key, round_, step, priority, source, target)
        spread(target, targets)

    def exchange(self, key: WorkerKey, source: NDArray, target: NDArray, priority: int) -> None:
        """Pushes an array in CPU memory of the key's dtype, and has the result come into
        another."""
        round_, step = self._pushes.next(key)
        self._begin_when_ready(key, round_, step, priority, source, target)

    def push_no_gradient(
        self, key: WorkerKey, priority: int, targets: Sequence[NDArray] = ()
    ) -> Callable[[], bool]:
        """Has the key's round go on without a gradient of this worker, and gives its result to the
        targets; a sum only where another worker had a gradient, and by the function that is
        returned. It waits for the round's end, and says whether another worker had one."""
        if not key.is_next_exchanged():
            return lambda: False
        changes: Future[bool] = Future()
        target = self._staging.target(key, targets) if targets else None
        round_, step = self._pushes.next(key, changes)
        if key.touched_only:
            self._order.note_ready(key.key)
            self._rows.push_no_gradient(key, round_, step, priority, changes)
        else:
            self._begin_when_ready(key, round_, step, priority, None, target, changes)
        is_sum = self._pushes.optimizer is None
        if target is not None and not is_sum:
            spread(target, targets)

        def any_gradient() -> bool:
            changed = changes.result()
            if changed and target is not None and is_sum:
                spread(target, targets)
            return changed

        return any_gradient

    def pull(
        self, key: WorkerKey, targets: Sequence[NDArray], priority: int, exact: bool = False
    ) -> None:
        """Gives the value of the last round that was pushed to all targets; `exact`: as it is on
        the servers, whatever the codec."""
        target = self._staging.target(key, targets)
        if key.touched_only:
            self._rows.pull(key, self._pushes.step, priority, target)
        else:
            step = self._pushes.step
            self._begin_when_ready(key, key.round, step, priority, None, target, exact=exact)
        spread(target, targets)

    def pull_dense(
        self, key: WorkerKey, targets: Sequence[NDArray], priority: int, exact: bool = False
    ) -> None:
        """Like `pull`, and leaves sparse targets as they are."""
        targets = self._staging.dense_targets(key, targets)
        if targets:
            self.pull(key, targets, priority, exact)

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
        changes: Optional[Future[bool]] = None,
        exact: bool = False,
    ) -> None:
        """Has the worker begin a transfer when its arrays are ready. With `changes` it is a push
        without a gradient."""
        pushes = source is not None or changes is not None
        exact = exact or key.is_exact(round_)
        takes = key.consistency.needs(round_) if self._goes_ahead(key, target) else None
        asks = key.asks() if pushes else (key.ask(),)
        by_rows = key.zero_rows is not None and key.zero_rows.leaves_out
        if by_rows:
            engine.bind_writes()

        def start(operation: engine.Operation) -> None:
            has_value = by_rows and source is not None and self._is_filled(key, target)
            if pushes and round_ != INITIAL_ROUND:
                self._order.note_ready(key.key)
            source_at = None if changes is None else 0
            if source is not None:
                source_at = engine.address(source)
            target_at = None if target is None else engine.address(target)
            self._worker.begin(
                Transfer(
                    key, round_, step, priority, source_at, target_at, operation.complete, asks,
                    changes, takes, exact=exact, has_value=has_value and takes is None,
                )
            )  # fmt: skip

        reads = [] if source is None or source is target else [source]
        writes = [] if target is None else [target]
        name = _PUSH if target is None else _PUSHPULL if pushes else _PULL
        engine.push(start, reads, writes, name)

    def _is_filled(self, key: WorkerKey, target: Optional[NDArray]) -> bool:
        """Whether nobody has written into a push's target since its last value came there; takes
        note that the next one will. To be called when the operation has started."""
        array, writes = self._filled.pop(key.key, (None, None))
        if target is None:
            return False
        count = engine.writes(target)
        if count is not None:
            self._filled[key.key] = target, count + 1  # with the operation's own
        return array is target and writes == count

    def _goes_ahead(self, key: WorkerKey, target: Optional[NDArray]) -> bool:
        """Whether the consistency rule says with which round's value this worker goes on. Sums are
        always those of the round."""
        has_optimizer = self._pushes.optimizer is not None
        return key.consistency.lets_go_ahead and has_optimizer and target is not None

    def _add_when_ready(self, key: WorkerKey, source: NDArray) -> None:
        """Adds a gradient that is not exchanged to what the next one brings along."""
        self._pushes.check(key)
        round_, step = key.round, self._pushes.step

        def start(operation: engine.Operation) -> None:
            address = engine.address(source)
            self._worker.begin(
                Transfer(
                    key, round_, step, 0, address, None, operation.complete, is_exchanged=False
                )
            )

        engine.push(start, [source], [], _PUSH)
