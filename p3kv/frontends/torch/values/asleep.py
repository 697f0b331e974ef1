"""Parameters that nobody trains at present, such as frozen ones: nothing travels for them.

A parameter falls asleep when a step ends in which no worker had a gradient of it, which all workers
know before the next one begins. In each step each worker says by one small key for all of them of
which it has a gradient; mostly none. Whoever reads one waits for what the others say. One of which
any worker has a gradient is awake again on all, in the same step: those without say so then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import torch

from p3kv.frontends.torch.script_marks import may_begin_forward, waited
from p3kv.frontends.torch.values.bucket import Bucket
from p3kv.frontends.torch.values.watched import Watcher, unwatch, watch
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Push, WorkerKey
from p3kv.worker.worker import Worker

_DTYPE = "int32"
HEARD = threading.Event()
"""Set when all workers have said something that this one may wait for."""


class Asleep(Watcher):
    """The parameters of an optimizer that are asleep. Belongs to whoever holds `lock`."""

    def __init__(
        self,
        worker: Worker,
        own: WorkerStore,
        every: Sequence[Bucket],
        lock: threading.RLock,
        wake: Callable[[Bucket], None],
    ) -> None:
        """`every` bucket of the store. `wake(one)` says that this worker has
        no gradient of one that is awake again, in the step that has just ended."""
        self._worker = worker
        self._own = own
        self._every = every
        self._lock = lock
        self._wake = wake
        # Where workers leave, worker 0 may not begin a key.
        self._may = own.rule.waits_for_each_round and not worker.settings.let_workers_leave
        # A step has at least one push of the store.
        smallest = min(every, key=lambda bucket: bucket.size_bytes, default=None)
        self._never = {id(smallest)}
        self._lacked: List[Tuple[Bucket, Future[bool]]] = []
        """Those of which this worker had no gradient in this step, and whether another one had."""
        self._asleep: List[Bucket] = []
        self._armed: List[torch.nn.Parameter] = []
        """Those whose readers wait."""
        self._woken: Set[int] = set()
        """Ids of those that this worker has woken in this step."""
        self._key: Optional[WorkerKey] = None
        self._said: torch.Tensor = torch.zeros(len(every), dtype=torch.int32)
        self._heard = torch.zeros_like(self._said)
        self._changes: Optional[Future[bool]] = None
        """Whether another worker has woken any, while this one has not; None: this one has."""
        self._there = threading.Event()
        self._error: Optional[BaseException] = None
        self._has_said = False
        """Whether this worker has said it in this step."""
        self._waits = False
        """Whether it is to be heard what others have said."""
        _all.add(self)

    def lacks(self, bucket: Bucket, changes: Future[bool]) -> None:
        """This worker has no gradient of a bucket that is awake."""
        never = bucket.is_table or id(bucket) in self._never
        if self._may and bucket.key.codecs.values.in_place and not never:
            self._lacked.append((bucket, changes))

    def begin_step(self) -> None:
        """To be called when a step begins, once it is known what others had in the last one."""
        lacked, self._lacked = self._lacked, []
        for bucket, changes in lacked:
            if not changes.result():
                bucket.take()
                bucket.asleep = True
                self._asleep.append(bucket)
        self._has_said = False

    def woken(self, bucket: Bucket) -> None:
        """This worker has a gradient of one, and pushes it in this step."""
        self._woken.add(id(bucket))

    def say(self, step: int) -> None:
        """Says which ones this worker has woken, when it has pushed all of a step."""
        if self._has_said or not self._asleep:
            return
        self._has_said = True
        if self._key is None:
            self._key = self._declared()
        key, wakes = self._key, bool(self._woken)
        key.round += 1
        self._own.count_push(step)
        self._there.clear()
        self._waits = True
        self._changes = None if wakes else Future()
        if wakes:
            self._said = torch.tensor([id(one) in self._woken for one in self._every]).int()
        source_at = self._said.data_ptr() if wakes else None
        push = Push(key, key.round, step, source_at, self._heard.data_ptr(), self._arrived)
        push.after_pulls, push.changes = key.pulls, self._changes
        self._worker.begin(push)

    def arm(self) -> None:
        """From now on, whoever reads one that is asleep waits for what others have said."""
        with self._lock:
            if self._waits:
                asleep = [one for one in self._asleep if id(one) not in self._woken]
                self._armed = [weight.parameter for one in asleep for weight in one.weights]
                watch(self, self._armed)

    @property
    def is_heard(self) -> bool:
        """Whether `settle` need not wait."""
        return not self._waits or self._there.is_set()

    def settle(self) -> List[Bucket]:
        """Waits for what others have said; returns the buckets that they have woken."""
        if not self._waits:
            return []
        with self._lock:
            if not self._waits:
                return []
            if not self._there.is_set():
                waited(self._there.wait)
            if self._error is not None:
                raise self._error
            armed, self._armed = self._armed, []
            unwatch(self, armed)
            self._waits = False
            if self._changes is not None and not self._changes.result():
                return []
            awake = [one for one, heard in zip(self._every, self._heard.tolist()) if heard]
            for one in awake:
                one.asleep = False
            self._asleep = [one for one in self._asleep if one.asleep]
            others, self._woken = [one for one in awake if id(one) not in self._woken], set()
            for one in others:
                self._wake(one)
            return others

    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        for bucket in self.settle():
            bucket.take()

    def read(self, tensor: torch.Tensor, function: Any) -> None:
        may_begin_forward()
        self.take()

    def _arrived(self, error: Optional[BaseException]) -> None:
        """Called in the worker's thread."""
        self._error = error
        self._there.set()
        HEARD.set()

    def _declared(self) -> WorkerKey:
        key = self._own.declare(
            "who is awake", (len(self._every),), _DTYPE, "which parameters have gradients",
            beside=True,
        )  # fmt: skip
        if self._worker.rank == 0:
            said_at = self._said.data_ptr()
            self._worker.begin(Push(key, INITIAL_ROUND, 0, said_at, None, _ignore))
        return key


def settle_all() -> None:
    """Has all optimizers know what is awake."""
    for asleep in list(_all):
        asleep.settle()


def _ignore(error: Optional[BaseException]) -> None:
    """An initial value has left, or the job has failed, which others say."""


_all: WeakSet[Asleep] = WeakSet()
