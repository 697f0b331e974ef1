"""Sums the workers' slices by round, and makes the values.

Nothing here knows of sockets: pushes go in, values to send come out.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from p3kv.consistency import Consistency
from p3kv.errors import ProtocolError
from p3kv.server.buffers import Buffer, BufferPool
from p3kv.server.clipping import Clipping
from p3kv.server.finite import check_sum
from p3kv.server.leavers import Leavers
from p3kv.server.optimizer import WHOLE, Optimizer
from p3kv.server.own_rounds import OwnRounds
from p3kv.server.slice_states import Result, Round, SliceState
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import UNKNOWN

_HALF = np.dtype(np.float16)
_SINGLE = np.dtype(np.float32)


class Aggregator:
    """Adds pushes to their round's sum, and ends rounds in order.

    The consistency rule says when a round is complete; pushes are counted by rank. A push that
    arrives twice or after its round is an error and is never added twice. In deterministic mode
    pushes are added in rank order; otherwise in order of arrival, and the first push's buffer
    becomes the sum without a copy. Workers of one host may send one sum of theirs
    (`p3kv.worker.host_sums`); they are counted by rank all the same.

    Sums are of the key's dtype, but those of float16 are float32 until all gradients are in: an
    optimizer with multiple precision takes them as they are. Which optimizer the round will have is
    not known when its first push arrives: another worker may be ahead of rank 0's settings.
    """

    def __init__(
        self,
        consistency: Consistency,
        pool: BufferPool,
        deterministic: bool = False,
        clipping: Optional[Clipping[SliceState]] = None,
    ) -> None:
        """`clipping` is that of all stores; by default nothing is clipped."""
        self.consistency = consistency
        self._pool = pool
        self.deterministic = deterministic
        self.leavers = Leavers()
        self.checks_finite = False
        """Whether `push` and `end_rounds` raise NotFinite for nan and infinity. What is checked is
        the sum after each push, since the first one that is bad says whose gradient it was."""
        self.clipping = Clipping(lambda step, squares: None) if clipping is None else clipping
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
        current = self._count(state, rank, round, wants_result, priority, step)
        if encoded is None:
            self._add(state, current, rank, gradient)
        else:
            self._add_encoded(state, current, rank, encoded)
            gradient.retire()
        if self.checks_finite and round != INITIAL_ROUND:
            total = current.by_rank[rank] if self.deterministic else current.total
            assert total is not None
            check_sum(total.array, state.called, round, rank)

    def push_no_gradient(
        self, state: SliceState, rank: int, round: int, wants_result: bool, priority: int, step: int
    ) -> None:
        """Counts a worker that has no gradient for a round; otherwise as `push`."""
        if round == INITIAL_ROUND:
            raise ProtocolError(f"it gave no initial value of {state.name()}")
        current = self._count(state, rank, round, wants_result, priority, step)
        current.lacks_gradient = True

    def _count(
        self, state: SliceState, rank: int, round: int, wants_result: bool, priority: int, step: int
    ) -> Round:
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
        return current

    def push_in_host_sum(
        self,
        state: SliceState,
        rank: int,
        round: int,
        wants_result: bool,
        step: int,
        carries: bool,
    ) -> None:
        """Counts a worker whose slice is in the sum of its host's workers, which comes by
        `push_host_sum`; `carries`: from this worker.

        If the worker wants a result, whoever sends the sum gets it.

        ProtocolError for a push that can't be right.
        """
        if round == INITIAL_ROUND or state.own is not None:
            raise ProtocolError(f"it sums {state.name()} with others, in round {round}")
        current = self._open_round(state, rank, round, step)
        current.arrived.add(rank)
        if not wants_result:
            current.others.append(rank)
        if carries:
            current.host_sums.add(rank)
        if rank == 0:
            current.step = step

    def push_host_sum(
        self,
        state: SliceState,
        rank: int,
        round: int,
        total: Optional[Buffer],
        wants_result: bool,
        priority: int,
    ) -> None:
        """Adds the sum of a host's workers, which its sender has announced and which are counted
        each on its own; otherwise as `push`. None: none of them had a gradient."""
        current = state.open_rounds.get(round)
        if current is None or rank not in current.host_sums:
            raise ProtocolError(f"worker {rank} has announced no sum of {state.name()}")
        current.host_sums.remove(rank)
        if wants_result:
            current.wanting.append(rank)
        current.priority = priority
        if total is None:
            current.lacks_gradient = True
        else:
            self._add(state, current, rank, total)

    def end_rounds(self, state: SliceState) -> Iterator[Result]:
        """Ends the rounds of a slice that are complete, usually none or one.

        Where the optimizer needs whole tensors, a round ends for all slices of the key when it is
        complete for the last of them, and each slice has a result.

        It ends the next round when the caller asks for the next result. By then the caller must
        have queued the result before: a value that no frame is being sent from is updated in place.
        """
        while self._complete(state):
            if self.clipping.steps and self._held(state):
                return
            if not self._needs_whole(state):
                yield self._end_round(state)
            elif self._key_complete(state):
                yield from self._end_round_of_key(list(state.of_key.values()))
            else:
                return

    def early_results(self, state: SliceState) -> Iterator[Result]:
        """The value that a slice has already, for workers that may go on with it.

        Call it where a slice has `early_rounds`, when pushes have come and all complete rounds have
        ended.
        """
        for round_ in sorted(state.early_rounds):
            if self.is_new_enough(state, round_, UNKNOWN):
                assert state.value is not None
                state.early_rounds.remove(round_)
                current = state.open_rounds[round_]
                wanting, current.wanting = current.wanting, []
                yield Result(
                    state, state.value, round_, current.step, current.priority, wanting, []
                )

    def is_new_enough(self, state: SliceState, round: int, rank: int) -> bool:
        """Whether a slice's value lets a worker go on that has pushed for a round.

        Without an optimizer a value is the sum of one round's gradients, and no other round's will
        do.
        """
        if state.own is not None:
            return state.value is not None and state.own.ended(rank) >= round
        has_optimizer = state.key.store in self.optimizers
        oldest = self.consistency.needs(round) if has_optimizer else round
        return state.value is not None and state.round >= oldest

    def missing(self, state: SliceState, round: int) -> List[int]:
        """Ranks whose push for an open round has not arrived; round 0 need not be open."""
        if round == INITIAL_ROUND:
            return [0]
        optimizer = self.optimizers.get(state.key.store)
        arrived = state.open_rounds[round].arrived
        return self.leavers.missing(self.consistency, round, arrived, optimizer)

    def waits(self, state: SliceState) -> Iterator[Tuple[int, Round, List[int]]]:
        """Rounds of a slice that wait for workers: the round, what has come, and the ranks of those
        that have not pushed.

        A worker's own round waits for worker rank 0 at most: for the initial value, or for the
        optimizer, which rank 0 sets before its first push.
        """
        for round_, current in state.open_rounds.items():
            yield round_, current, self.missing(state, round_)
        if state.own is not None:
            for _, round_, current in state.own.waiting():
                if state.value is None:
                    yield INITIAL_ROUND, current, [0]
                elif state.key.store not in self.optimizers:
                    yield round_, current, [0]

    def _open_round(self, state: SliceState, rank: int, round: int, step: int) -> Round:
        """The round that a worker's push is for; ProtocolError for one that can't be right."""
        if round == INITIAL_ROUND and rank != 0:
            raise ProtocolError(f"worker {rank} sent an initial value of {state.name()}")
        if state.own is not None and round != INITIAL_ROUND:
            if state.own.has_come(rank, round):
                raise ProtocolError(f"worker {rank} pushed {state.name()} twice in round {round}")
            came = Round(round, early=False, step=step)
            state.own.add(rank, round, came)
            return came
        current = state.open_rounds.get(round)
        if round <= state.round or (current is not None and rank in current.arrived):
            raise ProtocolError(f"worker {rank} pushed {state.name()} twice in round {round}")
        if current is None:
            early = self.consistency.needs(round) < round
            current = state.open_rounds[round] = Round(round, early, step=step)
        return current

    def _add(self, state: SliceState, current: Round, rank: int, gradient: Buffer) -> None:
        if state.half and gradient.array.dtype == _HALF and current.round != INITIAL_ROUND:
            gradient = self._cast(gradient, _SINGLE)
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
            self._add(state, current, rank, gradient)
        else:
            codec.add(encoded, current.total.array)

    def _complete(self, state: SliceState) -> bool:
        following = state.open_rounds.get(state.round + 1)
        if following is None:
            return state.own is not None and self._open_own(state, state.own)
        # For the initial round only worker rank 0 pushes.
        if state.round < INITIAL_ROUND or state.own is not None:
            return True
        if following.host_sums:
            return False
        if not self.leavers.ranks:  # asked after each push
            return self.consistency.ends(following.arrived)
        optimizer = self.optimizers.get(state.key.store)
        return self.leavers.ends(self.consistency, following.round, following.arrived, optimizer)

    def _open_own(self, state: SliceState, own: OwnRounds[Round]) -> bool:
        """Makes a round that is a worker's own the slice's next one, if one of them may end; with
        it that of all slices of the key, where the optimizer needs whole tensors."""
        optimizer = self.optimizers.get(state.key.store)
        if optimizer is None:
            return False
        whole = optimizer.whole_tensors and optimizer.needs_whole(None)
        states = list(state.of_key.values()) if whole else [state]
        for rank, round_ in own.next():
            if all(_may_end(one, rank, round_) for one in states):
                for one in states:
                    assert one.own is not None
                    one.open_rounds[one.round + 1] = one.own.end(rank, round_)
                return True
        return False

    def _held(self, state: SliceState) -> bool:
        """Whether the next round of a slice, which is complete, waits for the norm of its step."""
        if state.round < INITIAL_ROUND or state.own is not None:
            return False
        current = state.open_rounds[state.round + 1]
        if self.clipping.is_new(current.step, state):
            if _has_gradient(state, current):
                current.total = self._total(state, current)
                current.by_rank.clear()
            total = None if current.total is None else current.total.array
            self.clipping.hold(current.step, state, state.length, total)
        return self.clipping.holds(current.step)

    def _needs_whole(self, state: SliceState) -> bool:
        """Whether the next round of a slice, which is complete, ends with those of all slices."""
        optimizer = self.optimizers.get(state.key.store)
        if optimizer is None or not optimizer.whole_tensors or state.round < INITIAL_ROUND:
            return False
        return optimizer.needs_whole(self._update_step(state, state.open_rounds[state.round + 1]))

    def _key_complete(self, state: SliceState) -> bool:
        """Whether all slices of the key have what the next round of this one has."""
        # The last slices usually come last: if one is missing, it is found at once.
        return all(
            other.round == state.round and self._complete(other)
            for other in reversed(state.of_key.values())
        )

    def _end_round_of_key(self, states: Sequence[SliceState]) -> List[Result]:
        """Ends the next round of all slices of a key with one update of the whole tensor."""
        key = states[0].key
        if len(key.runs) > 1:
            raise ProtocolError(
                f"the optimizer needs whole tensors, and {states[0].called} was declared for "
                f"{len(key.runs)} servers"
            )
        optimizer = self.optimizers[key.store]
        rounds = [self._next_round(state) for state in states]
        if not _has_gradient(states[0], rounds[0]):
            return [self._unchanged(state, ended) for state, ended in zip(states, rounds)]
        totals = [self._total(state, ended) for state, ended in zip(states, rounds)]
        total = np.concatenate([buffer.array for buffer in totals])
        for buffer in totals:
            buffer.retire()
        if self.clipping.steps and states[0].own is None:
            self.clipping.scale(rounds[0].step, len(total), total)
        weight = np.concatenate([_value(state).array for state in states])
        optimizer.update(key, WHOLE, weight, total, self._update_step(states[0], rounds[0]))
        start = 0
        for state in states:
            value = _value(state)
            if value.sending:
                value.retire()
                value = state.value = self._pool.get(state.length, state.dtype)
            value.array[:] = weight[start : start + state.length]
            start += state.length
        return [self._result(state, ended) for state, ended in zip(states, rounds)]

    @staticmethod
    def _next_round(state: SliceState) -> Round:
        """Counts a slice's next round as ended, and returns what has arrived in it."""
        state.round += 1
        state.forget_wire()
        state.early_rounds.discard(state.round)
        ended = state.open_rounds.pop(state.round)
        state.ready_s = ended.ready_s
        return ended

    def _end_round(self, state: SliceState) -> Result:
        ended = self._next_round(state)
        if not _has_gradient(state, ended):
            return self._unchanged(state, ended)
        total = self._total(state, ended)
        optimizer = self.optimizers.get(state.key.store)
        if state.round == INITIAL_ROUND or optimizer is None:
            if state.value is not None:
                state.value.retire()
            if state.half and state.round != INITIAL_ROUND:
                total = self._cast(total, state.dtype)
                if self.checks_finite:
                    check_sum(total.array, state.called, ended.round)
            state.value = total
        else:
            value = _value(state)
            if value.sending:
                # A straggler is still being sent the old value, so it must stay as it is.
                value = state.value = self._copy(value)
            if self.clipping.steps and state.own is None:
                self.clipping.scale(ended.step, state.length, total.array)
            step = self._update_step(state, ended)
            optimizer.update(state.key, state.index, value.array, total.array, step)
            total.retire()
        return self._result(state, ended)

    def _unchanged(self, state: SliceState, ended: Round) -> Result:
        """The result of a round for which no worker had a gradient: neither the optimizer nor what
        it remembers hears of the round."""
        if self.clipping.steps and state.own is None:
            self.clipping.scale(ended.step, state.length, None)
        return dataclasses.replace(self._result(state, ended), no_gradient=True)

    @staticmethod
    def _result(state: SliceState, ended: Round) -> Result:
        return Result(
            state, _value(state), ended.round, ended.step, ended.priority, ended.wanting,
            ended.others,
        )  # fmt: skip

    def _total(self, state: SliceState, ended: Round) -> Buffer:
        if ended.total is not None:
            return ended.total
        buffers = [ended.by_rank[rank] for rank in sorted(ended.by_rank)]
        total = buffers[0]
        for gradient in buffers[1:]:
            np.add(total.array, gradient.array, out=total.array)
            gradient.retire()
        if self.checks_finite and ended.round != INITIAL_ROUND:
            check_sum(total.array, state.called, ended.round)
        return total

    def _update_step(self, state: SliceState, ended: Round) -> Optional[int]:
        """The step whose optimizer settings hold for a round; None for the newest settings."""
        newest = state.own is not None or self.leavers.leads_no_more(ended.arrived)
        return None if newest else ended.step

    def _copy(self, value: Buffer) -> Buffer:
        return self._cast(value, value.array.dtype)

    def _cast(self, value: Buffer, dtype: np.dtype) -> Buffer:
        copy = self._pool.get(len(value.array), dtype)
        with np.errstate(over="ignore"):
            copy.array[:] = value.array
        value.retire()
        return copy


def _value(state: SliceState) -> Buffer:
    assert state.value is not None
    return state.value


def _has_gradient(state: SliceState, current: Round) -> bool:
    """Whether any worker has pushed a gradient in a complete round: else it changes nothing."""
    if current.total is not None or current.by_rank:
        return True
    if not current.lacks_gradient:
        raise ProtocolError(f"nobody has sent the sum of {state.name()} in round {current.round}")
    return False


def _may_end(state: SliceState, rank: int, round_: int) -> bool:
    """Whether a worker's own round may be the next of a slice."""
    return state.value is not None and state.own is not None and state.own.is_next(rank, round_)
