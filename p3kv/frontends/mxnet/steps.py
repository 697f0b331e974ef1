"""What becomes of a store's gradients: `ServerSteps` and `LocalSteps` have this in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Collection, ContextManager, List, Optional, Sequence, Tuple

import mxnet as mx
from mxnet.ndarray import NDArray

from p3kv.frontends.mxnet.operations import Operations
from p3kv.wire.messages import Key
from p3kv.worker.transfers import WorkerKey

Pushed = Sequence[Tuple[WorkerKey, List[NDArray], List[NDArray]]]
"""Keys with their gradients and the arrays that their values go to."""


class Steps(ABC):
    """Sends what the script pushes, and gives it values. All keys and arrays are checked.

    Belongs to the script's thread.
    """

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
