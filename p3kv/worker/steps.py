"""The steps of a worker's stores that have not ended, and the optimizer settings that they need."""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, Mapping, Tuple

from p3kv.wire.connection import Connection
from p3kv.wire.fields import OptimizerHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT, Kind
from p3kv.worker.saving.checkpoints import Checkpoints
from p3kv.worker.tuning import Tuning


class WorkerSteps:
    """Numbers steps, and has the servers know what must be known before a step's first slice.

    All stores of a process count the same steps: each step is one store's. Stores whose rounds are
    each worker's own count beside them, so that the others' steps are the same on all workers.
    Each step's pushes are counted until their rounds have ended, so that servers forget old
    optimizer settings: only this worker knows which step may still get a push. Settings wait here
    until their step is the current or the next one, so that a script far ahead does not pile them
    up on the servers. `new_step`, `newest`, `new_store`, `make_own` and `StoreSteps.count_push`
    belong to the thread that pushes, all else to the worker's thread.
    """

    def __init__(
        self, rank: int, servers: Mapping[int, Connection], checkpoints: Checkpoints, tuning: Tuning
    ) -> None:
        self._rank = rank
        self._servers = servers
        self.checkpoints = checkpoints
        self._tuning = tuning
        self._stores = [StoreSteps()]
        self._newest = self._newest_own = 0
        self._begun = {False: 0, True: 0}
        """The newest step whose first slice is sent: of those that workers share, of others."""

    def new_store(self) -> None:
        """Counts the steps of one more store."""
        self._stores.append(StoreSteps())

    def make_own(self, store: int) -> None:
        """Says that a store's rounds are each worker's own, before its first step."""
        self._stores[store].own = True

    def new_step(self, store: int = 0) -> int:
        """Returns the number of a step that begins in a store; the first one is 1."""
        if self._stores[store].own:
            # Not before shared steps, for which other workers may wait.
            self._newest_own = max(self._newest_own, self._newest) + 1
            return self._newest_own
        self._newest += 1
        return self._newest

    @property
    def newest(self) -> int:
        """The number of the last step that has begun, of those that workers share."""
        return self._newest

    @property
    def latest(self) -> int:
        """The number of the last step that has begun, whoever counts it."""
        return max(self._newest, self._newest_own)

    def of_store(self, store: int) -> StoreSteps:
        """A store's, which counts its pushes."""
        return self._stores[store]

    def count_ended(self, step: int, store: int = 0) -> None:
        """Takes note that the round of a push has ended on all its servers."""
        ended = self._stores[store].ended
        ended[step] = ended.get(step, 0) + 1

    def send_settings(self, from_step: int, settings: bytes, store: int = 0) -> None:
        """Sends settings before the first slice of the step from which they hold."""
        self._stores[store].waiting.append((from_step, settings))
        self._send_waiting()

    def begin(self, step: int, own: bool = False) -> None:
        """Tell servers what they need before a step's first slice; `own`: of own rounds.
        Checkpoints come first: they are of what was pushed before."""
        if step <= self._begun[own]:
            return
        if not own:
            self.checkpoints.begin_step(step)
        self._begun[own] = step
        for steps in self._stores:
            steps.forget()
        self._send_waiting()
        if not own:
            self._tuning.begin_step(step)

    def _send_waiting(self) -> None:
        for store, steps in enumerate(self._stores):
            while steps.waiting and steps.waiting[0][0] <= self._begun[steps.own] + 1:
                steps.forget()
                from_step, settings = steps.waiting.popleft()
                self._send(from_step, steps.oldest, settings, store)

    def _send(self, from_step: int, oldest_step: int, settings: bytes, store: int) -> None:
        header = OptimizerHeader(
            Kind.OPTIMIZER, self._rank, store=store, from_step=from_step, oldest_step=oldest_step
        )
        for connection in self._servers.values():
            connection.writer.push(Frame(URGENT, header, memoryview(settings)))


class StoreSteps:
    """One store's steps that have not ended, and its settings that wait."""

    def __init__(self) -> None:
        self.own = False
        """Whether its rounds are each worker's own."""
        self.ended: Dict[int, int] = {}
        self.oldest = 0
        self.waiting: Deque[Tuple[int, bytes]] = deque()
        # The thread that pushes writes these, and only it.
        self._push_counts: Dict[int, int] = {}
        self._newest = 0
        # It appends, and the worker's thread takes away.
        self._open: Deque[int] = deque()

    def count_push(self, step: int) -> None:
        """Counts a push of the store's newest step, before its transfer begins."""
        self._push_counts[step] = self._push_counts.get(step, 0) + 1
        if step != self._newest:
            self._open.append(step)
            self._newest = step

    def forget(self) -> None:
        """Steps before the store's newest get no more pushes."""
        while self._open:
            self.oldest = self._open[0]
            if self.oldest == self._newest:
                return
            if self._push_counts.get(self.oldest, 0) != self.ended.get(self.oldest, 0):
                return
            self._push_counts.pop(self.oldest, None)
            self.ended.pop(self.oldest, None)
            self._open.popleft()
