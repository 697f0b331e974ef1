"""A server's part of a key: its slices, which it cuts anew when their size changes."""

from __future__ import annotations

from typing import Collection, Dict, Iterable, Iterator, Mapping, Optional, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.slices import BucketSlice, ServerSlice
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import UNKNOWN, DeclaredKey
from p3kv.wire.slice_sizes import SliceSizesByRound


class ServerKey:
    """A key's slices on one server.

    When a new slice size is announced from a round on, there are slices of both generations. Those
    of the next generation have no value until the current generation has ended its last round and
    is re-sliced.
    """

    def __init__(self, plan: KeyPlan, sizes: SliceSizesByRound) -> None:
        self.plan = plan
        self.declared = plan.declared
        self._sizes = sizes.first_only() if plan.consistency.own_rounds else sizes
        self._generation = 0
        """The generation whose slices have the values."""
        self._slices: Dict[int, Dict[int, ServerSlice]] = {}
        self._ended: Dict[Tuple[int, int], int] = {}
        """By round, how many slices have ended it, while others have not. With the rank whose own
        round it is, or UNKNOWN."""

    def check_slices(self, slice_size: int) -> None:
        """Raises ProtocolError if the key would have too many slices of this size."""
        self.plan.layout.check_slices(self.declared.runs, slice_size)

    def slice_at(self, round: int, index: int, rank: int) -> ServerSlice:
        """The slice that a worker's push for a round is for.

        ProtocolError if this server does not have it, or if no worker can be so far ahead.
        """
        generation = self._sizes.generation(round)
        slices = self._slices.get(generation)
        if slices is None and generation >= self._generation:
            slices = self._slices_in(generation)
        slice_ = slices.get(index) if slices is not None else None
        if slice_ is None:
            raise ProtocolError(
                f"{self.plan.called} has no slice {index} for round {round} on this server"
            )
        # Who is in the next round that workers share is not too far ahead.
        if round != slice_.ledger.round + 1 or self.plan.consistency.own_rounds:
            self._check_ahead(slice_, round, rank)
        return slice_

    def check_ahead(self, round: int, rank: int) -> None:
        """Raises ProtocolError for a round that no worker can pull, since none is so far ahead."""
        for slice_ in self.slices(round):
            self._check_ahead(slice_, round, rank)

    def slices(self, round: int) -> Collection[ServerSlice]:
        """The slices that end a round, or have ended it already, or a later one; they answer pulls
        for it."""
        return self._slices_in(max(self._generation, self._sizes.generation(round))).values()

    @property
    def units(self) -> Iterator[ServerSlice]:
        """Units that end rounds by themselves: slices of all generations, also announced ones."""
        return (slice_ for slices in self._slices.values() for slice_ in slices.values())

    def all_ended(self, round: int, rank: int) -> bool:
        """Counts a slice that has ended a round; True for the key's last slice.

        `rank` is that of a worker to be told, whose round it is where rounds are each worker's own.
        """
        ended = (round, rank if self.plan.consistency.own_rounds else UNKNOWN)
        count = self._ended.pop(ended, 0) + 1
        if count == len(self._slices_in(self._generation)):
            return True
        self._ended[ended] = count
        return False

    def reslice(self) -> Iterable[ServerSlice]:
        """Re-slices the key, if all its slices have ended the last round of their generation.

        Joins values and optimizer states and cuts them anew; no number changes. Returns the new
        slices, whose complete rounds the caller is to end; nothing if it is too early.
        """
        if self._generation >= self._sizes.last_generation:
            return ()
        last_round = self._sizes.last_round(self._generation)
        before = self._slices_in(self._generation)
        if any(slice_.round < last_round for slice_ in before.values()):
            return ()
        del self._slices[self._generation]
        self._generation += 1
        after = self._slices_in(self._generation)
        if self.bucket is not None:
            for old, new in zip(before.values(), after.values()):
                assert isinstance(old, BucketSlice) and isinstance(new, BucketSlice)
                new.begin_as(old, int(last_round))
                old.value = None
            return after.values()
        values = np.concatenate([slice_.known_value().array for slice_ in before.values()])
        for slice_ in after.values():
            slice_.begin_at(int(last_round), values[slice_.offset : slice_.offset + slice_.length])
        for slice_ in before.values():
            slice_.known_value().retire()
            # The slices refer to each other, and would keep the memory for a while.
            slice_.value = None
        # No slice has the old lengths again.
        self.plan.rules.pool.clear()
        if self.plan.optimizer is not None:
            _reslice_states(self.plan.optimizer, self.declared, before, after)
        return after.values()

    def forget(self) -> None:
        """Nobody needs the key any more."""
        for slices in self._slices.values():
            for slice_ in slices.values():
                slice_.value = None
            # They refer to each other, and would keep their memory for a while.
            slices.clear()
        self._slices.clear()

    def has_ended(self, round: int) -> bool:
        """Whether all slices have ended the same round, this one or a later one."""
        rounds = {slice_.round for slice_ in self._slices_in(self._generation).values()}
        return len(rounds) == 1 and rounds.pop() >= round

    @property
    def bucket(self) -> Optional[BucketSlice]:
        """The slice of a bucket; None of any other key."""
        if not self.declared.members:
            return None
        (slice_,) = self._slices_in(self._generation).values()
        assert isinstance(slice_, BucketSlice)
        return slice_

    def copied_state(self, optimizer: Optimizer, whole: bool) -> Optional[State]:
        """Copies what an optimizer remembers of this server's part of the key; None if nothing.

        Call it between two updates of the whole key. `whole`: of the whole tensor, not of slices.
        """
        indices = [WHOLE] if whole else list(self._slices_in(self._generation))
        copied = [optimizer.copied(self.declared, index) for index in indices]
        states = [state for state in copied if state is not None]
        if not states:
            return None
        assert len(states) == len(copied), "slices that have ended the same rounds"
        return states[0] if whole else State.joined(states)

    def replace_state(self, optimizer: Optimizer, state: Optional[State], whole: bool) -> None:
        """Gives an optimizer another state of all that this server keeps of the key, or none.

        Call it between two updates of the whole key. `whole`: of the whole tensor, not of slices.
        Raises ProtocolError for a state of slices that does not have one number for each element,
        and for that of a whole tensor which this server does not have.
        """
        slices = self._slices_in(self._generation)
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

    def _check_ahead(self, slice_: ServerSlice, round: int, rank: int) -> None:
        ended: float = INITIAL_ROUND
        if slice_.round < INITIAL_ROUND < slice_.first_round:
            # It has no value until the current generation has ended its last round.
            ended = self._sizes.last_round(self._generation)
        slice_.ledger.check_ahead(rank, round, ended)

    def _slices_in(self, generation: int) -> Dict[int, ServerSlice]:
        """The slices of a generation by index, in the order of their elements."""
        slices = self._slices.get(generation)
        if slices is None:
            runs = self.declared.runs
            pieces = self.plan.layout.slices(runs, self._sizes.of(generation).slice_size)
            own = [piece for piece in pieces if piece.server == self.plan.rules.rank]
            first_round = self._sizes.first_round(generation)
            slices = self._slices[generation] = {
                piece.index: BucketSlice(self.plan, first_round)
                if self.declared.members
                else ServerSlice(
                    self.plan, piece.index, piece.length, piece.offset - own[0].offset, first_round
                )
                for piece in own
            }
            for slice_ in slices.values():
                slice_.of_key = slices
        return slices


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
