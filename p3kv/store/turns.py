"""When keys are exchanged that workers train by themselves: all at once, or in turn."""

from __future__ import annotations

from itertools import accumulate
from typing import List, NamedTuple, Optional, Sequence

from p3kv.consistency import LocalTraining


class Turn(NamedTuple):
    """A key's place among the steps."""

    first: int
    """After which step the key's difference leaves for the first time, from 1; then again each time
    when all keys have had their turn."""
    lag: int
    """How many steps later the value that it brings is taken: 0 has the worker wait for it."""


def turns(sizes_bytes: Sequence[int], rule: LocalTraining) -> List[Turn]:
    """The turns of keys with these sizes, in this order.

    With streaming, a link that carries all of them in `rule.steps` steps is never idle, and with a
    delay of 0 it is done with each key exactly when the key's value is to be taken: so a large key
    has as many steps as it takes the link. The delay is for what links and workers take longer at
    times. A value is taken before the key's next turn at the latest.
    """
    steps, total = rule.steps, sum(sizes_bytes)
    if not rule.streaming:
        return [Turn(steps, 0)] * len(sizes_bytes)
    ends = list(accumulate(sizes_bytes))
    found = []
    for size, end in zip(sizes_bytes, ends):
        # Whole numbers: all workers must find the same.
        before = (end - size) * steps // total if total else 0
        done = -(-end * steps // total) if total else 1
        first = min(before, steps - 1) + 1
        found.append(Turn(first, min(steps, max(done - before, 1) + rule.delay)))
    return found


class Due(NamedTuple):
    """What is due of a key after a step, in this order."""

    takes_before: bool
    """It takes the value for which it has sent a difference in an earlier step."""
    sends: bool
    takes_now: bool
    """It takes the value for which it sends a difference now."""


class Progress:
    """Counts the steps of a key."""

    def __init__(self, turn: Turn, steps: int) -> None:
        """`steps`: how many there are between two turns."""
        self._turn = turn
        self._steps = steps
        self._step = 0
        self._takes_at: Optional[int] = None

    def step(self) -> Due:
        """Counts a step, after this worker's own update; says what is due."""
        self._step += 1
        takes_before = self._step == self._takes_at
        sends = self._step % self._steps == self._turn.first % self._steps
        if takes_before:
            self._takes_at = None
        if sends and self._turn.lag:
            self._takes_at = self._step + self._turn.lag
        return Due(takes_before, sends, sends and not self._turn.lag)

    @property
    def awaits(self) -> bool:
        """Whether a difference has left whose value is not taken."""
        return self._takes_at is not None

    def settle(self) -> None:
        """The value that is awaited is taken now."""
        self._takes_at = None
