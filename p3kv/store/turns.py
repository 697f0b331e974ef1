"""When keys are exchanged that workers train by themselves: all at once, or in turn."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from p3kv.common import words
from p3kv.consistency import LocalTraining
from p3kv.wire.messages import Key

_log = logging.getLogger("p3kv")


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

    def __init__(self, turn: Turn, steps: int, count: int = 0) -> None:
        """`steps`: how many there are between two turns; `count`: how many there were."""
        self.turn = turn
        self.count = count
        """How many steps there were."""
        self.takes_at: Optional[int] = None
        """In which step the value is taken for which a difference has left."""
        self._steps = steps
        self._exchanged_at = 0
        """The count when all was exchanged out of turn."""

    def step(self) -> Due:
        """Counts a step, after this worker's own update; says what is due."""
        self.count += 1
        takes_before = self.count == self.takes_at
        sends = self.count % self._steps == self.turn.first % self._steps
        if takes_before:
            self.takes_at = None
        if sends and self.turn.lag:
            self.takes_at = self.count + self.turn.lag
        return Due(takes_before, sends, sends and not self.turn.lag)

    @property
    def unsent(self) -> int:
        """How many steps there were since a difference has left; all, if none has."""
        since = (self.count - self.turn.first) % self._steps
        return min(self.count - self._exchanged_at, since)

    @property
    def awaits(self) -> bool:
        """Whether a difference has left whose value is not taken."""
        return self.takes_at is not None

    def settle(self) -> None:
        """The value that is awaited is taken now."""
        self.takes_at = None

    def exchanged(self) -> None:
        """All that there is has been sent out of turn, and the value is taken."""
        self._exchanged_at = self.count


class Schedule:
    """The turns and steps of all keys of a store, which are the same on all workers."""

    def __init__(self, rule: LocalTraining) -> None:
        self._rule = rule
        self.averages = False
        """Whether what is pushed now is no turn: the values become the mean of the workers'."""
        self._told = False
        self._progress: Dict[Key, Progress] = {}

    def of(self, key: Key, declared: Sequence[Tuple[Key, int]]) -> Progress:
        """A key's progress. Turns are decided for all `declared` keys, each with its bytes, with
        the first of them, and later for those that come later."""
        if key not in self._progress:
            new = [one for one in declared if one[0] not in self._progress]
            for (one, _), turn in zip(new, turns([size for _, size in new], self._rule)):
                self._progress[one] = Progress(turn, self._rule.steps)
        return self._progress[key]

    def tell_unsent(self) -> None:
        """Says once, when a script asks for the servers' values, that they lack what workers have
        learned since, if they do."""
        unsent = max((one.unsent for one in self._progress.values()), default=0)
        if not unsent or self._told:
            return
        self._told = True
        _log.warning(
            "%s gives the servers' weights, which lack what each worker has learned since its last "
            "exchanges: the last %d of %d steps. A worker's own weights have its part of that. At "
            "the end of the training, call exchange() in its place, on all workers: then the "
            "servers' weights, and all workers', have all of it",
            words.current().synchronise, unsent, self.count,
        )  # fmt: skip

    @contextmanager
    def averaging(self) -> Iterator[None]:
        """Has values become the mean of the workers' weights, by what is pushed inside."""
        self.averages = True
        try:
            yield
        finally:
            self.averages = False

    @property
    def count(self) -> int:
        """How many steps there were of the key that has had the most."""
        return max((one.count for one in self._progress.values()), default=0)

    @property
    def plain(self) -> List[Any]:
        """What `go_on` takes, as plain values."""
        return [[key, one.count, *one.turn] for key, one in self._progress.items()]

    def go_on(self, plain: List[Any]) -> None:
        """Goes on as another training's; values for which differences had left are not awaited."""
        for key, count, first, lag in plain:
            self._progress[key] = Progress(Turn(first, lag), self._rule.steps, count)
