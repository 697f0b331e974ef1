"""Gradients that servers sum, and by which they update the weights if they have an optimizer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Collection,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
)

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet import clipping_refusals
from p3kv.frontends.mxnet.operations import Operations
from p3kv.frontends.mxnet.optimizers.server_states import ServerStates
from p3kv.frontends.mxnet.optimizers.updater import ServersUpdater
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.frontends.mxnet.steps import Pushed, Steps
from p3kv.store.pushes import Pushes
from p3kv.store.resuming import Resuming
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


class ServerSteps(Steps):
    """Pushes gradients to the servers, whose values come back."""

    def __init__(
        self,
        own: WorkerStore,
        operations: Operations,
        pushes: Pushes[WorkerOptimizer],
        resuming: Resuming[WorkerOptimizer],
        states: ServerStates,
    ) -> None:
        super().__init__(operations)
        self._own = own
        self._pushes = pushes
        self._resuming = resuming
        self._states = states
        self._pushed_for: Dict[Key, Tuple[WorkerKey, List[NDArray]]] = {}
        self._pulled_for: Dict[Key, Tuple[WorkerKey, List[NDArray]]] = {}
        """Arrays that a key's value has gone to last, by a push and by a pull."""

    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        set_now = WorkerOptimizer(
            optimizer,
            self._pushes.step,
            momentum_by_codec=self._own.codec_applies_momentum,
        )
        self._resuming.set_optimizer(set_now)
        self.updater = ServersUpdater(optimizer, self._states.of_keys)

    def one_step(self, fresh: Optional[Collection[Key]]) -> ContextManager[None]:
        return self._pushes.one_step(fresh)

    def pushpull(self, known: Pushed, priority: int) -> None:
        if self._pushes.clipping.clips:
            clipping_refusals.check_apart(known)
        with self._one_call(known):
            for key, sources, targets in known:
                self._operations.pushpull(key, sources, targets, priority)
                self._pushed_for[key.key] = key, targets

    def push(self, known: Sequence[Tuple[WorkerKey, List[NDArray]]], priority: int) -> None:
        with self._one_call(known):
            for key, sources in known:
                self._operations.push(key, sources, priority)

    def push_no_gradient(
        self, key: WorkerKey, targets: Sequence[List[NDArray]], priority: int
    ) -> Callable[[], bool]:
        if self._pushes.clipping.clips:
            self._pushes.begin_clipped_call([(key, *targets)])
        return self._operations.push_no_gradient(key, priority, *targets)

    def pull(
        self, key: WorkerKey, targets: List[NDArray], priority: int, ignore_sparse: bool
    ) -> None:
        super().pull(key, targets, priority, ignore_sparse)
        self._pulled_for[key.key] = key, targets

    def synchronize(self) -> None:
        for key, targets in (*self._pushed_for.values(), *self._pulled_for.values()):
            self._operations.pull_dense(key, targets, 0, exact=True)

    def save(self, fname: str, dump_optimizer: bool) -> None:
        self._states.save(fname, dump_optimizer)

    def load(self, fname: str) -> None:
        self.updater = ServersUpdater(self._states.load(fname), self._states.of_keys)

    @contextmanager
    def _one_call(self, known: Sequence[Tuple[Any, ...]]) -> Iterator[None]:
        """A call of the script's, which is a whole step where steps are clipped."""
        if not self._pushes.clipping.clips:
            yield
            return
        self._pushes.begin_clipped_call(known)
        yield
        self._pushes.clipping.end_call()
