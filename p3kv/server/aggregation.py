"""Sums the workers' slices by round, and makes the values.

Nothing here knows of sockets: pushes go in, values to send come out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Dict, Iterator, List, Optional, Set, Tuple

import numpy as np

from p3kv.codecs import KeyCodecs
from p3kv.consistency import Consistency
from p3kv.errors import ProtocolError
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.server.optimizer import Optimizer
from p3kv.wire.header import ENCODED, INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, called

_BYTE = np.dtype(np.uint8)


@dataclass
class Round:
    """What has arrived of one slice in one round."""

    early: bool
    """Whether a worker that has pushed for it may go on with an older value."""
    arrived: Set[int] = field(default_factory=set)
    wanting: List[int] = field(default_factory=list)
    """Ranks that asked for a result with their push, and have not been sent any."""
    others: List[int] = field(default_factory=list)
    """Ranks that want to know that the round has ended, and whose results do not tell them."""
    total: Optional[Buffer] = None
    by_rank: Dict[int, Buffer] = field(default_factory=dict)
    """The pushes, kept until all have arrived; only in deterministic mode."""
    step: int = 0
    """The step in which worker rank 0 pushed; until it has, that of the first push."""
    priority: int = 0
    since_s: float = field(default_factory=time.monotonic)
    """When the first push arrived, on the monotonic clock."""


@dataclass
class Result:
    """A slice's value for workers that have pushed for a round."""

    value: Buffer
    """The round's value, or an older one with which they may go on."""
    round: int
    step: int
    priority: int
    wanting: List[int]
    others: List[int]


class SliceState:
    """One slice on its server: its value, and the rounds that are not complete yet."""

    def __init__(
        self,
        key: DeclaredKey,
        index: int,
        length: int,
        codecs: KeyCodecs,
        offset: int = 0,
        first_round: int = INITIAL_ROUND,
    ) -> None:
        self.key = key
        self.index = index
        self.length = length
        self.codecs = codecs
        """The key's codecs, for all its slices."""
        self.offset = offset
        """The slice's first element among those that this server keeps of the key."""
        self.first_round = first_round
        """The first round that has slices of this size."""
        self.dtype = np.dtype(key.dtype)
        self.value: Optional[Buffer] = None
        self.round = INITIAL_ROUND - 1
        """The last round whose result the value is."""
        self.open_rounds: Dict[int, Round] = {}
        self._wire: Optional[Tuple[Buffer, memoryview]] = None
        """The value as its codec has encoded it."""
        self.early_rounds: Set[int] = set()
        """Open rounds of which somebody waits for a result, and an older value may do."""

    @property
    def called(self) -> str:
        """The key's name in messages to users."""
        return called(self.key.key, self.key.name)

    def wire(self, pool: BufferPool) -> Tuple[Buffer, memoryview, int]:
        """How the value travels: a buffer that stays until it is sent, its bytes, and flags.

        A value is encoded once, when the first worker wants it.
        """
        assert self.value is not None
        codec = self.codecs.values
        if codec.in_place or self.round == INITIAL_ROUND:
            return self.value, self.value.bytes, 0
        if self._wire is None:
            buffer = pool.get(codec.most_bytes(self.length), _BYTE)
            count = codec.encode(self.value.array, self.offset, buffer.bytes)
            self._wire = buffer, buffer.bytes[:count]
        return (*self._wire, ENCODED)

    def forget_wire(self) -> None:
        """To be called when the value changes."""
        if self._wire is not None:
            self._wire[0].retire()
            self._wire = None

    def name(self) -> str:
        """The slice's name in messages."""
        return f"{self.called}, slice {self.index}"


class Aggregator:
    """Adds pushes to their round's sum, and ends rounds in order.

    The consistency rule says when a round is complete; pushes are counted by rank. A push that
    arrives twice or after its round is an error and is never added twice. In deterministic mode
    pushes are added in rank order; otherwise in order of arrival, and the first push's buffer
    becomes the sum without a copy.
    """

    def __init__(
        self, consistency: Consistency, pool: BufferPool, deterministic: bool = False
    ) -> None:
        self.consistency = consistency
        self._pool = pool
        self.deterministic = deterministic
        self.optimizers: Dict[int, Optimizer] = {}
        """By the store's number. In a store without an optimizer, a round's sum is its value."""

    def push(
        self,
        state: SliceState,
        rank: int,
        round: int,
        gradient: Buffer,
        wants_result: bool,
        priority: int,
        step: int,
        encoded: Optional[memoryview] = None,
    ) -> None:
        """Adds a worker's slice, and owns `gradient` from now on; call `end_rounds` afterwards.

        `gradient` has the slice's elements, or the bytes `encoded` that its codec reads. Raises
        ProtocolError for a push that can't be right.
        """
        current = self._open_round(state, rank, round, step)
        current.arrived.add(rank)
        if wants_result:
            current.wanting.append(rank)
        if current.early or not wants_result:
            current.others.append(rank)
            if wants_result:
                state.early_rounds.add(round)
        if rank == 0:
            current.step = step
        current.priority = priority
        if encoded is None:
            self._add(current, rank, gradient)
        else:
            self._add_encoded(state, current, rank, encoded)
            gradient.retire()

    def end_rounds(self, state: SliceState) -> Iterator[Result]:
        """Ends the rounds of a slice that are complete, usually none or one.

        It ends the next round when the caller asks for the next result. By then the caller must
        have queued the result before: a value that no frame is being sent from is updated in place.
        """
        while self._complete(state):
            yield self._end_round(state)

    def early_results(self, state: SliceState) -> Iterator[Result]:
        """The value that a slice has already, for workers that may go on with it.

        Call it where a slice has `early_rounds`, when pushes have come and all complete rounds have
        ended.
        """
        for round_ in sorted(state.early_rounds):
            if self.is_new_enough(state, round_):
                assert state.value is not None
                state.early_rounds.remove(round_)
                current = state.open_rounds[round_]
                wanting, current.wanting = current.wanting, []
                yield Result(state.value, round_, current.step, current.priority, wanting, [])

    def is_new_enough(self, state: SliceState, round: int) -> bool:
        """Whether a slice's value lets a worker go on that has pushed for a round.

        Without an optimizer a value is the sum of one round's gradients, and no other round's will
        do.
        """
        has_optimizer = state.key.store in self.optimizers
        oldest = self.consistency.needs(round) if has_optimizer else round
        return state.value is not None and state.round >= oldest

    def missing(self, state: SliceState, round: int) -> List[int]:
        """Ranks whose push for an open round has not arrived."""
        if round == INITIAL_ROUND:
            return [0]
        return self.consistency.missing(state.open_rounds[round].arrived)

    def _open_round(self, state: SliceState, rank: int, round: int, step: int) -> Round:
        """The round that a worker's push is for; ProtocolError for one that can't be right."""
        if round == INITIAL_ROUND and rank != 0:
            raise ProtocolError(f"worker {rank} sent an initial value of {state.name()}")
        current = state.open_rounds.get(round)
        if round <= state.round or (current is not None and rank in current.arrived):
            raise ProtocolError(f"worker {rank} pushed {state.name()} twice in round {round}")
        if current is None:
            early = self.consistency.needs(round) < round
            current = state.open_rounds[round] = Round(early, step=step)
        return current

    def _add(self, current: Round, rank: int, gradient: Buffer) -> None:
        if self.deterministic:
            current.by_rank[rank] = gradient
        elif current.total is None:
            current.total = gradient
        else:
            np.add(current.total.array, gradient.array, out=current.total.array)
            gradient.retire()

    def _add_encoded(
        self, state: SliceState, current: Round, rank: int, encoded: memoryview
    ) -> None:
        codec = state.codecs.gradients
        if self.deterministic or current.total is None:
            gradient = self._pool.get(state.length, state.dtype)
            codec.decode(encoded, gradient.array)
            self._add(current, rank, gradient)
        else:
            codec.add(encoded, current.total.array)

    def _complete(self, state: SliceState) -> bool:
        following = state.open_rounds.get(state.round + 1)
        if following is None:
            return False
        # For the initial round only worker rank 0 pushes.
        return state.round < INITIAL_ROUND or self.consistency.ends(following.arrived)

    def _end_round(self, state: SliceState) -> Result:
        state.round += 1
        state.forget_wire()
        ended = state.open_rounds.pop(state.round)
        state.early_rounds.discard(state.round)
        total = self._total(ended)
        optimizer = self.optimizers.get(state.key.store)
        if state.round == INITIAL_ROUND or optimizer is None:
            if state.value is not None:
                state.value.retire()
            state.value = total
        else:
            assert state.value is not None
            if state.value.sending:
                # A straggler is still being sent the old value, so it must stay as it is.
                state.value = self._copy(state.value)
            optimizer.update(state.key, state.index, state.value.array, total.array, ended.step)
            total.retire()
        return Result(
            state.value, state.round, ended.step, ended.priority, ended.wanting, ended.others
        )

    def _total(self, ended: Round) -> Buffer:
        if ended.total is not None:
            return ended.total
        buffers = [ended.by_rank[rank] for rank in sorted(ended.by_rank)]
        total = buffers[0]
        for gradient in buffers[1:]:
            np.add(total.array, gradient.array, out=total.array)
            gradient.retire()
        return total

    def _copy(self, value: Buffer) -> Buffer:
        copy = self._pool.get(len(value.array), value.array.dtype)
        copy.array[:] = value.array
        value.retire()
        return copy
