"""Begins this worker's transfers and ends their rounds, in the worker's thread."""

from __future__ import annotations

from functools import partial
from typing import Callable, Dict, Optional, Sequence, Set, Tuple

from p3kv.wire.connection import Connection
from p3kv.wire.fields import EndedHeader, Header
from p3kv.wire.framing import Landing
from p3kv.wire.header import INITIAL_ROUND, NO_GRADIENT
from p3kv.worker.ahead import Ahead
from p3kv.worker.departures import Departures
from p3kv.worker.gates import Gates
from p3kv.worker.in_progress import InProgress
from p3kv.worker.local_sums import LocalSums
from p3kv.worker.measuring.step_times import StepTimes
from p3kv.worker.steps import Steps
from p3kv.worker.transfers import Transfer, WorkerKey
from p3kv.worker.windows import Windows


class Exchange:
    """Has routes carry this worker's transfers, each as soon as its window admits it.

    Belongs to the worker's thread.
    """

    def __init__(
        self,
        in_progress: InProgress,
        gates: Gates,
        departures: Departures,
        steps: Steps,
        times: StepTimes,
        priorities: bool,
        window: int,
        on_step: Callable[[int], None],
        on_push: Callable[[], None],
    ) -> None:
        """`window`: how many rounds of a key may be open by the job's rule. `on_step(step)` is
        called before the first transfer of a new step is sent, of those that workers share;
        `on_push()` when a push was sent."""
        self.round = INITIAL_ROUND
        """The newest round for which a transfer was sent; for any thread."""
        self._in_progress = in_progress
        self._gates = gates
        self._departures = departures
        self._steps = steps
        self._times = times
        self._priorities = priorities
        self._on_step = on_step
        self._on_push = on_push
        self._step = 0
        self._positions: Dict[int, int] = {}
        self._windows = Windows(window)
        self._local_sums = LocalSums()
        self._too_early: Dict[Tuple[int, int], Transfer] = {}
        """Pushes by key and round."""
        self.ahead = Ahead(in_progress.note_staleness)

    def set_order(self, key_ids: Sequence[int]) -> None:
        """Sends from now on in the order of these keys."""
        self._positions = {key_id: position for position, key_id in enumerate(key_ids)}

    @property
    def order(self) -> Sequence[int]:
        """The ids of the keys in the order that is in force; from any thread."""
        return list(self._positions)

    def begin(self, transfer: Transfer) -> None:
        """Sends a transfer, or asks for it, as soon as the window of its key admits its round, and
        a push not before those of earlier rounds. The framework may start them in any order, unless
        they share an array."""
        key = transfer.key
        if not transfer.is_exchanged:
            self._local_sums.add(transfer)
        elif transfer.source is None or transfer.round <= key.begun:
            self._begin(transfer)
        elif transfer.round > key.begun + 1:
            self._too_early[key.key_id, transfer.round] = transfer
        else:
            following: Optional[Transfer] = transfer
            while following is not None:
                key.begun = following.round
                self._begin(following)
                following = self._too_early.pop((key.key_id, key.begun + 1), None)

    def is_idle(self, key: WorkerKey) -> bool:
        """Whether nothing of a key is under way."""
        return self._windows.is_idle(key) and not self._in_progress.has(key)

    def forget(self, key_id: int) -> None:
        """Nothing of a key is exchanged any more."""
        self._windows.forget(key_id)
        self._local_sums.forget(key_id)
        self.ahead.forget(key_id)
        self._positions.pop(key_id, None)

    def _begin(self, transfer: Transfer) -> None:
        if transfer.key.size_elems == 0:
            transfer.key.sent = max(transfer.key.sent, transfer.round)
            self._count_ended(transfer)
            transfer.done(None)
            transfer.tell(changes=False)
            self.note_answered(transfer)
            return
        if transfer.source is not None and transfer.round > INITIAL_ROUND:
            self._local_sums.join(transfer)
            if transfer.key.consistency.lets_go_ahead:
                transfer = self.ahead.instead_of(transfer)
            if transfer.key.consistency.local is None:  # or the next steps do not wait for it
                self._times.gradient_ready(transfer)
        if self._windows.admits(transfer):
            self._send(transfer)
        else:
            self._windows.hold(transfer)

    def _send(self, transfer: Transfer) -> None:
        key = transfer.key
        transfer.priority = self._priority(transfer)
        if transfer.source is None:
            key.route.request(transfer)
            return
        key.sent = transfer.round
        self.round = max(self.round, transfer.round)
        if key.own_rounds:
            self._steps.begin(transfer.step, own=True)
        else:
            if transfer.step > self._step:
                self._step = transfer.step
                self._on_step(transfer.step)
            self._gates.begin(transfer.step, transfer.size_bytes)
            self._departures.begin(self._gates.all_begun)
        self._in_progress.add_push(transfer)
        if not _ends_with_result(transfer):
            self._windows.expect(transfer)
        key.route.push(transfer)
        self._on_push()

    def _priority(self, transfer: Transfer) -> int:
        if not self._priorities:
            return 0
        position = self._positions.get(transfer.key.key_id)
        return transfer.priority if position is None else -position

    def value_arrived(self, transfer: Transfer, header: Header) -> None:
        """A transfer is done with its value."""
        if _ends_with_result(transfer):
            self._end_round(transfer, header)
        else:
            self.note_answered(transfer)

    def note_answered(self, transfer: Transfer) -> None:
        """Sends the pushes that have waited for a pull, if the transfer is one."""
        if transfer.source is None:
            for held in self._windows.note_answered(transfer):
                self._send(held)

    def land_ended(self, connection: Connection, header: EndedHeader) -> Landing:
        """Takes the end of a round; ProtocolError if no push expects it."""
        push = self._windows.check(header)
        if header.flags & NO_GRADIENT:
            push.check_lacking(header)
        return Landing(None, partial(self._round_ended, header))

    def _round_ended(self, header: EndedHeader) -> None:
        for push in self._windows.note_ended(header):
            self._end_round(push, header)

    def _end_round(self, transfer: Transfer, header: Header) -> None:
        """`header` is that of the last frame that was to come."""
        self._count_ended(transfer)
        transfer.key.own_steps.pop(transfer.round, None)
        transfer.tell(changes=not header.flags & NO_GRADIENT)
        transfer.route.ended(transfer)
        for held in self._windows.end(transfer):
            self._send(held)

    def _count_ended(self, transfer: Transfer) -> None:
        if transfer.source is not None and transfer.round > INITIAL_ROUND:
            self._steps.count_ended(transfer.step, transfer.key.store)

    def awaited(self) -> Optional[Tuple[Transfer, Set[int]]]:
        """The oldest transfer of which values are still to come, or else the end of its round, and
        from which servers."""
        transfer = self._in_progress.oldest
        if transfer is None:
            return self._windows.oldest
        return transfer, transfer.route.missing(transfer)

    def fail(self, error: BaseException) -> None:
        """Ends all transfers with an error."""
        self.ahead.fail(error)
        for transfer in self._windows.expecting:
            transfer.round_failed(error)
        too_early, self._too_early = self._too_early, {}
        held = self._in_progress.clear() + self._windows.clear()
        for transfer in (*held, *too_early.values()):
            transfer.fail(error)


def _ends_with_result(transfer: Transfer) -> bool:
    """Whether it is a push's result that tells that its round has ended."""
    return transfer.source is not None and transfer.target is not None
