"""Copies of keys at a checkpoint; where rounds are each worker's own, all workers come to the same
round first."""

from __future__ import annotations

from collections import deque
from itertools import zip_longest
from typing import Any, Deque, Dict, Iterable, Iterator, List, Mapping, Optional, Set, Tuple

import numpy as np
from msgspec.structs import replace

from p3kv.checkpoints import CutOfKey, KeyOutline
from p3kv.errors import ProtocolError
from p3kv.server.engine import (
    BucketSlice,
    OwnRounds,
    Record,
    RowsSnapshot,
    ServerKey,
    ServerRows,
    ServerSlice,
)
from p3kv.server.optimizer import WHOLE, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import CutReached, DeclaredKey


class KeyCut:
    """A key in a round on this server. Belongs to the server's thread."""

    def __init__(self, declared: DeclaredKey, round: int, whole: bool, records: int) -> None:
        """`whole`: the optimizer needs whole tensors. `records`: how many are to be copied."""
        self.declared = declared
        self.round = round
        self.missing = records
        self._whole = whole
        self._values: Dict[int, np.ndarray] = {}
        self._states: Dict[int, State] = {}
        self._rows: Optional[RowsSnapshot] = None
        """Of a key of rows: in place of its value, and of the state's arrays unless they are a
        whole tensor's."""
        self._of_members: List[Optional[State]] = []

    def copy(self, record: Record[Any]) -> None:
        """Keeps copies of a record's value and state, when it has ended the round and no later
        one."""
        optimizer, state = record.plan.optimizer, None
        if isinstance(record, ServerRows):
            if optimizer is not None and self._whole:
                state = optimizer.copied(record.declared, WHOLE)
            elif optimizer is not None:
                state = optimizer.seen(record.declared, WHOLE)
            arrays = () if state is None or self._whole else tuple(state.elements.values())
            self._rows = record.snapshot(arrays)
            self._add(0, np.empty(0), state)
        elif isinstance(record, BucketSlice):
            if optimizer is not None:
                self._of_members = record.copied_states(optimizer)
            self._add(0, record.known_value().array.copy(), None)
        elif isinstance(record, ServerSlice):
            # That of a whole tensor is the same for all slices: they have ended the round together.
            if optimizer is not None and (not self._whole or record.offset == 0):
                index = WHOLE if self._whole else record.index
                state = optimizer.copied(record.plan.declared, index)
            self._add(record.offset, record.known_value().array.copy(), state)

    @property
    def complete(self) -> List[CutOfKey]:
        """All of it, once nothing is missing; of a bucket each tensor, which may be in another when
        the job goes on."""
        key = self.declared
        if not key.members:
            states = [self._states[offset] for offset in sorted(self._states)]
            return [self._cut(key, [self._values[at] for at in sorted(self._values)], states)]
        ((server, _),) = key.runs
        found, start = [], 0
        for member, state in zip_longest(key.members, self._of_members):
            elems = member.size_elems
            of_member = replace(
                key, key=member.key, name=member.name, shape=member.shape, layout="dense",
                runs=[(server, elems)] if elems else [], members=[],
            )  # fmt: skip
            value = self._values[0][start : start + elems]
            found.append(self._cut(of_member, [value], [] if state is None else [state]))
            start += elems
        return found

    def _cut(self, key: DeclaredKey, values: List[np.ndarray], states: List[State]) -> CutOfKey:
        first = states[0] if states else State({}, {})
        arrays: List[Any] = [[one.elements[name] for one in states] for name in first.elements]
        outline = KeyOutline(
            key.store, key.key, key.name, key.shape, key.dtype, key.layout, key.runs, self._whole,
            first.numbers if states else None,
            [
                (name, array.dtype.name, list(array.shape) if self._whole else [_elems(parts)])
                for (name, array), parts in zip(first.elements.items(), arrays)
            ],
        )  # fmt: skip
        if self._rows is None:
            return CutOfKey(outline, values, arrays)
        if not self._whole:
            arrays = [self._rows.parts(place) for place in range(1, 1 + len(arrays))]
        return CutOfKey(outline, self._rows.parts(0), arrays)

    def _add(self, offset: int, value: np.ndarray, state: Optional[State]) -> None:
        self._values[offset] = value
        if state is not None:
            self._states[offset] = state
        self.missing -= 1


def _elems(parts: Iterable[np.ndarray]) -> int:
    return sum(part.size for part in parts)


class _Reached:
    """A checkpoint that some workers have reached."""

    def __init__(self) -> None:
        self.ranks: Set[int] = set()
        """Those of the workers that have said so."""
        self.cuts: Dict[int, KeyCut] = {}
        """By the key's id."""
        self.waiting = 0
        """How many records are to be copied."""
        self.is_taken = False
        """Whether worker rank 0 has said whether it is written."""
        self.is_dropped = False

    def drop(self) -> None:
        """No copies are needed."""
        self.is_taken = self.is_dropped = True
        self.cuts.clear()


class OwnCuts:
    """Copies each record when all workers have pushed what belongs to a checkpoint, and none has
    pushed more.

    Each worker says that it has reached a checkpoint, and how often it has pushed each key, before
    it pushes anything later. From the first one's word on, no record ends a later round of any
    worker before it has ended these of all workers, and is copied. So a worker that is ahead waits
    there for the slowest, as far as its own window goes. Belongs to the server's thread.
    """

    def __init__(self, keys: Mapping[int, ServerKey], num_workers: int, left: Set[int]) -> None:
        """`left`: the ranks of workers that have left, and for which nobody waits."""
        self._keys = keys
        self._num_workers = num_workers
        self._left = left
        self._reached: Dict[int, _Reached] = {}
        """By step."""
        self.waiting: Dict[Record[Any], Deque[Tuple[int, KeyCut]]] = {}
        """Records that are to be copied, and the checkpoints' steps, in their order."""

    def reach(self, rank: int, said: CutReached) -> List[KeyCut]:
        """A worker has reached a checkpoint; return the keys of which anything is copied.
        ProtocolError where it has pushed other rounds than another."""
        cut = self._reached.get(said.step)
        if cut is None:
            if 0 in self._left:
                return []  # nobody asks for it
            cut = self._reached[said.step] = _Reached()
        for store in said.stores:
            for key_id, round_ in store.rounds:
                of_key = cut.cuts.get(key_id)
                if of_key is None:
                    if key_id in self._keys and not cut.is_taken:
                        self._add(cut, said.step, key_id, round_, store.whole)
                elif of_key.round != round_:
                    raise ProtocolError(
                        f"it has pushed {self._keys[key_id].plan.called} {round_} times before "
                        f"step {said.step}, of which there is a checkpoint, and another worker "
                        f"{of_key.round} times"
                    )
        cut.ranks.add(rank)
        records = [one for id_ in cut.cuts for one in self._keys[id_].records(INITIAL_ROUND)]
        copied = self._copy(records)
        self._forget()
        return copied

    def drop(self, step: int) -> None:
        """No checkpoint is written of a step. ProtocolError if no worker has reached it."""
        self._found(step).drop()
        self._forget()

    def take(self, step: int) -> Dict[int, KeyCut]:
        """The keys of a checkpoint that is to be written, by id; what is missing is still copied.
        ProtocolError if no worker has reached it."""
        cut = self._found(step)
        cut.is_taken = True
        cuts = dict(cut.cuts)
        self._forget()
        return cuts

    def record_ended(self, record: Record[Any]) -> List[KeyCut]:
        """Copy a record that has just ended a round, for checkpoints that wait for it; return its
        keys. Call it before the record ends its next round."""
        return self._copy([record])

    def left(self) -> Iterator[Tuple[KeyCut, Record[Any]]]:
        """A worker has left: copy what waited for it; yield each key and record that may go on."""
        if 0 in self._left:
            for cut in self._reached.values():
                if not cut.is_taken:
                    cut.drop()
        for record in list(self.waiting):
            for of_key in self._copy([record]):
                yield of_key, record
        self._forget()

    def _found(self, step: int) -> _Reached:
        cut = self._reached.get(step)
        if cut is None:
            raise ProtocolError(f"it has not reached step {step}, of which it wants a checkpoint")
        return cut

    def _add(self, cut: _Reached, step: int, key_id: int, round_: int, whole: bool) -> None:
        key = self._keys[key_id]
        if not key.plan.own_rounds:
            raise ProtocolError(f"it has own rounds of {key.plan.called}, which are shared")
        records = key.records(INITIAL_ROUND)  # their slices have the job's first size
        for record in records:
            later = any(other > step for other, _ in self.waiting.get(record, ()))
            ranks = range(self._num_workers)
            if later or any(_rounds(record).last_of(rank) > round_ for rank in ranks):
                raise ProtocolError(
                    f"it has pushed {key.plan.called} {round_} times before step {step}, of which "
                    "there is a checkpoint, and a worker has pushed more"
                )
        of_key = cut.cuts[key_id] = KeyCut(key.declared, round_, whole, len(records))
        cut.waiting += len(records)
        for record in records:
            _rounds(record).barriers.append(round_)
            self.waiting.setdefault(record, deque()).append((step, of_key))

    def _copy(self, records: List[Record[Any]]) -> List[KeyCut]:
        copied = []
        for record in records:
            waiting, rounds = self.waiting.get(record), _rounds(record)
            while waiting and rounds.at_barrier:
                step, of_key = waiting.popleft()
                rounds.barriers.popleft()
                cut = self._reached[step]
                cut.waiting -= 1
                if not cut.is_dropped:
                    of_key.copy(record)
                copied.append(of_key)
                if not waiting:
                    del self.waiting[record]
        return copied

    def _forget(self) -> None:
        """Forget checkpoints that are taken and complete, when no worker is still to reach them."""
        for step, cut in list(self._reached.items()):
            there = len(cut.ranks | self._left) == self._num_workers
            if there and cut.is_taken and not cut.waiting:
                del self._reached[step]


def _rounds(record: Record[Any]) -> OwnRounds[Any]:
    assert isinstance(record.rounds, OwnRounds)
    return record.rounds
