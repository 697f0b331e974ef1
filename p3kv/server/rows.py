"""Keys of rows on a server: sums the rows that workers have touched, and keeps the values.

Nothing here knows of sockets: pushes go in, and rows of the value come out.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Deque, Dict, Iterator, List, Mapping, Optional, Set, Tuple, Union

import numpy as np

from p3kv.consistency import Consistency
from p3kv.errors import ProtocolError
from p3kv.server.aggregation import Aggregator
from p3kv.server.finite import check_sum
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.server.own_rounds import OwnRounds
from p3kv.slicing import make_layout
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, called
from p3kv.wire.rows import NUMBER, Rows, check_numbers

_PARTS = 8
"""In how many parts a run is updated at most: each costs a millisecond."""


class RowSum:
    """A sum of rows: has memory for the rows that are in it, and not for the others."""

    def __init__(self, rows: int, row_elems: int, dtype: np.dtype) -> None:
        """Of some of `rows` rows."""
        self._place = np.full(rows, -1, np.int64)
        """Where each row is in the sum; -1: it is not."""
        self._elements = np.empty((0, row_elems), dtype)
        self._count = 0

    def add(self, rows: Rows) -> None:
        """Adds rows, casting them to the sum's dtype; their memory is not used any more when it
        returns."""
        numbers, elements = rows
        places = self._place[numbers]
        new = places < 0
        if new.all():
            self._append(numbers, elements)
        elif new.any():
            self._add_to(places[~new], elements[~new])
            self._append(numbers[new], elements[new])
        else:
            self._add_to(places, elements)

    def between(self, first: int, end: int) -> Rows:
        """The rows with numbers from `first` to before `end`, in ascending order."""
        places = self._place[first:end]
        numbers = np.flatnonzero(places >= 0)
        places = places[numbers]
        if len(places) and (np.diff(places) == 1).all():
            elements = self._elements[places[0] : places[0] + len(places)]
        else:
            elements = self._elements[places]
        return Rows((numbers + first).astype(NUMBER), elements)

    def _append(self, numbers: np.ndarray, elements: np.ndarray) -> None:
        end = self._count + len(numbers)
        if end > len(self._elements):
            larger = min(len(self._place), max(end, 2 * len(self._elements)))
            grown = np.empty((larger, elements.shape[1]), self._elements.dtype)
            grown[: self._count] = self._elements[: self._count]
            self._elements = grown
        self._elements[self._count : end] = elements
        self._place[numbers] = np.arange(self._count, end)
        self._count = end

    def _add_to(self, places: np.ndarray, elements: np.ndarray) -> None:
        if (np.diff(places) == 1).all():
            # Usual where workers touch all rows: nothing is copied then.
            part = self._elements[places[0] : places[0] + len(places)]
            np.add(part, elements, out=part)
        else:
            self._elements[places] += elements


def _add_until(total: RowSum, arrived: Deque[Rows], end: int) -> None:
    """Moves the rows before `end` from `arrived`, which ascend, to a sum."""
    while arrived:
        numbers, elements = arrived.popleft()
        count = int(numbers.searchsorted(end))
        total.add(Rows(numbers[:count], elements[:count]))
        if count < len(numbers):
            arrived.appendleft(Rows(numbers[count:], elements[count:]))
            return


class _Push:
    """A worker's push of which some frames have arrived."""

    def __init__(self, frames: int) -> None:
        self.frames = self.missing = frames
        self.next_row = 0
        """Rows from this one on may still come."""


@dataclass
class RowsRound:
    """What has arrived of a key in one round."""

    round: int
    """As workers count it."""
    total: RowSum
    pushes: Dict[int, _Push] = field(default_factory=dict)
    arrived: Set[int] = field(default_factory=set)
    """Ranks whose pushes are complete."""
    by_rank: Dict[int, Deque[Rows]] = field(default_factory=dict)
    """What they have pushed and is not in `total`; only in deterministic mode."""
    has_gradient: bool = False
    """Whether any worker has pushed one, be it without rows: else the round changes nothing."""
    updated_rows: int = 0
    """Rows before this one are updated already."""
    step: int = 0
    """The step in which worker rank 0 pushed; until it has, that of the first push."""
    since_s: float = field(default_factory=time.monotonic)
    """When the first push arrived, on the monotonic clock."""


class RowsKey:
    """A key of rows: the value of this server's run, and the rounds that are not complete yet.

    Rows are counted in the run, from 0. The consistency rule says when a round is complete; rounds
    end in order. A push that arrives twice is an error and is never added twice. In deterministic
    mode pushes are added in rank order, otherwise as they arrive. Sums are of the key's dtype, but
    those of float16 are float32, as for slices.
    """

    def __init__(
        self, declared: DeclaredKey, rank: int, aggregator: Aggregator, consistency: Consistency
    ) -> None:
        """`consistency` is the rule that the key was declared with; `aggregator` has what holds for
        all keys, such as the optimizers.

        Raises ConfigError if the key's layout is not known here, ProtocolError for runs that are
        none of this layout.
        """
        self.key = self.declared = declared
        self.called = called(declared.key, declared.name)
        layout = make_layout(declared.layout, declared.shape)
        if not layout.has_whole_grains(declared.runs):
            raise ProtocolError(f"the runs {declared.runs} break rows of {self.called}")
        self._layout = layout
        self._aggregator = aggregator
        self._consistency = consistency
        self.own_rounds = consistency.own_rounds
        self._own: OwnRounds[RowsRound] = OwnRounds()
        """Where rounds are each worker's own: complete pushes, until their rounds end."""
        self._arriving: Dict[Tuple[int, int], RowsRound] = {}
        """By rank and round: pushes that are not complete."""
        self.row_elems = layout.grain_elems
        self.rows = dict(declared.runs)[rank] // self.row_elems
        """How many rows this server keeps."""
        self.dtype = np.dtype(declared.dtype)
        self._sum_dtype = np.dtype(np.float32) if self.dtype == np.float16 else self.dtype
        self.row_bytes = self.row_elems * self.dtype.itemsize
        self.round = INITIAL_ROUND - 1
        """The last round whose result the value is. If rounds are each worker's own, it counts
        those of all workers."""
        self.open_rounds: Dict[int, RowsRound] = {}
        self.value = np.zeros((0, self.row_elems), self.dtype)
        """By row; it has memory once the initial value comes."""
        self._changed_in = np.zeros(0, np.int64)
        """The last round in which each row has changed."""
        self._summed: Union[np.ndarray, slice] = slice(None)
        """Without an optimizer: the rows of the last round's sum, at first all. Others are 0."""

    def name(self) -> str:
        """The key's name in messages."""
        return self.called

    def most_rows(self, slice_size: int) -> int:
        """How many rows a frame has at most."""
        return self._layout.full_slice_elems(slice_size) // self.row_elems

    # Pushes.

    def check_push(self, rank: int, round: int) -> None:
        """Raises ProtocolError for a push that can't be right."""
        if round == INITIAL_ROUND and rank != 0:
            raise ProtocolError(f"worker {rank} sent an initial value of {self.called}")
        if self._is_own(round):
            twice = self._own.has_come(rank, round)
        else:
            current = self.open_rounds.get(round)
            twice = round <= self.round or (current is not None and rank in current.arrived)
        if twice:
            raise ProtocolError(f"worker {rank} pushed {self.called} twice in round {round}")
        self.check_ahead(round, rank)

    def check_ahead(self, round: int, rank: int) -> None:
        """Raises ProtocolError for a round beyond the window that a worker can have here."""
        window, ended = self._consistency.window, max(self.round, INITIAL_ROUND)
        if self.own_rounds:
            ended = self._own.ended(rank)
        if round > ended + window:
            raise ProtocolError(
                f"it is at round {round} of {self.called}, but only {window} rounds may be open, "
                f"and the last that has ended is {ended}"
            )

    def push(self, rank: int, round: int, frames: int, rows: Optional[Rows], step: int) -> None:
        """Adds some of a worker's rows, one of `frames` frames of its push, and owns their memory.
        None, in a push of one frame: the worker has no gradient.

        Call `end_round` afterwards where `next_ends`. Raises ProtocolError for rows that can't be
        right.
        """
        self.check_push(rank, round)
        own = self._is_own(round)
        current = self._arriving.get((rank, round)) if own else self.open_rounds.get(round)
        if current is None:
            total = RowSum(self.rows, self.row_elems, self._sum_dtype)
            current = RowsRound(round, total, step=step)
            if own:
                self._arriving[rank, round] = current
            else:
                self.open_rounds[round] = current
        push = current.pushes.setdefault(rank, _Push(frames))
        if push.frames != frames or frames < 1:
            raise ProtocolError(
                f"worker {rank} pushed {self.called} in {push.frames} frames, or in {frames}"
            )
        if rank == 0:
            current.step = step
        if rows is not None:
            self._add(current, rank, push, rows)
        push.missing -= 1
        if not push.missing:
            push.next_row = self.rows
            current.arrived.add(rank)
            if own:
                self._own.add(rank, round, self._arriving.pop((rank, round)))

    def _add(self, current: RowsRound, rank: int, push: _Push, rows: Rows) -> None:
        check_numbers(rows.numbers, push.next_row, self.rows)
        if len(rows.numbers):
            push.next_row = int(rows.numbers[-1]) + 1
        current.has_gradient = True
        if current.round == INITIAL_ROUND:
            self._add_to_initial(rows)
            return
        if self._aggregator.checks_finite:
            check_sum(rows.elements, self.called, current.round, rank)
        if self._aggregator.deterministic:
            current.by_rank.setdefault(rank, deque()).append(rows)
        else:
            current.total.add(rows)

    def _is_own(self, round: int) -> bool:
        return self.own_rounds and round != INITIAL_ROUND

    def _add_to_initial(self, rows: Rows) -> None:
        if not len(self.value):
            self.value = np.zeros((self.rows, self.row_elems), self.dtype)
            self._changed_in = np.zeros(self.rows, np.int64)
        self.value[rows.numbers] = rows.elements

    def next_ends(self) -> bool:
        """Whether the next round is complete."""
        following = self.open_rounds.get(self.round + 1)
        if following is None:
            return self.own_rounds and self._open_own()
        if self.round < INITIAL_ROUND:
            return bool(following.arrived)
        optimizer = self._aggregator.optimizers.get(self.key.store)
        return self.own_rounds or self._aggregator.leavers.ends(
            self._consistency, following.round, following.arrived, optimizer
        )

    def _open_own(self) -> bool:
        """Makes a round that is a worker's own the next one, if one of them may end."""
        if self.round < INITIAL_ROUND or self.key.store not in self._aggregator.optimizers:
            return False
        for rank, round_ in self._own.next():
            self.open_rounds[self.round + 1] = self._own.end(rank, round_)
            return True
        return False

    def end_round(self) -> RowsRound:
        """Ends the next round, which must be complete; changes the value."""
        ended = self.open_rounds.pop(self.round + 1)
        if self.round >= INITIAL_ROUND and ended.has_gradient:
            self._update(ended, self.rows, ends=True)
        self.round += 1
        return ended

    def rows_to_update(self) -> int:
        """Up to which row the next round can be updated before it ends; 0 if it does not pay.

        Rows arrive in ascending order, and an optimizer that changes touched rows only may have
        them one part after the other. So little is left to do when the last ones have come.
        """
        following = self.open_rounds.get(self.round + 1)
        if following is None or not following.has_gradient or self.round < INITIAL_ROUND:
            return 0
        missing = self._missing(following)
        if not all(rank in following.pushes for rank in missing):
            return 0
        end = min((following.pushes[rank].next_row for rank in missing), default=self.rows)
        optimizer = self._aggregator.optimizers.get(self.key.store)
        if (
            (end - following.updated_rows) * _PARTS < self.rows
            or optimizer is None
            or not optimizer.updates_touched_rows(self.key, self._update_step(following))
        ):
            return 0
        return end

    def update_until(self, end: int) -> None:
        """Updates the rows before `end` for the next round, as `rows_to_update` has said; changes
        the value."""
        self._update(self.open_rounds[self.round + 1], end, ends=False)

    def waits(self) -> Iterator[Tuple[int, RowsRound, List[int]]]:
        """Rounds that wait for workers: the round, what has come, and the ranks of those whose push
        is not complete."""
        for round_, current in self.open_rounds.items():
            yield round_, current, self._missing(current)
        for _, round_, current in self._own.waiting():
            if self.round < INITIAL_ROUND:
                yield INITIAL_ROUND, current, [0]
            elif self.key.store not in self._aggregator.optimizers:
                yield round_, current, [0]

    def _missing(self, current: RowsRound) -> List[int]:
        optimizer = self._aggregator.optimizers.get(self.key.store)
        return self._aggregator.leavers.missing(
            self._consistency, current.round, current.arrived, optimizer
        )

    def _update_step(self, following: RowsRound) -> Optional[int]:
        """The step whose optimizer settings hold for a round; None for the newest settings."""
        leavers = self._aggregator.leavers
        newest = self.own_rounds or leavers.leads_no_more(following.pushes)
        return None if newest else following.step

    def _update(self, following: RowsRound, end: int, ends: bool) -> None:
        """Has the next round's sum of rows before `end` change the value."""
        round_, first = self.round + 1, following.updated_rows
        for rank in sorted(following.by_rank):
            _add_until(following.total, following.by_rank[rank], end)
        numbers, elements = following.total.between(first, end)
        if self._aggregator.checks_finite:
            check_sum(elements, self.called, following.round)
        following.updated_rows = end
        optimizer = self._aggregator.optimizers.get(self.key.store)
        step = self._update_step(following)
        if optimizer is None:
            self.value[self._summed] = 0
            self._changed_in[self._summed] = round_
            self._summed = numbers
            with np.errstate(over="ignore"):
                self.value[numbers] = elements
            if self._aggregator.checks_finite and self.value.dtype != elements.dtype:
                check_sum(self.value[numbers], self.called, following.round)
        elif optimizer.update_rows(self.key, self.value, numbers, elements, step, ends):
            self._changed_in[:] = round_
        self._changed_in[numbers] = round_

    # Values.

    def is_new_enough(self, round: int, rank: int) -> bool:
        """Whether the value lets a worker go on that has pushed for a round."""
        if self.own_rounds:
            return self.round >= INITIAL_ROUND and self._own.ended(rank) >= round
        has_optimizer = self.key.store in self._aggregator.optimizers
        oldest = self._consistency.needs(round) if has_optimizer else round
        return self.round >= max(oldest, INITIAL_ROUND)

    def changed_since(self, round: int) -> np.ndarray:
        """The numbers of the rows that have changed after a round."""
        if round > self.round:
            raise ProtocolError(
                f"it has the value of round {round} of {self.called}, which is at {self.round}"
            )
        return np.flatnonzero(self._changed_in > round).astype(NUMBER)

    # The optimizer's state, for whoever saves it.

    def states(self, round: int, rank: int) -> None:
        """Raises ProtocolError if no worker can be so far ahead."""
        self.check_ahead(round, rank)

    def has_ended(self, round: int) -> bool:
        """Whether a round, this one or a later one, has ended."""
        return self.round >= round

    def copied_state(self, optimizer: Optimizer, whole: bool = False) -> Optional[State]:
        """What an optimizer remembers of the run, with flat arrays; None if nothing."""
        state = optimizer.copied(self.declared, WHOLE)
        if state is None:
            return None
        return state if whole else State(_reshaped(state.elements, (-1,)), state.numbers)

    def replace_state(
        self, optimizer: Optimizer, state: Optional[State], whole: bool = False
    ) -> None:
        """Gives an optimizer another state of the run, or none.

        Raises ProtocolError for a state that does not have one number for each element.
        """
        for name, array in ({} if state is None or whole else state.elements).items():
            if array.size != self.rows * self.row_elems:
                raise ProtocolError(
                    f"it sent the array {name!r} of shape {array.shape} for a state of "
                    f"{self.rows} rows of {self.row_elems} elements of {self.called}"
                )
        optimizer.export(self.declared, WHOLE)
        if state is not None and whole:
            optimizer.load(self.declared, WHOLE, state)
        elif state is not None:
            shape = (self.rows, *self.declared.shape[1:])
            reshaped = State(_reshaped(state.elements, shape), state.numbers)
            optimizer.load(self.declared, WHOLE, reshaped)


def _reshaped(arrays: Mapping[str, np.ndarray], shape: tuple) -> Dict[str, np.ndarray]:
    return {name: array.reshape(shape) for name, array in arrays.items()}
