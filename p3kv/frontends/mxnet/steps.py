"""What becomes of a store's gradients. Servers sum them, and update by them if they have an
optimizer; where workers train by themselves, it is `local.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
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

from p3kv.frontends.mxnet import refusals
from p3kv.frontends.mxnet.operations import Operations
from p3kv.frontends.mxnet.optimizers.server_states import ServerStates, ServersUpdater
from p3kv.frontends.mxnet.optimizers.worker_optimizer import WorkerOptimizer
from p3kv.store.pushes import Pushes
from p3kv.store.resuming import Resuming
from p3kv.wire.messages import Key
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey

Pushed = Sequence[Tuple[WorkerKey, List[NDArray], List[NDArray]]]
"""Keys with their gradients and the arrays that their values go to."""


class Steps(ABC):
    """Sends what the script pushes, and gives it values. All keys and arrays are checked. Belongs
    to the script's thread."""

    updater: Any = None
    """The optimizer, as MXNet's Trainer looks for it; None before one is set."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    @abstractmethod
    def set_optimizer(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Has weights be updated by an optimizer from now on."""

    @abstractmethod
    def one_step(self, fresh: Optional[Collection[Key]]) -> ContextManager[None]:
        """Groups the pushes inside into one step; `fresh` as in `Pushes.one_step`."""

    def trains(self, key: Key) -> bool:
        """Whether this worker has a weight of its own for a key."""
        return False

    def given(self, key: WorkerKey, targets: Sequence[NDArray]) -> None:  # noqa: B027
        """Arrays have a key's initial value."""

    def check_out(self, out: Any) -> None:  # noqa: B027
        """Raises NotSupportedError where a push needs to know where the value is to go."""

    @abstractmethod
    def pushpull(self, known: Pushed, priority: int) -> None:
        """Pushes gradients, and has results go to the targets."""

    @abstractmethod
    def push(self, known: Sequence[Tuple[WorkerKey, List[NDArray]]], priority: int) -> None:
        """Pushes gradients."""

    @abstractmethod
    def push_no_gradient(
        self, key: WorkerKey, targets: Sequence[List[NDArray]], priority: int
    ) -> Callable[[], bool]:
        """Says that this worker has no gradient; `targets` has the arrays, if there are any."""

    def pull(
        self, key: WorkerKey, targets: List[NDArray], priority: int, ignore_sparse: bool
    ) -> None:
        """Gives a key's value to the targets."""
        pull = self._operations.pull_dense if ignore_sparse else self._operations.pull
        pull(key, targets, priority)

    @abstractmethod
    def synchronize(self) -> None:
        """Gives all dense arrays that have received values the servers' own."""

    def exchange(self, barrier: Callable[[str], None]) -> None:
        """Has all workers' weights, and the servers', be the mean of all workers'."""
        self.synchronize()

    @abstractmethod
    def save(self, fname: str, dump_optimizer: bool) -> None:
        """Writes optimizer states, as MXNet's own stores do."""

    @abstractmethod
    def load(self, fname: str) -> None:
        """Goes on from states in a file."""


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
            refusals.check_apart(known)
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
