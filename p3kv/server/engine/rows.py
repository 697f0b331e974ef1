"""All rows of a key that a server keeps: pushes of some rows, their sums, and how rounds change
them."""

from __future__ import annotations

import threading
from collections import defaultdict
from itertools import takewhile
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple
from weakref import WeakSet

import numpy as np

from p3kv.codecs import part_of_rows
from p3kv.common.finite import check_sum
from p3kv.common.seeded_rows import seeded_rows
from p3kv.errors import ProtocolError
from p3kv.server.engine.rounds import Record, Round
from p3kv.server.engine.state import KeyPlan
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.fields import PushRowsHeader
from p3kv.wire.header import ENCODED, IN_HOST_SUM, INITIAL_ROUND
from p3kv.wire.rows import (
    NUMBER,
    Packed,
    Rows,
    check_numbers,
    gathered,
    index_of,
    packed,
    pieces,
    summed,
    union,
    unpacked,
)
from p3kv.wire.slice_sizes import SliceSizesByRound

_PIECE_BYTES = 1 << 20
"""Of a snapshot's array, read at once."""
_PARTS = 8
_PART_BYTES = 1 << 21
"""In how many parts a run is updated at most, and how much has come before there is one: each costs
a millisecond."""
_KEPT_CHANGES = 8
"""Of how many rounds it is kept which rows they have changed: of any other, all rows are asked."""
_FOLDED = -1
"""The rank of a sum, beside those of the workers whose rows are not in it: it comes first."""
_MOST_RUNS = 2
"""How often all rows of the run may be kept before they are added up, in any order."""


class RowsFrame(NamedTuple):
    """The payload of a push of rows, and the dtype of its elements."""

    payload: memoryview
    dtype: np.dtype


class _Push:
    """A worker's push of which some frames have arrived."""

    def __init__(self, frames: int, workers: int) -> None:
        """`workers`: of how many of a host it is the sum; 0: of its own rows."""
        self.frames = self.missing = frames
        self.workers = workers
        self.next_row = 0
        """Rows from this one on may still come."""


class RowsSum:
    """Pushes of a key's rows that have arrived in one round.

    Rows stay where they have arrived until their sum is asked for, and are then added up in the
    order of ranks: bit for bit the same each time. If ranks need no order, memory has a limit: they
    are added up earlier where many workers push most rows of a run.
    """

    def __init__(self, run_rows: int, row_elems: int, dtype: np.dtype, ordered: bool) -> None:
        """`run_rows`: how many rows the run has; `dtype`: the sum's."""
        self.pushes: Dict[int, _Push] = {}
        """By rank."""
        self.empty = True
        """Whether no worker has pushed a gradient, be it without rows."""
        self.updated_rows = 0
        """Rows before this one have changed the value already."""
        self._none = Rows(np.empty(0, NUMBER), np.empty((0, row_elems), dtype))
        self._most_rows = _MOST_RUNS * run_rows
        self._ordered = ordered
        self._by_rank: Dict[int, List[Rows]] = {}
        """What has arrived, and is not summed; of each rank in ascending order."""
        self._rows = 0
        """How many rows these are."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes of the rows that have arrived and are not taken."""
        return self._rows * self._none.elements.shape[1] * self._none.elements.itemsize

    def add(self, rank: int, rows: Rows) -> None:
        """Add some of a worker's rows, which come in ascending order, and own their memory."""
        self._by_rank.setdefault(rank, []).append(rows)
        self._rows += len(rows.numbers)
        if self._rows > self._most_rows and not self._ordered:
            self.total()

    def total(self) -> Rows:
        """The sum of all that has arrived and has not been taken."""
        total = self._sum([rows for rank in sorted(self._by_rank) for rows in self._by_rank[rank]])
        self._by_rank = {_FOLDED: [total]}
        self._rows = len(total.numbers)
        return total

    def take(self, end: int) -> Rows:
        """Take the sum's rows before `end`, in ascending order, once all of them have come."""
        taken: List[Rows] = []
        for rank in sorted(self._by_rank):
            taken += _taken(self._by_rank[rank], end)
        self._rows -= sum(len(rows.numbers) for rows in taken)
        return self._sum(taken)

    def _sum(self, several: Sequence[Rows]) -> Rows:
        parts = [rows for rows in several if len(rows.numbers)]
        if not parts:
            return self._none
        return summed(union([rows.numbers for rows in parts]), parts, self._none.elements.dtype)


def _taken(arrived: List[Rows], end: int) -> List[Rows]:
    """Remove the rows before `end` from what has arrived, which ascends."""
    whole = (not len(numbers) or numbers[-1] < end for numbers, _ in arrived)
    count = sum(takewhile(bool, whole))
    taken = arrived[:count]
    del arrived[:count]
    if arrived and arrived[0].numbers[0] < end:
        numbers, elements = arrived[0]
        before = int(numbers.searchsorted(end))
        taken.append(Rows(numbers[:before], elements[:before]))
        arrived[0] = Rows(numbers[before:], elements[before:])
    return taken


class SentRows:
    """Some rows of a value for one worker or several, copied when the first of them gets it, and
    encoded where the key has a codec for values, unless they are to be exact. Initial values travel
    as they are."""

    def __init__(
        self, record: ServerRows, numbers: np.ndarray, exact: bool, place: Optional[int] = None
    ) -> None:
        """`place`: of rows that a request names, where they begin in it."""
        self._plan = record.plan
        self._value = record.value
        """All rows: that of the round until `keep` has been called."""
        self._round = record.round
        self._numbers = numbers
        encodes = self._round > INITIAL_ROUND and not self._plan.codecs.values.in_place
        self._encodes = encodes and not exact
        self.packed = packed(numbers)
        """Their numbers as they travel."""
        if place is not None:
            self.packed = Packed(place, len(numbers), 0, self.packed.gaps[:0])
        self.flags = self.packed.flags | (ENCODED if self._encodes else 0)
        self._copy: Optional[memoryview] = None
        self.waiting = 0
        """By how many workers."""

    def begin_send(self) -> None:
        """Keeps the rows until `end_send`."""
        self.waiting += 1

    def end_send(self) -> None:
        """Undoes one `begin_send`."""
        self.waiting -= 1
        if not self.waiting:
            self._copy = None

    def keep(self) -> None:
        """To be called before the value changes."""
        if self.waiting:
            self.payload()

    def payload(self) -> memoryview:
        """The bytes that travel."""
        if self._copy is None:
            if self._encodes:
                rows = Rows(self._numbers, self._value[self._numbers])
                self._copy = rows.encoded(
                    self.packed.gaps, self._plan.encoder(), part_of_rows(self._round),
                    self._plan.codecs.values.most_bytes(rows.elements.size),
                )  # fmt: skip
            else:
                some = index_of(self._numbers)
                self._copy = gathered(self._value, some, self.packed.gaps)
        return self._copy


class RowsSnapshot:
    """Rows and their optimizer's state as they are when this is made, for a thread that reads them
    while rounds go on. Whoever changes rows has those kept first that have not been read yet, so
    that a snapshot takes as much memory as changes meanwhile."""

    def __init__(self, record: ServerRows, arrays: Sequence[np.ndarray]) -> None:
        """`arrays` of the state, with a row's elements for each row."""
        shape = record.rows, record.row_elems
        self._record = record
        self._arrays = [record.value, *(one.reshape(shape) for one in arrays)]
        row_bytes = max(array.strides[0] for array in self._arrays)
        self._piece_rows = max(1, _PIECE_BYTES // max(1, row_bytes))
        self._lock = threading.Lock()
        self._is_kept = np.zeros(record.rows, bool)
        self._kept: Dict[int, List[Tuple[np.ndarray, List[np.ndarray]]]] = defaultdict(list)
        """By piece: numbers in it, and these rows of all arrays."""
        self._read_rows = 0
        """So many of the last array have been read."""

    def keep(self, numbers: Optional[np.ndarray]) -> None:
        """To be called before these rows change; None: before any may. Numbers ascend."""
        if numbers is None:
            numbers = np.arange(self._record.rows)
        with self._lock:
            new = numbers[(numbers >= self._read_rows) & ~self._is_kept[numbers]]
            self._is_kept[new] = True
            ends = np.flatnonzero(np.diff(new // self._piece_rows)) + 1
            for some in np.split(new, ends) if len(new) else ():
                copies = [array[some] for array in self._arrays]
                piece, first = divmod(int(some[0]), self._piece_rows)
                self._kept[piece].append((some - (some[0] - first), copies))

    def parts(self, place: int) -> Iterator[np.ndarray]:
        """The value (0), or an array of the state, in consecutive flat parts. One after the other
        is read to its end, in this order, by one thread."""
        for piece, start in enumerate(range(0, self._record.rows, self._piece_rows)):
            numbers = np.arange(start, min(start + self._piece_rows, self._record.rows))
            not_made = self._record.not_made(numbers[: 0 if place else None])
            with self._lock:
                part = self._arrays[place][start : start + self._piece_rows].copy()
                for some, copies in self._kept.get(piece, ()):
                    part[some] = copies[place]
                if place == len(self._arrays) - 1:
                    self._kept.pop(piece, None)
                    self._read_rows = start + len(part)
            if len(not_made):
                part[not_made - start] = self._record.initial(not_made)
            yield part.reshape(-1)


class ServerRows(Record[RowsSum]):
    """All rows of a key on its server, counted from 0.

    Sums are of the key's dtype, but those of half precision are float32, as for slices.
    """

    def __init__(self, plan: KeyPlan, sizes: SliceSizesByRound) -> None:
        super().__init__(plan)
        self._sizes = sizes
        self.declared = plan.declared
        self.size_elems = plan.kept_elems
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
        self._snapshots: WeakSet[RowsSnapshot] = WeakSet()
        """Those that somebody may still read."""
        if plan.declared.initial is not None:
            self._allocate()
            self._made = np.zeros(self.rows, bool)
            self.rounds.round = INITIAL_ROUND

    @property
    def name(self) -> str:
        return self.plan.called

    def forget(self) -> None:
        self.value = self.value[:0]

    # Pushes.

    def new_sum(self, round: int) -> RowsSum:
        return RowsSum(
            self.rows, self.row_elems, self.plan.sum_dtype, self.plan.state.deterministic
        )

    def check_push(self, rank: int, round: int) -> None:
        """Raise ProtocolError for a push that can't be right."""
        self.rounds.check(rank, round)
        self.rounds.check_ahead(rank, round)

    def push(self, header: PushRowsHeader, frame: Optional[RowsFrame]) -> None:
        """Count a frame of a push and add its rows, or that they come in the host's sum; call
        `end_rounds` afterwards. ProtocolError for rows that can't be right."""
        rank, round_, workers = header.rank, header.round, header.workers
        if header.flags & IN_HOST_SUM and not (workers and self._has_begun_sum(rank, round_)):
            current = self.rounds.round_in_host_sum(rank, round_, header.step)
            current.others.append(rank)
            if header.weight != 1.0:
                current.weigh(rank, header.weight, False)
        if workers or not header.flags & IN_HOST_SUM:
            rows = None
            if frame is not None:
                decoder, part = self.plan.decoder, part_of_rows(round_)
                rows = unpacked(header, *frame, self.row_elems, decoder, part)
            self.add(header, rows)

    def add(self, header: PushRowsHeader, rows: Optional[Rows]) -> None:
        """Add a frame of a worker's rows, and own their memory; None: it has no gradient.
        ProtocolError for rows that can't be right."""
        rank, frames, workers = header.rank, header.frames, header.workers
        if workers:
            current = self.rounds.round_of_sum(rank, header.round, workers)
        else:
            self.check_push(rank, header.round)
            current = self.rounds.round_for(rank, header.round, header.step)
            if header.weight != 1.0:
                current.weigh(rank, header.weight, rows is not None)
                if rows is not None:
                    rows = Rows(rows.numbers, self._weighted(rows.elements, header.weight))
        push = current.sum.pushes.setdefault(rank, _Push(frames, workers))
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

    def _weighted(self, elements: np.ndarray, weight: float) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            weighted: np.ndarray = np.multiply(elements, weight, dtype=self.plan.sum_dtype)
        return weighted

    def _has_begun_sum(self, rank: int, round: int) -> bool:
        """Whether some of a host's sum has come that a worker sends for an open round."""
        current = self.rounds.open.get(round)
        return current is not None and rank in current.sum.pushes

    def _add(self, current: Round[RowsSum], rank: int, push: _Push, rows: Rows) -> None:
        check_numbers(rows.numbers, push.next_row, self.rows)
        if len(rows.numbers):
            push.next_row = int(rows.numbers[-1]) + 1
        current.sum.empty = False
        if current.number == INITIAL_ROUND:
            if not len(self.value):
                self._allocate()
            self.value[index_of(rows.numbers)] = rows.elements
            return
        if self.plan.state.checks_finite:
            # Of a sum it is no single worker's: they have checked their gradients.
            check_sum(rows.elements, self.name, current.number, None if push.workers else rank)
        current.sum.add(rank, rows)

    def _allocate(self) -> None:
        """Pages that nobody touches take no memory."""
        self.value = np.zeros((self.rows, self.row_elems), self.plan.dtype)
        self._changed_in = np.zeros(self.rows, np.int64)

    def not_made(self, numbers: np.ndarray) -> np.ndarray:
        """Those of these rows that are still to be made from a seed."""
        return numbers[:0] if self._made is None else numbers[~self._made[numbers]]

    def initial(self, numbers: np.ndarray) -> np.ndarray:
        """Make the initial rows with these numbers from their seed; from any thread."""
        initial = self.declared.initial
        if initial is None or not initial.std:
            return np.zeros((len(numbers), self.row_elems), self.value.dtype)
        of_table = numbers + np.int64(self.plan.first_elem // self.row_elems)
        rows = seeded_rows(of_table, self.row_elems, initial.seed, initial.std, initial.uniform)
        rows[of_table == initial.zero_row] = 0
        return rows

    def _make(self, numbers: np.ndarray) -> None:
        """Make those of these rows that are made from a seed and have not been needed yet."""
        new = self.not_made(numbers)
        if self._made is not None and len(new):
            self.value[new] = self.initial(new)
            self._made[new] = True  # after their values: snapshots read both

    def snapshot(self, arrays: Sequence[np.ndarray]) -> RowsSnapshot:
        """What the rows, and arrays of their optimizer's state, are now."""
        snapshot = RowsSnapshot(self, arrays)
        self._snapshots.add(snapshot)
        return snapshot

    def _keep(self, numbers: Optional[np.ndarray]) -> None:
        """Have snapshots keep these rows, or all, before they change."""
        for snapshot in list(self._snapshots):
            snapshot.keep(numbers)

    # Rounds.

    def total(self, current: Round[RowsSum]) -> Optional[np.ndarray]:
        if current.sum.empty:
            return None
        elements: np.ndarray = current.sum.total().elements.reshape(-1)
        return elements

    def end(self, current: Round[RowsSum]) -> Sequence[Round[RowsSum]]:
        self._begin_changes()
        if current.sum.empty:
            self._scale(current, None)
        elif current.number > INITIAL_ROUND:
            self._update(current, self.rows, ends=True)
        self.rounds.end(current, not current.sum.empty)
        return (current,)

    def update_in_advance(self) -> None:
        """Update rows for the next round before it ends, where that pays. To be called after
        pushes, when there is nothing else to do.

        Rows arrive in ascending order, and an optimizer that changes touched rows only may have
        them one part after the other. So little is left to do when the last ones have come.
        """
        rounds, optimizer = self.rounds, self.plan.optimizer
        following = rounds.open.get(self.round + 1)
        if (
            optimizer is None
            or following is None
            or following.sum.empty
            or self.round < INITIAL_ROUND
            or self.plan.own_rounds
            or self.plan.state.has_clipped
            or following.sum.waiting_bytes < _PART_BYTES
        ):
            return
        pushes = following.sum.pushes
        under_way = {rank: push for rank, push in pushes.items() if push.missing}
        if following.in_sums != sum(push.workers for push in under_way.values()):
            return
        if not all(rank in under_way for rank in rounds.missing(following)):
            return
        end = min((push.next_row for push in under_way.values()), default=self.rows)
        if (end - following.sum.updated_rows) * _PARTS < self.rows:
            return
        if optimizer.updates_touched_rows(self.declared, rounds.settings_step(following)):
            self._begin_changes()
            self._update(following, end, ends=False)

    def _update(self, current: Round[RowsSum], end: int, ends: bool) -> None:
        """Have a round's sum of rows before `end` change the value."""
        numbers, elements = current.sum.take(end)
        if ends and not self._scale(current, elements):
            return
        self._make(numbers)
        checks_finite = self.plan.state.checks_finite
        if checks_finite:
            check_sum(elements, self.name, current.number)
        current.sum.updated_rows = end
        optimizer, step = self.plan.optimizer, self.rounds.settings_step(current)
        if optimizer is None:
            before, self._summed = self._summed, numbers
            self._keep(before)
            self._keep(numbers)
            self.value[slice(None) if before is None else index_of(before)] = 0
            self._note_changes(before)
            with np.errstate(over="ignore"):
                self.value[index_of(numbers)] = elements
            if checks_finite and self.value.dtype != elements.dtype:
                check_sum(self.value[numbers], self.name, current.number)
        else:
            all_may_change = optimizer.changes_all_rows(self.declared, step)
            self._keep(None if all_may_change else numbers)
            optimizer.update_rows(self.declared, self.value, numbers, elements, step, ends)
            if all_may_change:
                self._note_changes(None)
        self._note_changes(numbers)

    def _scale(self, current: Round[RowsSum], total: Optional[np.ndarray]) -> bool:
        """Scale a held round's sum; return whether it may change the value."""
        clipped = self.plan.state.clipped
        return not current.is_counted or clipped.scale(current.step, self.size_elems, total, total)

    def _begin_changes(self) -> None:
        """To be called before the next round changes the value."""
        for rows in self._sent:
            rows.keep()
        self._sent, self._sent_since = [], {}
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
            SentRows(self, numbers[piece], exact, piece.start if named else None)
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

    # The optimizer's state, for whoever saves it.

    def copied_state(self, optimizer: Optimizer, whole: bool) -> Optional[State]:
        """Copy what an optimizer remembers of the run, with flat arrays; None if nothing."""
        state = optimizer.copied(self.declared, WHOLE)
        if state is None:
            return None
        return state if whole else State(_reshaped(state.elements, (-1,)), state.numbers)

    def replace_state(self, optimizer: Optimizer, state: Optional[State], whole: bool) -> None:
        """Replace the optimizer's state of the run; ProtocolError unless it has a number for each
        element."""
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
