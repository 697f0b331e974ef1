"""Parameters that nobody trains at present, such as frozen ones: nothing travels for them.

A parameter falls asleep when a step ends in which no worker had a gradient of it, which all workers
know before the next one begins. In each step each worker says by one small key for all of them of
which it has a gradient; mostly none. Whoever reads one waits for what the others say, also of one
that it has woken itself. One of which any worker has a gradient is awake again on all, in the same
step: those without say so then.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, Callable, List, Optional, Sequence, Set, Tuple
from weakref import WeakSet

import torch

from p3kv.frontends.torch.script_marks import may_begin_forward
from p3kv.frontends.torch.values.bucket import Bucket
from p3kv.frontends.torch.values.tally import Tally
from p3kv.frontends.torch.values.watched import Watcher, unwatch, watch
from p3kv.worker.stores import WorkerStore
from p3kv.worker.worker import Worker


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
        self._tally: Optional[Tally] = None
        """Of which a worker has a gradient; once any is asleep."""
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
        bucket.woken_by = self

    def say(self, step: int) -> None:
        """Says which ones this worker has woken, when it has pushed all of a step."""
        if self._has_said or not self._asleep:
            return
        self._has_said = True
        if self._tally is None:
            self._tally = Tally(
                self._worker, self._own, "who is awake", "which parameters have gradients",
                len(self._every),
            )  # fmt: skip
        if self._woken:
            self._tally.said[:] = torch.tensor([id(one) in self._woken for one in self._every])
        self._waits = True
        self._tally.push(step, says=bool(self._woken))

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
        return not self._waits or self._tally is None or self._tally.is_there

    def settle(self) -> List[Bucket]:
        """Waits for what others have said; returns the buckets that they have woken."""
        if not self._waits:
            return []
        with self._lock:
            if not self._waits:
                return []
            assert self._tally is not None
            heard = self._tally.sums()
            armed, self._armed = self._armed, []
            unwatch(self, armed)
            self._waits = False
            if heard is None:
                return []
            awake = [one for one, woken in zip(self._every, heard.tolist()) if woken]
            for one in awake:
                one.asleep, one.woken_by = False, None
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


def settle_all() -> None:
    """Has all optimizers know what is awake."""
    for asleep in list(_all):
        asleep.settle()


_all: WeakSet[Asleep] = WeakSet()
