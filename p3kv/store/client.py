"""What a front end needs of a job: it declares keys, pushes gradients, takes values, and saves.

A front end has the framework's arrays. It says when they are ready and where they are in memory; it
knows no rounds, slices or servers.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Generic,
    List,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Union,
)

import numpy as np

from p3kv import config
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.server.optimizer import State
from p3kv.store.forward_order import ForwardReads, OrderLearner
from p3kv.store.pushes import Pushes
from p3kv.store.resuming import GoesOn, Resuming
from p3kv.store.script_optimizer import O
from p3kv.store.states import give_state, states_of
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Key
from p3kv.worker import this_process
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Done, OnSlice, Pull, Push, WorkerKey


class Request(NamedTuple):
    """A push or a pull of a key that the script has made; it travels when its arrays are ready."""

    key: WorkerKey
    round: int
    step: int
    priority: int
    pushes: bool
    pulls: int
    """Of a push: how many pulls of the key were called before it. Of a pull: its number."""
    own_step: int
    """Which of the store's steps it was called in."""
    exact: bool
    changes: Optional[Future[bool]]
    """Of a push without a gradient: it is told whether another worker had one."""
    takes: Optional[int]
    """The round whose value comes, by a rule that lets workers go ahead."""


class Client(Generic[O]):
    """A store of this process, which has joined the job. Belongs to the script's thread, but
    `begin`."""

    def __init__(
        self,
        front_end: str,
        goes_on: Callable[[WorkerStore], GoesOn[O]],
        consistency: Optional[str] = None,
        stays: bool = False,
        reads: Optional[ForwardReads] = None,
        refuse_part: Optional[Callable[[Any], NoReturn]] = None,
    ) -> None:
        """`front_end`: the name of the framework's package, under which servers find its
        optimizers. `goes_on(store)` makes what has them go on from a checkpoint. `consistency`
        chooses the rule, if that is not the job's. `stays`: checkpoints have the store until the
        job ends. `reads` notes in which order the forward pass reads parameters; without it, the
        front end says so by `publish_order`. `refuse_part` as in `Pushes`.

        Waits until all workers are there. Raises ConfigError where this process is no worker.
        """
        if not this_process.joined():
            raise ConfigError(
                "this process is no worker of a p3kv job: start the script by 'p3kv launch', or "
                "'p3kv run' in each process"
            )
        self.worker = this_process.worker()
        if not self.worker.started:
            self.worker.start(config.freeze())
        self.rank = self.worker.rank
        self.num_workers = self.worker.num_workers
        self.own = self.worker.new_store(consistency, stays)
        """The store, as the worker has it."""
        self.order = OrderLearner(self.own.publish_order, reads or _NothingRead())
        if self.rank != 0 or reads is None:  # rank 0 decides, and all workers use its order
            self.order.stop()
            if reads is not None:
                reads.stop()
        self.pushes: Pushes[O] = Pushes(
            self.own, self.order, self.rank, front_end, refuse_part or _refuse_part
        )
        self.resuming: Resuming[O] = Resuming(self.own, self.pushes, self.rank, goes_on(self.own))

    # Keys and their first values.

    def declare(self, key: Key, shape: Sequence[int], dtype: str, name: str) -> WorkerKey:
        """Declares a key on all workers; `name` is the parameter's, for messages. Raises
        KeyMismatchError where another worker means another tensor by it."""
        return self.own.declare(key, shape, dtype, name)

    def first_value(self, key: WorkerKey, array: np.ndarray, done: Done) -> None:
        """Has all workers' contiguous arrays have worker rank 0's value, or the checkpoint's from
        which the job goes on; `done(error)` is called in the worker's thread."""
        if self.rank != 0:
            self.begin(self.pull(key), None, array.ctypes.data, done)
            return
        saved = self.resuming.initial(key)
        if saved is not None:
            array[...] = saved
        self.begin(self.initial(key), array.ctypes.data, None, done)
        self.resuming.give_state(key)

    def initial(self, key: WorkerKey) -> Request:
        """Worker rank 0's push of a key's first value."""
        step = self.pushes.step
        return Request(key, INITIAL_ROUND, step, 0, True, key.pulls, 0, False, None, None)

    def publish_order(self, keys: Sequence[Key]) -> None:
        """Says in which order the forward pass needs the keys; worker rank 0's word counts."""
        if self.rank == 0:
            self.own.publish_order(keys)

    # Steps.

    def set_optimizer(self, optimizer: O) -> None:
        """Has the servers update by an optimizer; the first one goes on where that of the
        checkpoint was. Raises what `Resuming.set_optimizer` raises."""
        self.resuming.set_optimizer(optimizer)

    def begin_step(self) -> ContextManager[None]:
        """What is pushed inside belongs to one step. Nothing that waits for a value may be
        inside."""
        return self.pushes.one_step()

    def end_step(self) -> None:
        """All is pushed of a step."""
        self.own.step_ends()

    def push(
        self,
        key: WorkerKey,
        priority: int = 0,
        changes: Optional[Future[bool]] = None,
        takes_value: bool = True,
    ) -> Request:
        """A push of this step. `changes`: without a gradient; it is told whether another worker
        had one. `takes_value`: whether its round's value comes with it; by some rules, an
        optimizer's older value."""
        round_, step = self.pushes.next(key, changes)
        goes_ahead = takes_value and self.pushes.optimizer is not None
        takes = key.consistency.goes_on_with(round_) if goes_ahead else None
        exact = key.is_exact(round_)
        return Request(
            key, round_, step, priority, True, key.pulls, key.own_step, exact, changes, takes
        )

    def pull(self, key: WorkerKey, priority: int = 0, exact: bool = False) -> Request:
        """The value after this worker's last push; `exact`: as the servers have it, whatever the
        codec."""
        exact = exact or key.is_exact(key.round)
        step = self.pushes.step
        number = key.next_pull()
        return Request(key, key.round, step, priority, False, number, 0, exact, None, None)

    def begin(
        self,
        request: Request,
        source: Optional[int],
        target: Optional[int],
        done: Done,
        on_slice: Optional[OnSlice] = None,
        has_value: bool = False,
    ) -> None:
        """The arrays are ready, at these addresses: contiguous, of the key's dtype and size. They
        stay where and as they are until `done(error)` is called in the worker's thread. From any
        thread. `on_slice` and `has_value` as in `Push`."""
        key, round_, step, pulls = request.key, request.round, request.step, request.pulls
        transfer: Union[Push, Pull]
        if request.pushes:
            source = source if request.changes is None else None
            transfer = Push(key, round_, step, source, target, done)
            transfer.after_pulls, transfer.changes = pulls, request.changes
            transfer.takes, transfer.own_step = request.takes, request.own_step
            transfer.has_value = has_value and request.takes is None
        else:
            transfer = Pull(key, round_, step, pulls, target, done)
        transfer.priority, transfer.exact = request.priority, request.exact
        if request.takes is None:
            transfer.on_slice = on_slice
        self.worker.begin(transfer)

    # States of the servers' optimizer.

    def states(self, key: WorkerKey) -> Optional[State]:
        """What the servers' optimizer has of a key, once this worker's rounds have ended; None if
        nothing."""
        parts = states_of(self.own, key, self._whole)
        return State.joined(parts) if parts else None

    def load_states(self, key: WorkerKey, state: Optional[State]) -> None:
        """Worker rank 0 gives the servers' optimizer what it is to remember of a key; None: it
        begins anew. No worker may push meanwhile."""
        give_state(self.own, key, state, self._whole)

    @property
    def _whole(self) -> bool:
        optimizer = self.pushes.optimizer
        return optimizer is not None and optimizer.needs_whole_tensors


class _NothingRead(ForwardReads):
    def stop(self) -> None:
        pass

    def order(self, keys_by_array: Dict[int, Key]) -> List[Key]:
        return []


def _refuse_part(keys: Any) -> NoReturn:
    raise NotSupportedError("this front end clips no steps")
