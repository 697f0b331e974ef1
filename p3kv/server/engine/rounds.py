"""The life of a round on a server, and what all records have in common.

A round is open from its first push on, complete when all workers have pushed that must, held while
something else is missing, ended when the record's value has it, and answered when its workers may
go on. Everything that is known of it is in `Round`, and all rounds of a record in its `Rounds`.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import (
    Any,
    Deque,
    Dict,
    Generic,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    TypeVar,
)

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.state import KeyPlan
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import UNKNOWN, Stalled

_log = logging.getLogger(__name__)

S = TypeVar("S")
"""Sum of a record's gradients of one round."""


class Round(Generic[S]):
    """A round of a record: what has arrived for it, and to whom its end is told."""

    __slots__ = (
        "answered", "arrived", "behind", "changed", "ended", "exact", "have_last", "have_value",
        "in_sums",
        "is_counted", "lacking", "lacks_gradient", "number", "others", "owner", "priority",
        "ready_s", "record", "since_s", "step", "sum", "wanting", "weights",
    )  # fmt: skip

    def __init__(
        self, record: Record[S], number: int, sum: S, step: int, owner: int = UNKNOWN
    ) -> None:
        self.record = record
        self.number = number
        """As workers count it."""
        self.sum = sum
        self.step = step
        """The step in which worker rank 0 pushed; until it has, that of the first push."""
        self.owner = owner
        """The rank whose own round it is, where workers do not share rounds."""
        self.priority = 0
        self.arrived: Set[int] = set()
        """Ranks whose pushes are complete."""
        self.wanting: List[int] = []
        """Ranks to which the value is to be sent."""
        self.others: List[int] = []
        """Ranks that are to be told that the round has ended, because no value tells them."""
        self.have_value: Set[int] = set()
        """Those of `wanting` that have the value that they were sent last."""
        self.have_last: Set[int] = set()
        """Those of them that have the value of the round before."""
        self.exact = False
        """Whether a worker wants the value as it is, whatever the codec."""
        self.in_sums = 0
        """How many workers have said that their slices are in the sums of their hosts, less those
        whose slices have come in sums."""
        self.lacks_gradient = False
        """Whether a worker, or all of a host, has said that it has no gradient."""
        self.lacking = -1
        """Of a bucket: the tensors of which no worker has pushed a gradient, a bit for each."""
        self.is_counted = False
        """Whether its sum is in the norm of its clipped step."""
        self.ended = False
        self.answered = False
        """Whether its workers may have the value, and need not wait for others any more."""
        self.changed = True
        """Once it is answered: whether its workers get another value than they had, or would have
        in a step that is dropped: those that lack a gradient know so whether others had one."""
        self.behind = 0
        """Once it is answered: of the owner's rounds until this one, how many the value has for
        which it lacks another worker's."""
        self.ready_s: Dict[int, float] = {}
        """By rank, when the gradients were ready that have arrived, as far as is known."""
        self.weights: Dict[int, float] = {}
        """By rank, by what the gradients count in the mean that do not count by 1."""
        self.since_s = time.monotonic()
        """When the first push arrived, on the monotonic clock."""

    def weigh(self, rank: int, weight: float, has_gradient: bool) -> None:
        """Note by what a worker's gradient counts; ProtocolError for what can't be right."""
        wrong = self.owner != UNKNOWN or self.number == INITIAL_ROUND
        if wrong or not 0.0 <= weight < math.inf or (has_gradient and not weight):
            raise ProtocolError(
                f"it weighs {self.record.name} by {weight} in round {self.number}, where it can't"
            )
        self.weights[rank] = weight


class Wait(NamedTuple):
    """A round that can't end yet, or can't have its answer, for want of pushes."""

    record: Record[Any]
    round: int
    """As workers count it. The initial one, where a later one waits for that."""
    missing: List[int]
    """Ranks of the workers that have not pushed."""
    arrived: List[int]
    """Ranks of the workers that have pushed, or that wait for the initial value."""
    since_s: float
    """Since when, on the monotonic clock."""
    patience_s: float = 0.0
    """For how long of this nobody may have waited, since workers go on by themselves."""

    def message(self, waited_s: float, timeout_s: float) -> Stalled:
        """The message that tells workers of it."""
        plan = self.record.plan
        return Stalled(
            plan.key_id, plan.called, self.round, self.missing, self.arrived, waited_s,
            timeout_s + self.patience_s,
        )  # fmt: skip


class Record(ABC, Generic[S]):
    """What ends rounds by itself on a server, a slice or all rows of a key: a value, and the table
    of its rounds."""

    first_round = INITIAL_ROUND
    """The first round of which the record can have a value."""
    size_elems: int
    """How many elements the value has."""

    def __init__(self, plan: KeyPlan) -> None:
        self.plan = plan
        self.rounds: Rounds[S] = OwnRounds(self) if plan.own_rounds else Rounds(self)

    @property
    def round(self) -> int:
        """The last round whose result the value is."""
        return self.rounds.round

    @property
    @abstractmethod
    def name(self) -> str:
        """The record's name in messages."""

    @abstractmethod
    def new_sum(self, round: int) -> S:
        """Make what sums a round's gradients."""

    @abstractmethod
    def total(self, current: Round[S]) -> Optional[np.ndarray]:
        """A complete round's sum, flat, without elements left out for being 0; None if no worker
        had a gradient."""

    @abstractmethod
    def end(self, current: Round[S]) -> Sequence[Round[S]]:
        """End a complete round by a new value; return the rounds that have ended, those of a whole
        tensor together or not at all."""

    @abstractmethod
    def forget(self) -> None:
        """Free the value's memory: nobody needs it any more."""

    def partners(self, current: Round[S]) -> Optional[List[Round[S]]]:
        """The rounds of all slices of a tensor, if they end together; [] while one is
        incomplete."""
        return None


class Rounds(Generic[S]):
    """A record's rounds that are not answered yet, and the last that has ended. They end in order,
    when all workers have pushed for them.

    Pushes are counted by rank. One that comes twice, or after its round has ended, is an error and
    is never counted. Worker rank 0 alone pushes for the initial round.

    Rounds go on without workers that have left, if the job lets them. A worker's goodbye comes
    after its last push, on each server, so all servers sum the same workers' gradients in a round.
    Some rounds need worker rank 0 all the same. It alone gives initial values, and tells the
    servers their optimizer before its first push, so the first round of each key needs it; so does
    every round of a job that clips gradients, and of an optimizer to which rank 0 tells a number
    for each update.
    """

    def __init__(self, record: Record[S]) -> None:
        self.round = INITIAL_ROUND - 1
        """The last round that has ended. If rounds are each worker's own, their number."""
        self.open: Dict[Any, Round[S]] = {}
        """By number, or by rank and number where they are a worker's own, in the order in which
        they have begun."""
        self.patience_s = 0.0
        """How long workers may go on without a round's value, as far as is known: where they train
        by themselves and keys take turns, at most as long as between two rounds."""
        self._begun_s = 0.0
        """When the last round has begun, on the monotonic clock."""
        self.quorum = record.plan.num_workers
        """How many pushes complete a round, but the initial one, while no worker has left."""
        self._record = record
        self._plan = record.plan
        self._state = record.plan.state

    def check(self, rank: int, round: int) -> None:
        """Raise ProtocolError for a worker's push that can't be right."""
        if round == INITIAL_ROUND and rank != 0:
            raise ProtocolError(f"worker {rank} sent an initial value of {self._record.name}")
        current = self.find(rank, round)
        ended = self.round if round == INITIAL_ROUND else self.last_of(rank)
        if round <= ended or (current is not None and rank in current.arrived):
            raise ProtocolError(f"worker {rank} pushed {self._record.name} twice in round {round}")

    def check_ahead(self, rank: int, round: int, at_least: float = INITIAL_ROUND) -> None:
        """Raise ProtocolError for a round beyond a worker's window; those until `at_least` may have
        ended."""
        ended, window = max(self.last_of(rank), at_least), self._plan.rule.window
        if round > ended + window:
            raise ProtocolError(
                f"it is at round {round} of {self._record.name}, but only {window} rounds may be "
                f"open, and the last that can have ended is {ended}"
            )

    def find(self, rank: int, round: int) -> Optional[Round[S]]:
        """The round for which a worker pushes; None for its first push."""
        return self.open.get(round)

    def round_for(self, rank: int, round: int, step: int) -> Round[S]:
        """The round for which a worker pushes; raises what `check` raises."""
        current = self.open.get(round) or self.find(rank, round)
        if current is None:
            if round <= self.round or round == INITIAL_ROUND:
                self.check(rank, round)
            current = self._begin(rank, round, step)
        elif rank in current.arrived or round == INITIAL_ROUND:
            self.check(rank, round)
        if rank == 0:
            current.step = step
        return current

    def round_in_host_sum(self, rank: int, round: int, step: int) -> Round[S]:
        """Count a worker whose push comes in its host's sum; ProtocolError where it can't."""
        plan = self._plan
        if round == INITIAL_ROUND or plan.own_rounds:
            raise ProtocolError(f"it sums {self._record.name} with others, in round {round}")
        plan.sums_on_hosts = True
        current = self.round_for(rank, round, step)
        current.arrived.add(rank)
        current.in_sums += 1
        return current

    def round_of_sum(self, rank: int, round: int, workers: int) -> Round[S]:
        """The open round of a host's sum, whose sender is counted, or ProtocolError."""
        current = self.open.get(round)
        if current is None or rank not in current.arrived or workers < 1:
            raise ProtocolError(f"worker {rank} has announced no sum of {self._record.name}")
        return current

    def end(self, current: Round[S], changed: bool) -> None:
        """Count a round as ended: the value has it, and it has `changed` the value or not."""
        current.changed = changed
        current.ended = current.answered = True
        self.round += 1
        del self.open[current.number]
        del self._state.in_flight[current]

    def answered(self) -> List[Round[S]]:
        """Take the rounds that have ended before, and whose workers need not wait any more."""
        return []

    def value_round(self, round: int) -> int:
        """The round that an answer to a pull names: one with slices of this size, though a
        re-sliced value is of the round before."""
        return max(self.round, self._record.first_round)

    def oldest_waiting(self) -> Optional[Round[S]]:
        """A round that may end, or have its answer, if a worker has left."""
        return self.open.get(self.round + 1)

    def _begin(self, rank: int, round: int, step: int) -> Round[S]:
        """A new round for which a worker pushes first."""
        record = self._record
        current = self.open[round] = Round(record, round, record.new_sum(round), step)
        self._state.in_flight[current] = None
        local = self._plan.rule.local
        if local is not None and local.streaming:
            if self._begun_s:
                self.patience_s = current.since_s - self._begun_s
            self._begun_s = current.since_s
        return current

    def _wait(self, round: int, current: Round[S], missing: List[int]) -> Wait:
        arrived = list(current.arrived)
        return Wait(self._record, round, missing, arrived, current.since_s, self.patience_s)

    def next(self) -> Optional[Round[S]]:
        """The round that ends next, for all that is known of this record; None while none is
        complete, or something holds it."""
        current = self.open.get(self.round + 1)
        if current is None:
            return None
        if len(current.arrived) != self.quorum and not self.is_complete(current):
            return None
        if current.in_sums and self._lacks_host_sum(current):
            return None
        if self._state.clipped.steps and self._lacks_scale(current):
            return None
        return current

    def is_complete(self, current: Round[S]) -> bool:
        """Whether an open round follows the last one, and all have pushed for it that must."""
        if current.number == INITIAL_ROUND or current.number != self.round + 1:
            return current.number == INITIAL_ROUND and bool(current.arrived)
        if len(current.arrived) == self.quorum:
            return True
        if not self._state.left or self.missing(current):
            return False
        if self._leads_no_more(current):
            self._say_once_that_rank_0_has_left()
        return True

    def is_new_enough(self, rank: int, round: int) -> bool:
        """Whether the value lets a worker go on that has pushed for a round."""
        return self.round >= round

    def last_of(self, rank: int) -> int:
        """The last round that has ended of those for which a worker pushes."""
        return self.round

    def settings_step(self, current: Round[S]) -> Optional[int]:
        """The step whose settings hold for a round; None: the newest. Sets the optimizer's divisor
        of the round's sum."""
        left, optimizer = self._state.left, self._plan.optimizer
        if optimizer is not None:
            optimizer.weight = self.weight(current)
        if not left:
            return current.step
        return None if self._leads_no_more(current) else current.step

    def weight(self, current: Round[S]) -> float:
        """The divisor of a round's sum: the weights of all workers that had not left."""
        left, weights = self._state.left, current.weights
        workers = self._plan.num_workers - (len(left - current.arrived) if left else 0)
        if not weights:
            return workers
        return math.fsum([workers - len(weights), *weights.values()])  # in whatever order they came

    def waits(self) -> Iterator[Wait]:
        """The rounds that wait for workers, or may do."""
        for current in self.open.values():
            missing = self.missing(current)
            if current.is_counted and not missing:
                missing = self._state.clipped.not_voted(self._plan.declared.store)
            yield self._wait(current.number, current, missing)

    def missing(self, current: Round[S]) -> List[int]:
        """Ranks for whose pushes a round still waits; those that have left, too, if needed."""
        if current.number == INITIAL_ROUND:
            return [0]
        arrived, left = current.arrived, self._state.left
        missing = [
            rank
            for rank in range(self._plan.num_workers)
            if rank not in arrived and rank not in left
        ]
        if left and self._needs_rank_0(current):
            return [0, *missing]
        return missing

    def _leads_no_more(self, current: Round[S]) -> bool:
        """Whether worker rank 0 has left before a round."""
        return 0 in self._state.left and 0 not in current.arrived

    def _needs_rank_0(self, current: Round[S]) -> bool:
        if not self._leads_no_more(current):
            return False
        optimizer = self._plan.optimizer
        by_rank_0 = optimizer is not None and optimizer.needs_rank_0
        return current.number == INITIAL_ROUND + 1 or self._state.has_clipped or by_rank_0

    def _say_once_that_rank_0_has_left(self) -> None:
        if not self._state.goes_on_without_rank_0:
            self._state.goes_on_without_rank_0 = True
            _log.warning(
                "the job goes on without worker 0, which has left: the optimizer's settings, such "
                "as the learning rate, the forward order and the slice size stay as they are"
            )

    def _lacks_host_sum(self, current: Round[S]) -> bool:
        """Whether a host's sum has not come; whoever has left, another one sends it."""
        if current.in_sums < 0:
            raise ProtocolError(
                f"sums of {self._record.name} in round {current.number} have {-current.in_sums} "
                "slices more than workers have said"
            )
        return True

    def _lacks_scale(self, current: Round[S]) -> bool:
        """Whether the norm of the round's step is not known. The round is counted for it, once."""
        clipped = self._state.clipped
        step = clipped.steps.get(current.step)
        # In a store without an optimizer, no gradients are clipped, whatever step they come in.
        if step is None or self._plan.optimizer is None or current.number == INITIAL_ROUND:
            return False
        if not current.is_counted:
            current.is_counted = True
            record, weight = self._record, self.weight(current)
            share = self._plan.num_workers / weight if weight else 1.0
            clipped.count(current.step, current, record.size_elems, record.total(current), share)
        return step.scale is None


class OwnRounds(Rounds[S]):
    """Rounds that are each worker's own: a push changes the value by itself, in its worker's order.

    A push waits for the rounds before it of the same worker, for the initial value, and for worker
    rank 0's first step, with which the optimizer's settings come. It waits for another worker's
    push at barriers only, but its answer may, by the consistency rule.
    """

    def __init__(self, record: Record[S]) -> None:
        super().__init__(record)
        self.quorum = 1
        self.barriers: Deque[int] = deque()
        """No later round than the first of these ends, until all workers' have that one has."""
        self._ended: Dict[int, int] = {}
        """By rank, the last round that has ended."""
        self._changed_at = INITIAL_ROUND
        """The value of `round` when the value has changed last."""
        self._answered_at: Dict[int, int] = {}
        """The same when a worker was last answered, by rank."""

    def find(self, rank: int, round: int) -> Optional[Round[S]]:
        return self.open.get(round if round == INITIAL_ROUND else (rank, round))

    def next(self) -> Optional[Round[S]]:
        if self.round < INITIAL_ROUND:
            current = self.open.get(INITIAL_ROUND)
            return current if current is not None and current.arrived else None
        if self._plan.lacks_settings:
            return None
        optimizer = self._plan.optimizer
        whole = optimizer is not None and optimizer.whole_tensors
        for current in self.open.values():
            if self.is_complete(current) and not (whole and self._record.partners(current) == []):
                return current
        return None

    def is_complete(self, current: Round[S]) -> bool:
        number = current.number
        if self.round < INITIAL_ROUND or number == INITIAL_ROUND:
            return number == INITIAL_ROUND and bool(current.arrived)
        last = self.barriers[0] if self.barriers else math.inf
        return bool(current.arrived) and number == self.last_of(current.owner) + 1 <= last

    def end(self, current: Round[S], changed: bool) -> None:
        if current.number == INITIAL_ROUND:
            super().end(current, changed)
            return
        self.round += 1
        current.ended = True
        if changed:
            self._changed_at = self.round
        optimizer = self._plan.optimizer
        if current.owner == 0 and optimizer is not None:
            optimizer.last_step = max(optimizer.last_step, current.step)
        self._ended[current.owner] = current.number
        if self.is_new_enough(current.owner, current.number):
            self._answer(current)

    def answered(self) -> List[Round[S]]:
        free = [
            one
            for one in self.open.values()
            if one.ended and self.is_new_enough(one.owner, one.number)
        ]
        for one in free:
            self._answer(one)
        return free

    @property
    def at_barrier(self) -> bool:
        """Whether all workers have reached the first barrier; none has passed it."""
        if not self.barriers or self.round < INITIAL_ROUND:
            return False
        return not self._before_barrier()

    def is_new_enough(self, rank: int, round: int) -> bool:
        if self.round < INITIAL_ROUND or self.last_of(rank) < round:
            return False
        return not self._slower(self._plan.rule.needs(round))

    def last_of(self, rank: int) -> int:
        return self._ended.get(rank, INITIAL_ROUND)

    def value_round(self, round: int) -> int:
        return round  # all slices have the job's first size

    def settings_step(self, current: Round[S]) -> Optional[int]:
        """Steps are rank 0's: others' rounds go by the last of these that has updated anything."""
        optimizer = self._plan.optimizer
        return current.step if current.owner == 0 or optimizer is None else optimizer.last_step

    def waits(self) -> Iterator[Wait]:
        for current in self.open.values():
            if current.ended:
                needs = self._plan.rule.needs(current.number)
                yield self._wait(needs, current, self._slower(needs))
            elif self.round < INITIAL_ROUND or current.number == INITIAL_ROUND:
                yield self._wait(INITIAL_ROUND, current, [0])
            elif self._plan.lacks_settings:
                yield self._wait(current.number, current, [0])
            elif self.barriers and current.number > self.barriers[0]:
                yield self._wait(self.barriers[0], current, self._before_barrier())

    def oldest_waiting(self) -> Optional[Round[S]]:
        ended = (one for one in self.open.values() if one.ended)
        return next(ended, self.open.get(self.round + 1))

    def _begin(self, rank: int, round: int, step: int) -> Round[S]:
        if round == INITIAL_ROUND:
            return super()._begin(rank, round, step)
        record = self._record
        current = Round(record, round, record.new_sum(round), step, rank)
        self.open[rank, round] = current
        self._state.in_flight[current] = None
        return current

    def _answer(self, current: Round[S]) -> None:
        """Let a round that has ended be answered, by the value as it is now."""
        rank, current.answered = current.owner, True
        current.changed = self._changed_at > self._answered_at.get(rank, INITIAL_ROUND)
        left = self._state.left
        others = (self.last_of(one) for one in range(self._plan.num_workers) if one not in left)
        current.behind = max(0, current.number - min(others, default=current.number))
        self._answered_at[rank] = self.round
        del self.open[rank, current.number]
        del self._state.in_flight[current]

    def _before_barrier(self) -> List[int]:
        """Ranks of the workers, but those that have left, that have not reached the first one."""
        gone = self._state.gone
        return [rank for rank in self._slower(self.barriers[0]) if rank not in gone]

    def _slower(self, round: int) -> List[int]:
        """Ranks of the workers, but those that have left, that have not reached a round."""
        if round <= INITIAL_ROUND:
            return []
        left = self._state.left
        everybody = range(self._plan.num_workers)
        return [rank for rank in everybody if self.last_of(rank) < round and rank not in left]
