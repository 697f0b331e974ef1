"""Who has pushed what of a unit, and which of its rounds may end: rounds that all workers share, or
each worker's own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Callable, Deque, Dict, Generic, Iterable, Iterator, List, Optional, Tuple

from p3kv.errors import ProtocolError
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.rounds import OpenRound, Round, S
from p3kv.wire.header import INITIAL_ROUND


class Ledger(ABC, Generic[S]):
    """A unit's rounds: those for which workers have pushed, and the last that has ended.

    Pushes are counted by rank. One that comes twice, or after its round has ended, is an error and
    is never counted. Rounds end in order. The initial round is shared in any case: worker rank 0
    alone pushes for it. Belongs to the server's thread.
    """

    def __init__(self, plan: KeyPlan, new_sum: Callable[[int], S], name: str) -> None:
        """`new_sum(round)` makes what sums a round's gradients; `name` is the unit's."""
        self.round = INITIAL_ROUND - 1
        """The last round whose result the value is. If rounds are each worker's own, it counts
        those of all workers."""
        self.open: Dict[int, Round[S]] = {}
        """Rounds that workers share and that have not ended."""
        self.patience_s = 0.0
        """How long workers may go on without a round's value, as far as is known: where they train
        by themselves and keys take turns, at most as long as between two rounds."""
        self._begun_s = 0.0
        """When the last round has begun, on the monotonic clock."""
        self.own: Dict[Tuple[int, int], Round[S]] = {}
        """By rank and round, those that are each worker's own and have not ended."""
        self.unanswered: List[Round[S]] = []
        """Rounds that have ended, and whose workers must wait for others before they go on."""
        self._plan = plan
        self._new_sum = new_sum
        self._name = name

    def check(self, rank: int, round: int) -> None:
        """Raises ProtocolError for a worker's push that can't be right."""
        if round == INITIAL_ROUND and rank != 0:
            raise ProtocolError(f"worker {rank} sent an initial value of {self._name}")
        if self._has_pushed(rank, round):
            raise ProtocolError(f"worker {rank} pushed {self._name} twice in round {round}")

    def check_ahead(self, rank: int, round: int, at_least: float = INITIAL_ROUND) -> None:
        """Raises ProtocolError for a round beyond the window that a worker can have here; rounds
        until `at_least` may have ended."""
        ended, window = max(self.last_of(rank), at_least), self._plan.consistency.window
        if round > ended + window:
            raise ProtocolError(
                f"it is at round {round} of {self._name}, but only {window} rounds may be open, "
                f"and the last that can have ended is {ended}"
            )

    def round_for(self, rank: int, round: int, step: int) -> Round[S]:
        """The round that a worker's push is for; raises what `check` raises."""
        current = self._find(rank, round)
        if current is None or rank in current.arrived or round == INITIAL_ROUND:
            self.check(rank, round)
        if current is None:
            current = self._begin(rank, round, step)
        if rank == 0:
            current.step = step
        return current

    def round_of_sum(self, rank: int, round: int, workers: int) -> Round[S]:
        """The open round of a sum of so many of a host's workers, whose sender is counted;
        ProtocolError if it is not."""
        current = self.open.get(round)
        if current is None or rank not in current.arrived or workers < 1:
            raise ProtocolError(f"worker {rank} has announced no sum of {self._name}")
        return current

    def end(self, current: Round[S]) -> None:
        """Counts a complete round as ended, of which it is known whether it has changed the
        value."""
        self.round += 1
        del self.open[self.round]
        del self._plan.rules.open_rounds[current]

    def may_end(self, current: Round[S]) -> bool:
        """Whether a push for a round may have made one complete; `complete` says which."""
        return True

    def take_answered(self) -> List[Round[S]]:
        """Takes the rounds whose workers need not wait any more."""
        return []

    @abstractmethod
    def complete(self) -> Iterable[Round[S]]:
        """The rounds that may end next: for all that is known here, one of them ends."""

    @abstractmethod
    def is_new_enough(self, rank: int, round: int) -> bool:
        """Whether the value lets a worker go on that has pushed for a round."""

    @abstractmethod
    def last_of(self, rank: int) -> int:
        """The last round that has ended of those for which a worker pushes."""

    def has_changed_for(self, current: Round[S]) -> bool:
        """Whether the value of a round that has ended, which is about to answer it, is another one
        than that of the worker's round before."""
        return current.changed

    def behind(self, round: int) -> int:
        """How many of a worker's rounds, until this one, the value has for which it lacks another
        worker's."""
        return 0

    @abstractmethod
    def waits(self) -> Iterator[OpenRound]:
        """The rounds that wait for workers, or may do."""

    @abstractmethod
    def _has_pushed(self, rank: int, round: int) -> bool:
        """Whether a worker's push for a round is complete."""

    @abstractmethod
    def _find(self, rank: int, round: int) -> Optional[Round[S]]:
        """The open round that a worker pushes for; None for its first push."""

    def _begin(self, rank: int, round: int, step: int) -> Round[S]:
        """A new round for which a worker pushes first."""
        current = self.open[round] = Round(round, self._new_sum(round), step)
        self._plan.rules.open_rounds[current] = self._plan.key_id
        local = self._plan.consistency.local
        if local is not None and local.streaming:
            if self._begun_s:
                self.patience_s = current.since_s - self._begun_s
            self._begun_s = current.since_s
        return current


class SharedRounds(Ledger[S]):
    """Rounds for which all workers push; the consistency rule says when they end."""

    def may_end(self, current: Round[S]) -> bool:
        plan = self._plan
        return (
            len(current.arrived) == plan.num_workers
            or current.number == INITIAL_ROUND
            or bool(plan.rules.leavers.ranks)
        )

    def complete(self) -> Iterable[Round[S]]:
        following = self.open.get(self.round + 1)
        if following is None:
            return ()
        if following.number == INITIAL_ROUND:
            return (following,) if following.arrived else ()
        return (following,) if self._plan.ends(following.number, following.arrived) else ()

    def is_new_enough(self, rank: int, round: int) -> bool:
        return self.round >= round

    def last_of(self, rank: int) -> int:
        return self.round

    def missing(self, current: Round[S]) -> List[int]:
        """Ranks whose pushes for an open round are not complete."""
        return self._plan.missing(current.number, current.arrived)

    def waits(self) -> Iterator[OpenRound]:
        for current in self.open.values():
            yield OpenRound(current.number, current, self.missing(current))

    def _has_pushed(self, rank: int, round: int) -> bool:
        current = self.open.get(round)
        return round <= self.round or (current is not None and rank in current.arrived)

    def _find(self, rank: int, round: int) -> Optional[Round[S]]:
        return self.open.get(round)


class OwnRounds(Ledger[S]):
    """Rounds that are each worker's own: a push changes the value by itself, in its worker's order.

    A push waits for the rounds before it of the same worker, and for the initial value. It waits
    for another worker's push at barriers only, but its answer may, by the consistency rule.
    """

    def __init__(self, plan: KeyPlan, new_sum: Callable[[int], S], name: str) -> None:
        super().__init__(plan, new_sum, name)
        self.barriers: Deque[int] = deque()
        """No later round than the first of these ends, until all workers' have that one has."""
        self._ended: Dict[int, int] = {}
        self._changed_at = INITIAL_ROUND
        """The value of `round` when the value has changed last."""
        self._answered_at: Dict[int, int] = {}
        """The same when a worker was last answered, by rank."""

    def complete(self) -> Iterable[Round[S]]:
        if self.round < INITIAL_ROUND:
            return (one for one in self.open.values() if one.arrived)
        last = self.barriers[0] if self.barriers else math.inf
        return (
            current
            for (rank, round_), current in list(self.own.items())
            if current.arrived and round_ == self.last_of(rank) + 1 <= last
        )

    def end(self, current: Round[S]) -> None:
        if current.number == INITIAL_ROUND:
            super().end(current)
            return
        self.round += 1
        if current.changed:
            self._changed_at = self.round
        optimizer = self._plan.optimizer
        if current.owner == 0 and optimizer is not None:
            optimizer.last_step = max(optimizer.last_step, current.step)
        self._ended[current.owner] = current.number
        del self.own[current.owner, current.number]
        if self.is_new_enough(current.owner, current.number):
            del self._plan.rules.open_rounds[current]
        else:
            self.unanswered.append(current)

    @property
    def at_barrier(self) -> bool:
        """Whether all workers have reached the first barrier, if there is one, and none has passed
        it."""
        if not self.barriers or self.round < INITIAL_ROUND:
            return False
        return not self._before_barrier()

    def _before_barrier(self) -> List[int]:
        """Ranks of the workers, but those that have left, that have not reached the first one."""
        gone = self._plan.rules.leavers.gone
        return [rank for rank in self._slower(self.barriers[0]) if rank not in gone]

    def is_new_enough(self, rank: int, round: int) -> bool:
        if self.round < INITIAL_ROUND or self.last_of(rank) < round:
            return False
        return not self._slower(self._plan.consistency.needs(round))

    def has_changed_for(self, current: Round[S]) -> bool:
        if current.number == INITIAL_ROUND:
            return current.changed
        before = self._answered_at.get(current.owner, INITIAL_ROUND)
        self._answered_at[current.owner] = self.round
        return self._changed_at > before

    def last_of(self, rank: int) -> int:
        return self._ended.get(rank, INITIAL_ROUND)

    def behind(self, round: int) -> int:
        left = self._plan.rules.leavers.ranks
        others = (one for one in range(self._plan.num_workers) if one not in left)
        return max(0, round - min((self.last_of(one) for one in others), default=round))

    def waits(self) -> Iterator[OpenRound]:
        """Rounds wait for worker rank 0: for the initial value, or for its first step, with which
        the optimizer's settings come. At a barrier they wait for slower workers, and so may their
        answers."""
        for current in self.open.values():
            yield OpenRound(current.number, current, [0])
        for current in self.own.values():
            if self.round < INITIAL_ROUND:
                yield OpenRound(INITIAL_ROUND, current, [0])
            elif self._plan.lacks_settings:
                yield OpenRound(current.number, current, [0])
            elif self.barriers and current.number > self.barriers[0]:
                yield OpenRound(self.barriers[0], current, self._before_barrier())
        for current in self.unanswered:
            needs = self._plan.consistency.needs(current.number)
            yield OpenRound(needs, current, self._slower(needs))

    def take_answered(self) -> List[Round[S]]:
        free = [one for one in self.unanswered if self.is_new_enough(one.owner, one.number)]
        self.unanswered = [one for one in self.unanswered if one not in free]
        for one in free:
            del self._plan.rules.open_rounds[one]
        return free

    def _slower(self, round: int) -> List[int]:
        """Ranks of the workers, but those that have left, that have not reached a round."""
        if round <= INITIAL_ROUND:
            return []
        left = self._plan.rules.leavers.ranks
        everybody = range(self._plan.num_workers)
        return [rank for rank in everybody if self.last_of(rank) < round and rank not in left]

    def _has_pushed(self, rank: int, round: int) -> bool:
        ended = self.round if round == INITIAL_ROUND else self.last_of(rank)
        current = self._find(rank, round)
        return round <= ended or (current is not None and rank in current.arrived)

    def _find(self, rank: int, round: int) -> Optional[Round[S]]:
        return self.open.get(round) if round == INITIAL_ROUND else self.own.get((rank, round))

    def _begin(self, rank: int, round: int, step: int) -> Round[S]:
        if round == INITIAL_ROUND:
            return super()._begin(rank, round, step)
        current = Round(round, self._new_sum(round), step, owner=rank)
        self.own[rank, round] = current
        self._plan.rules.open_rounds[current] = self._plan.key_id
        return current


def new_ledger(plan: KeyPlan, new_sum: Callable[[int], S], name: str) -> Ledger[S]:
    """The ledger of one of a key's units."""
    rounds = OwnRounds if plan.consistency.own_rounds else SharedRounds
    return rounds(plan, new_sum, name)
