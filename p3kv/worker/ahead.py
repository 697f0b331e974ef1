"""Values that arrive beside the weights: a worker goes on with that of an earlier round."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial
from typing import Any, Callable, Dict, List, Optional

import numpy as np

from p3kv.wire.header import INITIAL_ROUND
from p3kv.worker.transfers import Transfer, WorkerKey, memory_at


class _Arrivals:
    """Values for which a key's transfers wait, and those that have arrived."""

    def __init__(self, key: WorkerKey, note_staleness: Callable[[int], None]) -> None:
        self.key = key
        self._note_staleness = note_staleness
        self.values: Dict[int, Optional[np.ndarray]] = {}
        """By round; None where the value is still to come."""
        self.waiting: List[Transfer] = []

    def go_on(self) -> None:
        """Ends the transfers whose value is there, and forgets values that none needs any more."""
        going = [one for one in self.waiting if self._is_there(one)]
        self.waiting = [one for one in self.waiting if one not in going]
        for transfer in going:
            if transfer.takes != INITIAL_ROUND:
                value, target = self.values[_taken(transfer)], transfer.target
                assert value is not None and target is not None
                memory_at(target, self.key.size_bytes)[:] = value.data
        needed = self.key.consistency.needs(self.key.begun + 1)
        needed = min([needed, *map(_taken, self.waiting)])
        self.values = {r: value for r, value in self.values.items() if r >= needed}
        for transfer in going:
            self._note_staleness(transfer.round - _taken(transfer))
            transfer.done(None)

    def _is_there(self, transfer: Transfer) -> bool:
        return _taken(transfer) == INITIAL_ROUND or self.values[_taken(transfer)] is not None


def _taken(transfer: Transfer) -> int:
    assert transfer.takes is not None
    return transfer.takes


class Ahead:
    """Splits transfers that may go on with the value of an earlier round.

    Another transfer takes their place on the way to the servers and back, with a copy of the
    gradient, and with memory beside the weight. So the script's own arrays wait for nothing on
    the wire, not even for a gradient to leave. The weight gets the value of exactly the round that
    the consistency rule names, as soon as it is there. Belongs to the worker's thread.
    """

    def __init__(self, note_staleness: Callable[[int], None]) -> None:
        """`note_staleness` is told how many rounds a value lacks with which the worker goes on."""
        self._note_staleness = note_staleness
        self._keys: Dict[int, _Arrivals] = {}
        self._travelling = 0
        self._finished: Optional[Future[Any]] = None

    def finish(self, done: Future[Any]) -> None:
        """Completes `done` when nothing travels any more."""
        self._finished = done
        self._tell_finished()

    def fail(self, error: BaseException) -> None:
        """Ends what waits with an error."""
        if self._finished is not None:
            self._finished.set_exception(error)
            self._finished = None

    def forget(self, key_id: int) -> None:
        """Nothing of a key travels any more."""
        self._keys.pop(key_id, None)

    @property
    def travels(self) -> bool:
        """Whether a push, or its value, is still on its way."""
        return self._travelling > 0

    def instead_of(self, transfer: Transfer) -> Transfer:
        """The transfer that is to travel in place of a push, which may be done now or later; the
        push itself where it waits for its own round."""
        if transfer.takes is None:
            return transfer
        arrivals = self._keys.get(transfer.key.key_id)
        if arrivals is None:
            arrivals = _Arrivals(transfer.key, self._note_staleness)
            self._keys[transfer.key.key_id] = arrivals
        transfer.takes = max(transfer.takes, INITIAL_ROUND)
        if transfer.takes != INITIAL_ROUND and transfer.takes not in arrivals.values:
            # The script has not asked for that round's value.
            transfer.takes = transfer.round
        travels = self._copy(transfer, arrivals)
        arrivals.values[transfer.round] = None
        arrivals.waiting.append(transfer)
        arrivals.go_on()
        return travels

    def _copy(self, transfer: Transfer, arrivals: _Arrivals) -> Transfer:
        key = transfer.key
        value = np.empty(key.size_bytes, np.uint8)
        gradient, source = None, 0
        if transfer.has_gradient:
            assert transfer.source is not None
            gradient = np.array(memory_at(transfer.source, key.size_bytes))
            source = gradient.ctypes.data
        done = partial(self._done, arrivals, transfer.round, value, gradient)
        travels = Transfer(
            key, transfer.round, transfer.step, transfer.priority, source, value.ctypes.data, done,
            transfer.asks, transfer.changes, exact=transfer.exact,
        )  # fmt: skip
        travels.ready_s = transfer.ready_s
        self._travelling += 1
        return travels

    def _done(
        self,
        arrivals: _Arrivals,
        round_: int,
        value: np.ndarray,
        gradient: Optional[np.ndarray],
        error: Optional[BaseException],
    ) -> None:
        """A transfer is done; its memory is kept until now."""
        self._travelling -= 1
        if error is None:
            arrivals.values[round_] = value
            arrivals.go_on()
            self._tell_finished()
            return
        waiting, arrivals.waiting = arrivals.waiting, []
        for transfer in waiting:
            transfer.done(error)

    def _tell_finished(self) -> None:
        if self._finished is not None and not self._travelling:
            self._finished.set_result(None)
            self._finished = None
