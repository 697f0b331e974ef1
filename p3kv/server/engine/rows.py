"""Keys of rows on a server: the value of this server's run, and how rounds change it."""

from __future__ import annotations

from typing import Dict, List, Mapping, Optional, Tuple

import numpy as np

from p3kv.common.finite import check_sum
from p3kv.common.seeded_rows import seeded_rows
from p3kv.errors import ProtocolError
from p3kv.server.engine.ledger import Ledger, SharedRounds, new_ledger
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.rounds import Round
from p3kv.server.engine.row_sums import PushOfRows, RowsOfRound
from p3kv.server.engine.sent_rows import SentRows
from p3kv.server.engine.unit import Unit
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.rows import NUMBER, Rows, check_numbers, index_of, pieces, union
from p3kv.wire.slice_sizes import SliceSizesByRound

_MADE_AT_ONCE = 1 << 16
"""Rows that are made from a seed, where all of them are needed."""
_PARTS = 8
_PART_BYTES = 1 << 21
"""In how many parts a run is updated at most, and how much has come before there is one: each costs
a millisecond."""
_KEPT_CHANGES = 8
"""Of how many rounds it is kept which rows they have changed: of any other, all rows are asked."""


class RowsKey(Unit):
    """A key of rows, which is one unit. Rows are counted in the server's run, from 0.

    Sums are of the key's dtype, but those of half precision are float32, as for slices.
    """

    def __init__(self, plan: KeyPlan, sizes: SliceSizesByRound) -> None:
        self.plan = plan
        self._sizes = sizes
        self.declared = plan.declared
        self.ledger: Ledger[RowsOfRound] = new_ledger(plan, self._new_sum, self.name)
        self.row_elems = plan.layout.grain_elems
        self.rows = plan.kept_elems // self.row_elems
        """How many rows this server keeps."""
        self.value = np.zeros((0, self.row_elems), plan.dtype)
        """By row; it has memory once the initial value comes."""
        self._sent: List[SentRows] = []
        """All that may not have left of the value."""
        self._sent_since: Dict[Tuple[int, bool], List[SentRows]] = {}
        """By the round since which rows have changed, and whether they are exact. Workers ask for
        the same."""
        self._changed_in = np.zeros(0, np.int64)
        """The last round in which each row has changed."""
        self._changes: Dict[int, List[np.ndarray]] = {}
        """By round, the newest last, the rows that it has changed; of the last rounds that may not
        have changed all."""
        self._summed: Optional[np.ndarray] = None
        """Without an optimizer: the rows of the last round's sum, at first all. Others are 0."""
        self._made: Optional[np.ndarray] = None
        """Which rows have been made that are made from a seed, when they are first needed."""
        if plan.declared.initial is not None:
            self._allocate()
            self._made = np.zeros(self.rows, bool)
            self.ledger.round = INITIAL_ROUND

    @property
    def name(self) -> str:
        return self.plan.called

    @property
    def units(self) -> Tuple[RowsKey]:
        """Unit that ends rounds by itself."""
        return (self,)

    @property
    def size_elems(self) -> int:
        return self.plan.kept_elems

    # Pushes.

    def check_push(self, rank: int, round: int) -> None:
        """Raises ProtocolError for a push that can't be right."""
        self.ledger.check(rank, round)
        self.ledger.check_ahead(rank, round)

    def has_begun_sum(self, rank: int, round: int) -> bool:
        """Whether some of a host's sum has come that a worker sends for an open round."""
        current = self.ledger.open.get(round)
        return current is not None and rank in current.sum.pushes

    def push(
        self, rank: int, round: int, frames: int, rows: Optional[Rows], step: int, workers: int = 0
    ) -> None:
        """Adds some of a worker's rows, one of `frames` frames of its push, and owns their memory.
        None, in a push of one frame: the worker has no gradient. `workers`: they are of the sum of
        so many of a host's workers, who are counted each on its own.

        Raises ProtocolError for rows that can't be right.
        """
        if workers:
            current = self.ledger.round_of_sum(rank, round, workers)
        else:
            self.check_push(rank, round)
            current = self.ledger.round_for(rank, round, step)
        push = current.sum.pushes.setdefault(rank, PushOfRows(frames, workers))
        if (push.frames, push.workers) != (frames, workers) or push.missing < 1:
            raise ProtocolError(
                f"worker {rank} pushed {self.name} in {push.frames} frames, or in {frames}"
            )
        if rows is not None:
            self._add(current, rank, push, rows)
        push.missing -= 1
        if not push.missing:
            push.next_row = self.rows
            if workers:
                current.in_sums -= workers
            else:
                current.arrived.add(rank)
                current.others.append(rank)

    def _new_sum(self, round_: int) -> RowsOfRound:
        ordered = self.plan.rules.deterministic
        return RowsOfRound(self.rows, self.row_elems, self.plan.sum_dtype, ordered)

    def _add(self, current: Round[RowsOfRound], rank: int, push: PushOfRows, rows: Rows) -> None:
        check_numbers(rows.numbers, push.next_row, self.rows)
        if len(rows.numbers):
            push.next_row = int(rows.numbers[-1]) + 1
        current.sum.empty = False
        if current.number == INITIAL_ROUND:
            self._add_to_initial(rows)
            return
        if self.plan.rules.checks_finite:
            # Of a sum it is no single worker's: they have checked their gradients.
            check_sum(rows.elements, self.name, current.number, None if push.workers else rank)
        current.sum.add(rank, rows)

    def _add_to_initial(self, rows: Rows) -> None:
        if not len(self.value):
            self._allocate()
        self.value[index_of(rows.numbers)] = rows.elements

    def _allocate(self) -> None:
        """Pages that nobody touches take no memory."""
        self.value = np.zeros((self.rows, self.row_elems), self.plan.dtype)
        self._changed_in = np.zeros(self.rows, np.int64)

    def _make(self, numbers: np.ndarray) -> None:
        """Makes those of these rows that are made from a seed and have not been needed yet."""
        if self._made is None:
            return
        new = numbers[~self._made[numbers]]
        initial = self.declared.initial
        if not len(new) or initial is None:
            return
        self._made[new] = True
        if initial.std:
            of_table = new + np.int64(self.plan.first_elem // self.row_elems)
            rows = seeded_rows(of_table, self.row_elems, initial.seed, initial.std, initial.uniform)
            rows[of_table == initial.zero_row] = 0
            self.value[new] = rows

    def copied_value(self) -> np.ndarray:
        """A flat copy of all rows."""
        if self._made is not None:
            for start in range(0, self.rows, _MADE_AT_ONCE):
                self._make(np.arange(start, min(start + _MADE_AT_ONCE, self.rows)))
        return self.value.reshape(-1).copy()

    # Rounds.

    def summed(self, current: Round[RowsOfRound]) -> Optional[np.ndarray]:
        if current.sum.empty:
            return None
        elements: np.ndarray = current.sum.total().elements.reshape(-1)
        return elements

    def update(self, current: Round[RowsOfRound]) -> bool:
        self._begin_changes()
        if current.sum.empty:
            self.scale(current, None)
        elif current.number > INITIAL_ROUND:
            self._update(current, self.rows, ends=True)
        return not current.sum.empty

    def update_in_advance(self) -> None:
        """Updates rows for the next round before it ends, where that pays. To be called after
        pushes, when there is nothing else to do.

        Rows arrive in ascending order, and an optimizer that changes touched rows only may have
        them one part after the other. So little is left to do when the last ones have come.
        """
        ledger, optimizer = self.ledger, self.plan.optimizer
        following = ledger.open.get(self.round + 1)
        if (
            optimizer is None
            or following is None
            or following.sum.empty
            or self.round < INITIAL_ROUND
            or not isinstance(ledger, SharedRounds)
            or self.plan.rules.leavers.clips
            or following.sum.waiting_bytes < _PART_BYTES
        ):
            return
        pushes = following.sum.pushes
        under_way = {rank: push for rank, push in pushes.items() if push.missing}
        if following.in_sums != sum(push.workers for push in under_way.values()):
            return
        if not all(rank in under_way for rank in ledger.missing(following)):
            return
        end = min((push.next_row for push in under_way.values()), default=self.rows)
        if (end - following.sum.updated_rows) * _PARTS < self.rows:
            return
        if optimizer.updates_touched_rows(self.declared, self.plan.update_step(following)):
            self._begin_changes()
            self._update(following, end, ends=False)

    def _update(self, current: Round[RowsOfRound], end: int, ends: bool) -> None:
        """Has a round's sum of rows before `end` change the value."""
        numbers, elements = current.sum.take(end)
        self._make(numbers)
        checks_finite = self.plan.rules.checks_finite
        if checks_finite:
            check_sum(elements, self.name, current.number)
        current.sum.updated_rows = end
        if ends:
            self.scale(current, elements)
        optimizer, step = self.plan.optimizer_of(current), self.plan.update_step(current)
        if optimizer is None:
            before, self._summed = self._summed, numbers
            self.value[slice(None) if before is None else index_of(before)] = 0
            self._note_changes(before)
            with np.errstate(over="ignore"):
                self.value[index_of(numbers)] = elements
            if checks_finite and self.value.dtype != elements.dtype:
                check_sum(self.value[numbers], self.name, current.number)
        elif optimizer.update_rows(self.declared, self.value, numbers, elements, step, ends):
            self._note_changes(None)
        self._note_changes(numbers)

    def _begin_changes(self) -> None:
        """To be called before the next round changes the value."""
        self._keep_sent_rows()
        if self.round >= INITIAL_ROUND:  # before it, there is no value to which rows are added
            self._changes.setdefault(self.round + 1, [])
        if len(self._changes) > _KEPT_CHANGES:
            del self._changes[min(self._changes)]

    def _note_changes(self, numbers: Optional[np.ndarray]) -> None:
        """The next round changes these rows; None: perhaps all."""
        round_ = self.round + 1
        if numbers is None:
            self._changed_in[:] = round_
            self._changes.clear()
        else:
            self._changed_in[index_of(numbers)] = round_
            if round_ in self._changes:
                self._changes[round_].append(numbers)

    # Values.

    def wire(
        self, numbers: np.ndarray, priority: int, exact: bool = False, named: bool = True
    ) -> List[SentRows]:
        """The rows with these numbers as they travel, cut into frames of this priority; `exact`: as
        they are, whatever the codec. `named`: by a request, in which rows are counted then."""
        self._make(numbers)
        sizes = self._sizes.of(self._sizes.generation(max(self.round, INITIAL_ROUND)))
        slice_rows = self.plan.layout.full_slice_elems(sizes.slice_size) // self.row_elems
        row_bytes = self.row_elems * self.plan.dtype.itemsize
        sent = [
            SentRows(
                self.plan,
                self.value,
                self.round,
                numbers[piece],
                exact,
                piece.start if named else None,
            )
            for piece in pieces(len(numbers), slice_rows, row_bytes, priority)
        ]
        self._sent = [rows for rows in self._sent if rows.waiting] + sent
        return sent

    def wire_since(self, round: int, priority: int, exact: bool = False) -> List[SentRows]:
        """The rows that have changed after a round, in the same way."""
        sent = self._sent_since.get((round, exact))
        if sent is None:
            sent = self.wire(self.changed_since(round), priority, exact, named=False)
            self._sent_since[round, exact] = sent
        return sent

    def changed_since(self, round: int) -> np.ndarray:
        """The numbers of the rows that have changed after a round."""
        if round > self.round:
            raise ProtocolError(
                f"it has the value of round {round} of {self.name}, which is at {self.round}"
            )
        later = range(round + 1, self.round + 1)
        if all(one in self._changes for one in later):
            several = [numbers for one in later for numbers in self._changes[one]]
            return union(several or [np.empty(0, NUMBER)])
        return np.flatnonzero(self._changed_in > round).astype(NUMBER)

    def changed_of(self, numbers: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Those of these rows that have changed since the round before `known`, or whose is 0."""
        changed: np.ndarray = numbers[self._changed_in[numbers] >= known]
        return changed

    def _keep_sent_rows(self) -> None:
        """Has what is being sent copied, before the value changes."""
        for rows in self._sent:
            rows.keep()
        self._sent, self._sent_since = [], {}

    # The optimizer's state, for whoever saves it.

    def check_ahead(self, round: int, rank: int) -> None:
        """Raises ProtocolError if no worker can be so far ahead."""
        self.ledger.check_ahead(rank, round)

    def has_ended(self, round: int) -> bool:
        """Whether a round, this one or a later one, has ended."""
        return self.round >= round

    def all_ended(self, round: int, rank: int) -> bool:
        """Whether all units of the key have ended a round, when one has."""
        return True

    def reslice(self) -> Tuple[()]:
        """Nothing: frames of any sizes make up a run."""
        return ()

    def copied_state(self, optimizer: Optimizer, whole: bool = False) -> Optional[State]:
        """Copies what an optimizer remembers of the run, with flat arrays; None if nothing."""
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
                    f"{self.rows} rows of {self.row_elems} elements of {self.name}"
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
