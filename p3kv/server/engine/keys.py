"""A server's part of a key: its slices, which are cut anew when their size changes, or its rows."""

from __future__ import annotations

from itertools import repeat
from typing import Any, Collection, Dict, Iterable, Iterator, Mapping, Optional, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.rounds import Record, Round
from p3kv.server.engine.rows import ServerRows
from p3kv.server.engine.slices import BucketSlice, ServerSlice
from p3kv.server.engine.state import KeyPlan
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey
from p3kv.wire.slice_sizes import SliceSizesByRound


class ServerKey:
    """A key's records on one server: slices, or one for all rows, which are never cut.

    When a new slice size is announced from a round on, there are slices of both generations. Those
    of the next generation have no value until the current generation has ended its last round and
    is re-sliced.
    """

    def __init__(self, plan: KeyPlan, sizes: SliceSizesByRound) -> None:
        """Raises ProtocolError for a key that would have too many slices."""
        self.plan = plan
        self.declared = plan.declared
        self._all_sizes = sizes
        one_size = plan.own_rounds or plan.layout.touched_only
        self._sizes = sizes.first_only() if one_size else sizes
        self.generation = 0
        """The generation whose records have the values."""
        self._records: Dict[int, Dict[int, Record[Any]]] = {}
        """By generation and index."""
        self._ended: Dict[Tuple[int, int], int] = {}
        """By round and owner, how many slices have ended it, while others have not."""
        self.check_slices(sizes.smallest_slice_size)

    def check_slices(self, slice_size: int) -> None:
        """Raise ProtocolError if the key would have too many slices of this size."""
        if not self.plan.layout.touched_only:
            self.plan.layout.check_slices(self.declared.runs, slice_size)

    def slice_at(self, round: int, index: int, rank: int) -> ServerSlice:
        """The slice of a worker's push; ProtocolError if it is not here, or too far ahead."""
        generation = self._sizes.generation(round)
        slices = self._records.get(generation)
        if slices is None and generation >= self.generation:
            slices = self._records_in(generation)
        slice_ = slices.get(index) if slices is not None else None
        if not isinstance(slice_, ServerSlice):
            raise ProtocolError(
                f"{self.plan.called} has no slice {index} for round {round} on this server"
            )
        # Who is in the next round that workers share is not too far ahead.
        if round != slice_.rounds.round + 1 or self.plan.own_rounds:
            self._check_ahead(slice_, round, rank)
        return slice_

    def check_ahead(self, round: int, rank: int) -> None:
        """Raise ProtocolError for a round that no worker can pull, since none is so far ahead."""
        for record in self.records(round):
            self._check_ahead(record, round, rank)

    def records(self, round: int) -> Collection[Record[Any]]:
        """The records that end a round, or have ended it, and answer pulls for it."""
        return self._records_at(round).values()

    def _records_at(self, round: int) -> Dict[int, Record[Any]]:
        return self._records_in(max(self.generation, self._sizes.generation(round)))

    @property
    def all_records(self) -> Iterator[Record[Any]]:
        """What ends rounds by itself: records of all generations, also announced ones."""
        return (record for records in self._records.values() for record in records.values())

    @property
    def rows(self) -> ServerRows:
        """The record of a key of rows."""
        (record,) = self._records_in(self.generation).values()
        assert isinstance(record, ServerRows)
        return record

    @property
    def bucket(self) -> Optional[BucketSlice]:
        """The slice of a bucket; None of any other key."""
        if not self.declared.members:
            return None
        (slice_,) = self._records_in(self.generation).values()
        assert isinstance(slice_, BucketSlice)
        return slice_

    def all_ended(self, current: Round[Any]) -> bool:
        """Count a record that has ended a round; return True for the key's last one."""
        ended = (current.number, current.owner)
        count = self._ended.pop(ended, 0) + 1
        if count == len(self._records_in(self.generation)):
            return True
        self._ended[ended] = count
        return False

    def has_ended(self, round: int) -> bool:
        """Whether all records have ended the same round, this one or a later one."""
        rounds = {record.round for record in self._records_in(self.generation).values()}
        return len(rounds) == 1 and rounds.pop() >= round

    def reslice(self) -> Iterable[ServerSlice]:
        """Re-slice values and states, once all slices have ended their generation; no number
        changes. Return the new slices, whose complete rounds the caller is to end."""
        if self.generation >= self._sizes.last_generation:
            return ()
        last_round = self._sizes.last_round(self.generation)
        before = _slices(self._records_in(self.generation))
        if any(slice_.round < last_round for slice_ in before.values()):
            return ()
        del self._records[self.generation]
        self.generation += 1
        after = _slices(self._records_in(self.generation))
        if self.declared.members:
            for old, new in zip(before.values(), after.values()):
                assert isinstance(old, BucketSlice) and isinstance(new, BucketSlice)
                new.begin_as(old, int(last_round))
                old.forget()
            return after.values()
        values = np.concatenate([slice_.known_value().array for slice_ in before.values()])
        for slice_ in after.values():
            slice_.begin_at(int(last_round), values[slice_.offset : slice_.offset + slice_.length])
        self._pass_kept(before.values(), after.values())
        self._pass_states_before(int(last_round), before.values(), after.values())
        for slice_ in before.values():
            slice_.known_value().retire()
            slice_.forget()
        # No slice has the old lengths again.
        self.plan.state.pool.clear()
        if self.plan.optimizer is not None:
            _reslice_states(self.plan.optimizer, self.declared, before, after)
        return after.values()

    @staticmethod
    def _pass_kept(before: Iterable[ServerSlice], after: Iterable[ServerSlice]) -> None:
        kept = [slice_.kept for slice_ in before]
        first, totals = kept[0], [one.total.array for one in kept if one and one.total]
        if first is None:
            return
        joined = np.concatenate(totals) if totals else None
        for slice_ in after:
            total = None
            if joined is not None:
                total = slice_.plan.state.pool.get(slice_.length, joined.dtype)
                total.array[:] = joined[slice_.offset :][: slice_.length]
            slice_.kept = first._replace(total=total)

    def _pass_states_before(
        self, round: int, before: Collection[ServerSlice], after: Collection[ServerSlice]
    ) -> None:
        """Have slices of another size know the state before the round that has ended."""
        optimizer = self.plan.optimizer
        if optimizer is None or not self.declared.keeps_means:
            return
        if optimizer.whole_tensors:
            next(iter(after)).before = next(iter(before)).before
            return
        copied = [one.copied_state(optimizer, one.index, round) for one in before]
        states = [state for state in copied if state is not None]
        parts = State.joined(states).cut([one.length for one in after]) if states else repeat(None)
        for slice_, part in zip(after, parts):
            slice_.before.keep(round, slice_.index, part)

    def has_mean(self, round: int) -> bool:
        """Whether the mean gradient of a round is there, as `ServerSlice.mean_of`."""
        if not self.declared.keeps_means:
            raise ProtocolError(f"it asked for a mean of {self.plan.called}, which keeps none")
        slices = _slices(self._records_at(round)).values()
        return all(slice_.mean_of(round) is not None for slice_ in slices)

    def copied_mean(self, round: int) -> Tuple[Optional[np.ndarray], int]:
        """Copy a round's mean gradient, None where no worker had one, and tell which tensors of a
        bucket lack theirs, a bit for each."""
        kept = [slice_.mean_of(round) for slice_ in _slices(self._records_at(round)).values()]
        found = [one for one in kept if one is not None]
        means = [one.total.array / one.divisor for one in found if one.total is not None]
        return np.concatenate(means) if means else None, found[0].lacking

    def forget(self) -> None:
        """Nobody needs the key any more. Records and rounds refer to each other and are collected
        late, so what is large goes now: values, and the optimizer with its states."""
        self.plan.optimizer = None
        for records in self._records.values():
            for record in records.values():
                record.forget()
        self._records.clear()

    # The optimizer's state, for whoever saves it: to be called between two updates of all.

    def copied_state(
        self, optimizer: Optimizer, whole: bool, member: int = 0, before: Optional[int] = None
    ) -> Optional[State]:
        """Copy the optimizer's state of this server's part of the key, or None. `whole`: of the
        tensor, not of slices; `member`: of this tensor of a bucket, from 1; `before`: as it was
        before this round, the last one of a key that keeps means."""
        if before is not None and not self.declared.keeps_means:
            raise ProtocolError(f"it asked for a state of {self.plan.called} before a round")
        if self.plan.layout.touched_only:
            return self.rows.copied_state(optimizer, whole)
        if self.bucket is not None:
            return self.bucket.copied_states(optimizer, before)[member - 1]
        slices = _slices(self._records_in(self.generation)).values()
        if whole:
            copied = [next(iter(slices)).copied_state(optimizer, WHOLE, before)]
        else:
            copied = [one.copied_state(optimizer, one.index, before) for one in slices]
        states = [state for state in copied if state is not None]
        if not states:
            return None
        assert len(states) == len(copied), "slices that have ended the same rounds"
        return states[0] if whole else State.joined(states)

    def replace_state(
        self, optimizer: Optimizer, state: Optional[State], whole: bool, member: int = 0
    ) -> None:
        """Replace the optimizer's state of this server's part of the key, as `copied_state`.
        ProtocolError for one that does not have a number for each element, or of a whole tensor
        that is not here."""
        if self.plan.layout.touched_only:
            self.rows.replace_state(optimizer, state, whole)
            return
        if self.bucket is not None:
            self.bucket.replace_state(optimizer, member - 1, state)
            return
        if whole:
            if len(self.declared.runs) > 1:
                raise ProtocolError(
                    "it sent a whole tensor's state for "
                    f"{self.plan.called}, which is on several servers"
                )
            optimizer.export(self.declared, WHOLE)
            if state is not None:
                optimizer.load(self.declared, WHOLE, state)
            return
        slices = _slices(self._records_in(self.generation))
        lengths = [one.length for one in slices.values()]
        for name, array in ({} if state is None else state.elements).items():
            if array.shape != (sum(lengths),):
                raise ProtocolError(
                    f"it sent the array {name!r} of shape {array.shape} for a state of "
                    f"{sum(lengths)} elements of {self.plan.called}"
                )
        for index in slices:
            optimizer.export(self.declared, index)
        if state is not None:
            for index, part in zip(slices, state.cut(lengths)):
                optimizer.load(self.declared, index, part)

    def _check_ahead(self, record: Record[Any], round: int, rank: int) -> None:
        ended: float = INITIAL_ROUND
        if record.round < INITIAL_ROUND < record.first_round:
            # It has no value until the current generation has ended its last round.
            ended = self._sizes.last_round(self.generation)
        record.rounds.check_ahead(rank, round, ended)

    def _records_in(self, generation: int) -> Dict[int, Record[Any]]:
        """The records of a generation by index, in the order of their elements."""
        records = self._records.get(generation)
        if records is None:
            records = self._records[generation] = self._new_records(generation)
        return records

    def _new_records(self, generation: int) -> Dict[int, Record[Any]]:
        plan = self.plan
        if plan.layout.touched_only:
            return {0: ServerRows(plan, self._all_sizes)}
        first_round = self._sizes.first_round(generation)
        if self.declared.members:
            return {0: BucketSlice(plan, first_round)}
        pieces = plan.layout.slices(self.declared.runs, self._sizes.of(generation).slice_size)
        own = [piece for piece in pieces if piece.server == plan.state.rank]
        slices = [
            ServerSlice(plan, one.index, one.length, one.offset - own[0].offset, first_round)
            for one in own
        ]
        for slice_ in slices:
            slice_.of_key = slices
        return {slice_.index: slice_ for slice_ in slices}


def _slices(records: Mapping[int, Record[Any]]) -> Dict[int, ServerSlice]:
    return {index: one for index, one in records.items() if isinstance(one, ServerSlice)}


def _reslice_states(
    optimizer: Optimizer,
    declared: DeclaredKey,
    before: Iterable[int],
    after: Mapping[int, ServerSlice],
) -> None:
    # A whole tensor's state stays as it is: slices have none then.
    exported = [optimizer.export(declared, index) for index in before]
    states = [state for state in exported if state is not None]
    if states:
        assert len(states) == len(exported), "slices that have ended the same rounds"
        lengths = [slice_.length for slice_ in after.values()]
        for index, state in zip(after, State.joined(states).cut(lengths)):
            optimizer.load(declared, index, state)
