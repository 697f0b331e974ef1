"""How long steps take where workers train by themselves, and how long they wait for late values."""

from __future__ import annotations

from typing import Callable, Iterator, List, NamedTuple, Optional

from p3kv.worker.measuring.script_times import ScriptTimes
from p3kv.worker.measuring.server_work import ServerWork
from p3kv.worker.measuring.step_parts import Wait
from p3kv.worker.transfers import Transfer


class _Late(NamedTuple):
    """A value that came after the step from which on the worker was to go on with it."""

    begin_s: float
    end_s: float
    last_ready_s: float
    """When the last worker's difference was ready."""
    server: int
    """Rank of the server whose slice came last."""


class LocalStepTimes:
    """Measures the steps of workers that train by themselves, from one update of the weights to the
    next. A step waits while the script waits for arrays, as far as a value is late; all else is
    computing. Belongs to the worker's thread.
    """

    def __init__(
        self,
        script: ScriptTimes,
        work: ServerWork,
        count: Callable[[float, float, List[Wait]], None],
    ) -> None:
        """`count(end_s, step_s, waits)` takes a step that has ended."""
        self._script = script
        self._work = work
        self._count = count
        self._begun_s: Optional[float] = None
        self._late: List[_Late] = []

    def value_arrived(self, transfer: Transfer, at_s: float, late_s: float, server: int) -> None:
        """Takes note of a value; the rest is as in `StepTimes.value_arrived`."""
        since_s = transfer.awaited_since_s
        if since_s is not None:
            self._late.append(_Late(since_s, at_s, transfer.ready_s + late_s, server))

    def begin_step(self, at_s: float) -> None:
        """The script has updated its weights: a step has ended, and the next one begins."""
        begun_s, self._begun_s = self._begun_s, at_s
        late, self._late = sorted(self._late), []
        blocked = self._script.take_blocked()
        if begun_s is None:
            return
        waits = [wait for begin_s, end_s in blocked for wait in self._waits(begin_s, end_s, late)]
        self._count(at_s, at_s - begun_s, waits)

    def _waits(self, begin_s: float, end_s: float, late: List[_Late]) -> Iterator[Wait]:
        """What the script waited for from then to then; each moment counts once."""
        for one in late:
            begin_s = max(begin_s, one.begin_s)
            until_s = min(one.end_s, end_s)
            if begin_s < until_s:
                worked_s = self._work.between(one.server, begin_s, until_s)
                yield Wait(begin_s, until_s, one.last_ready_s, worked_s)
                begin_s = until_s
