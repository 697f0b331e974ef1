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
from p3kv.store.client import Client, Request
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key
from p3kv.worker.transfers import DeferredPush, WorkerKey

_PUSHPULL, _PUSH, _PULL = b"p3kv_pushpull", b"p3kv_push", b"p3kv_pull"
"""Names of operations in MXNet's profiler."""


class Operations:
    """Pushes and pulls declared keys for a store, whole or by rows.

    Calls return at once and come from the script's thread; operations start in any. Arrays are
    lists, with one for each device.
    """

    def __init__(self, client: Client[WorkerOptimizer]) -> None:
        self._client = client
        self._pushes = client.pushes
        self._staging = Staging()
        worker, order = client.worker, client.order
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
        self._begin_when_ready(self._client.initial(key), source, None)

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
        request = self._client.push(key, priority, takes_value=False)
        self._begin_when_ready(request, source, None)

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
        self._begin_when_ready(self._client.push(key, priority), source, target)
        spread(target, targets)

    def exchange(self, key: WorkerKey, source: NDArray, target: NDArray, priority: int) -> None:
        """Pushes an array in CPU memory of the key's dtype, and has the result come into
        another."""
        self._begin_when_ready(self._client.push(key, priority), source, target)

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
        if key.touched_only:
            round_, step = self._pushes.next(key, changes)
            self._client.order.note_ready(key.key)
            self._rows.push_no_gradient(key, round_, step, priority, changes)
        else:
            request = self._client.push(key, priority, changes, takes_value=target is not None)
            self._begin_when_ready(request, None, target)
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
            self._begin_when_ready(self._client.pull(key, priority, exact), None, target)
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
        self, request: Request, source: Optional[NDArray], target: Optional[NDArray]
    ) -> None:
        """Has the worker begin a transfer when its arrays are ready."""
        key = request.key
        by_rows = key.zero_rows is not None and key.zero_rows.leaves_out
        if by_rows:
            engine.bind_writes()

        def start(operation: engine.Operation) -> None:
            has_value = by_rows and source is not None and self._is_filled(key, target)
            if request.pushes and request.round != INITIAL_ROUND:
                self._client.order.note_ready(key.key)
            source_at = None if source is None else engine.address(source)
            target_at = None if target is None else engine.address(target)
            self._client.begin(
                request, source_at, target_at, operation.complete, has_value=has_value
            )

        reads = [] if source is None or source is target else [source]
        writes = [] if target is None else [target]
        name = _PUSH if target is None else _PUSHPULL if request.pushes else _PULL
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

    def _add_when_ready(self, key: WorkerKey, source: NDArray) -> None:
        """Adds a gradient that is not exchanged to what the next one brings along."""
        self._pushes.check(key)

        def start(operation: engine.Operation) -> None:
            address = engine.address(source)
            self._client.worker.begin(DeferredPush(key, address, operation.complete))

        engine.push(start, [source], [], _PUSH)
