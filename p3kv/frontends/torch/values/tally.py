"""Small numbers of all workers, added up beside the gradients: who has a gradient, or a batch."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Optional

import torch

from p3kv.frontends.torch.script_marks import waited
from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import Push
from p3kv.worker.worker import Worker

HEARD = threading.Event()
"""Set when the sums of any tally have come."""


class Tally:
    """Sums of int32 numbers over all workers, by one small key of a store.

    All workers make the same pushes. Belongs to whoever makes them; one ends before the next.
    """

    def __init__(self, worker: Worker, own: WorkerStore, key: str, called: str, elems: int) -> None:
        """Declares `key`, which messages name as `called`; all workers do."""
        self.said = torch.zeros(elems, dtype=torch.int32, device="cpu")
        """This worker's numbers, to be written before a push."""
        self._worker = worker
        self._own = own
        self._sums = torch.zeros_like(self.said)
        self._changes: Optional[Future[bool]] = None
        """Whether any worker has said something, where this one has not."""
        self._error: Optional[BaseException] = None
        self._there = threading.Event()
        self._there.set()
        self._key = own.declare(key, (elems,), "int32", called, beside=True)
        if worker.rank == 0:
            said_at = self.said.data_ptr()
            worker.begin(Push(self._key, INITIAL_ROUND, 0, said_at, None, _ignore))

    def push(self, step: int, says: bool = True) -> None:
        """Sends this worker's numbers; all are 0 where it `says` nothing, and none travels."""
        key = self._key
        key.round += 1
        self._own.count_push(step)
        self._there.clear()
        self._changes = None if says else Future()
        source_at = self.said.data_ptr() if says else None
        push = Push(key, key.round, step, source_at, self._sums.data_ptr(), self._arrived)
        push.after_pulls, push.changes = key.pulls, self._changes
        self._worker.begin(push)

    @property
    def is_there(self) -> bool:
        """Whether the sums of the last push have come."""
        return self._there.is_set()

    def sums(self) -> Optional[torch.Tensor]:
        """The sums of the last push, until the next one; None where no worker has said anything.
        Waits for all workers; raises the job's failure."""
        if not self._there.is_set():
            waited(self._there.wait)
        if self._error is not None:
            raise self._error
        if self._changes is not None and not self._changes.result():
            return None
        return self._sums

    def _arrived(self, error: Optional[BaseException]) -> None:
        """Called in the worker's thread."""
        self._error = error
        self._there.set()
        HEARD.set()


def _ignore(error: Optional[BaseException]) -> None:
    """An initial value has left, or the job has failed, which others say."""
