"""A slice on its server: the sum of a round's gradients, the value, and how a round changes it."""

from __future__ import annotations

from itertools import accumulate
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from p3kv.codecs import Encoder, Part
from p3kv.codecs.zero_rows import ZeroRows
from p3kv.common.finite import NotFinite, check_sum
from p3kv.errors import ProtocolError
from p3kv.server.engine.rounds import Record, Round
from p3kv.server.engine.state import Buffer, KeyPlan
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.fields import PushHeader
from p3kv.wire.header import (
    CARRIES,
    CLOCK_US,
    ENCODED,
    EXACT,
    HAS_VALUE,
    IN_HOST_SUM,
    INITIAL_ROUND,
    NO_GRADIENT,
    WANTS_RESULT,
)

_BYTE = np.dtype(np.uint8)


class LateBytes(NamedTuple):
    """How a value travels to one worker alone; made when it begins to leave."""

    encoder: Encoder
    value: Buffer
    part: Part
    most_bytes: int
    """How long it can be once it is encoded; 0: it travels as it is."""

    def made(self) -> memoryview:
        """The bytes, which the worker's encoder takes note of."""
        array = self.value.array
        if not self.most_bytes:
            self.encoder.sent_as_it_is(array, self.part)
            return self.value.bytes
        out = memoryview(bytearray(self.most_bytes))
        return out[: self.encoder.encode(array, self.part, out)]


class Kept(NamedTuple):
    """A round's mean gradient, as a sum and its divisor."""

    round: int
    total: Optional[Buffer]
    """None: no worker had a gradient."""
    divisor: float = 1
    lacking: int = 0
    """As in `Round`."""


class StatesBefore:
    """The optimizer's states as they were before the newest round that has changed any, where a
    key keeps means: workers that have such a round not count go on from there."""

    def __init__(self) -> None:
        self._round = INITIAL_ROUND
        self._states: Dict[int, Optional[State]] = {}
        """By index, of what the round has changed."""
        self._arrays: Dict[int, Dict[str, np.ndarray]] = {}
        """Memory for these."""

    def keep(self, round: int, index: int, state: Optional[State]) -> None:
        """Copy a state that a round is about to change."""
        if round != self._round:
            self._round = round
            self._states.clear()
        if state is not None:
            arrays = self._arrays.setdefault(index, {})
            for name, array in state.elements.items():
                kept = arrays.get(name)
                if kept is None or kept.shape != array.shape or kept.dtype != array.dtype:
                    arrays[name] = array.copy()
                else:
                    np.copyto(kept, array)
            state = State({name: arrays[name] for name in state.elements}, state.numbers)
        self._states[index] = state

    def knows(self, round: int, index: int) -> bool:
        """Whether a round has changed this state."""
        return round == self._round and index in self._states

    def copied(self, index: int) -> Optional[State]:
        """Copy what was kept of it."""
        state = self._states[index]
        if state is None:
            return None
        return State({name: one.copy() for name, one in state.elements.items()}, state.numbers)


Payload = Union[memoryview, LateBytes]
"""Bytes that travel, or what makes them when they begin to leave."""


class SliceSum:
    """Sum of a slice's gradients in one round: as they come, where the first one's buffer becomes
    the sum without a copy; or in the order of ranks when all are there, bit for bit the same each
    time. Half precision is summed in single precision."""

    __slots__ = ("_by_rank", "_length", "_plan", "_round", "_total", "_widens", "empty")

    def __init__(self, plan: KeyPlan, length: int, round: int) -> None:
        self._plan = plan
        self._length = length
        self._round = round
        self._total: Optional[Buffer] = None
        self._by_rank: Optional[Dict[int, Buffer]] = {} if plan.state.deterministic else None
        self._widens = round > INITIAL_ROUND and plan.sum_dtype != plan.dtype
        self.empty = True
        """Whether no gradient has been added."""

    def add(self, rank: int, gradient: Buffer, weight: float = 1.0) -> None:
        """Add a worker's gradient `weight` times, and own its buffer; NotFinite for a bad sum, if
        that is checked."""
        plan = self._plan
        if self._widens and gradient.array.dtype != plan.sum_dtype:  # else it is a host's sum
            gradient = plan.state.pool.cast(gradient, plan.sum_dtype)
        if weight != 1.0:
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(gradient.array, weight, out=gradient.array)
        self.empty = False
        if self._by_rank is not None:
            latest = self._by_rank[rank] = gradient
        elif self._total is None:
            latest = self._total = gradient
        else:
            latest = self._total
            np.add(latest.array, gradient.array, out=latest.array)
            plan.state.pool.put(gradient)
        if plan.state.checks_finite:
            self._check(latest, rank)

    def add_encoded(self, rank: int, encoded: memoryview, part: Part, weight: float = 1.0) -> None:
        """Add a gradient that the key's codec has encoded, and leave its memory to the caller."""
        plan, total = self._plan, self._total
        if total is None or self._widens or weight != 1.0:
            gradient = plan.state.pool.get(self._length, plan.dtype)
            plan.decoder.decode(encoded, part, gradient.array)
            self.add(rank, gradient, weight)
        else:
            plan.decoder.add(encoded, part, total.array)
            if plan.state.checks_finite:
                self._check(total, rank)

    def total(self) -> Buffer:
        """The sum, once all that is to be added has been."""
        if self._by_rank is None:
            assert self._total is not None
            return self._total
        ranks = sorted(self._by_rank)
        total = self._by_rank[ranks[0]]
        for rank in ranks[1:]:
            gradient = self._by_rank.pop(rank)
            np.add(total.array, gradient.array, out=total.array)
            self._plan.state.pool.put(gradient)
        if self._plan.state.checks_finite:
            self._check(total)
        return total

    def _check(self, latest: Buffer, rank: Optional[int] = None) -> None:
        if self._round > INITIAL_ROUND:
            check_sum(latest.array, self._plan.called, self._round, rank)


class ServerSlice(Record[SliceSum]):
    """One slice on its server."""

    def __init__(
        self,
        plan: KeyPlan,
        index: int,
        length: int,
        offset: int = 0,
        first_round: int = INITIAL_ROUND,
    ) -> None:
        super().__init__(plan)
        self.index = index
        self.length = self.size_elems = length
        self.size_bytes = length * plan.dtype.itemsize
        self.offset = offset
        """The slice's first element among those that this server keeps of the key."""
        self.first_round = first_round
        """The first round that has slices of this size."""
        self.of_key: List[ServerSlice] = [self]
        """All slices of this size that the server keeps of the key, in the order of their
        elements."""
        self.travels_as_it_is = plan.codecs.values.in_place and not plan.rule.predicts
        """Whether a worker that was sent the value has it, and not one that is rounded, or is a
        prediction."""
        self.value: Optional[Buffer] = None
        self.ready_s: Dict[int, float] = {}
        """By rank, when the gradients of the value's round were ready; for those that are known."""
        self._step = 0
        """Step of the value's round."""
        self._taken_over = INITIAL_ROUND - 1
        """The round whose value is that of slices of another size, which may have encoded it."""
        self._wire: Optional[Tuple[Buffer, memoryview]] = None
        """The value as its codec has encoded it for all workers; where it is predicted, that. Where
        values travel as they are: the rows that the value's round has changed."""
        self._predicted: Optional[Buffer] = None
        """The value as it will probably be, once it has been asked for."""
        self.kept: Optional[Kept] = None
        """The mean gradient of the last round that has ended, where the key keeps means."""
        self.before = StatesBefore()
        self._sent_in: Dict[int, int] = {}
        """By rank of a worker to which values may go encoded by what it has: the round of the last
        value that it was sent, or has given."""

    @property
    def name(self) -> str:
        return f"{self.plan.called}, slice {self.index}"

    def forget(self) -> None:
        self.value = self.kept = None
        self.before = StatesBefore()
        self.of_key = []

    # Pushes.

    def new_sum(self, round: int) -> SliceSum:
        return SliceSum(self.plan, self.length, round)

    def push(self, header: PushHeader, gradient: Optional[Buffer], ready_s: float = 0.0) -> bool:
        """Count a worker's push, and add what it brings: its gradient, the sum of its host's
        workers (CARRIES), or nothing, because its gradient comes in such a sum (IN_HOST_SUM) or
        there is none. Return whether a round may end; call `end_rounds` then.

        `gradient` is the record's from now on; it has the slice's elements, or the bytes that the
        codec reads. `ready_s`: when it was ready. ProtocolError for a push that can't be right.
        """
        rank, round_, flags, rounds = header.rank, header.round, header.flags, self.rounds
        if not flags & (IN_HOST_SUM | CARRIES):
            if gradient is None and round_ == INITIAL_ROUND:
                raise ProtocolError(f"it gave no initial value of {self.name}")
            current = rounds.round_for(rank, round_, header.step)
            current.arrived.add(rank)
            (current.wanting if flags & WANTS_RESULT else current.others).append(rank)
            current.ready_s[rank] = ready_s
            if flags & EXACT:
                current.exact = True
            if header.weight != 1.0:
                current.weigh(rank, header.weight, gradient is not None)
            if gradient is None or flags & ENCODED:
                self._add(current, header, gradient, header.weight)
            else:
                current.priority = header.priority
                current.sum.add(rank, gradient, header.weight)
        else:
            current = self._push_in_host(header, gradient, ready_s)
        if gradient is not None:
            current.lacking &= header.lacking
        if flags & HAS_VALUE:
            (current.have_value if flags & NO_GRADIENT else current.have_last).add(rank)
        arrived, left = len(current.arrived), self.plan.state.left
        return arrived >= rounds.quorum or round_ == INITIAL_ROUND or bool(left)

    def _push_in_host(
        self, header: PushHeader, total: Optional[Buffer], ready_s: float
    ) -> Round[SliceSum]:
        """Count a worker, add its host's sum, or both: each worker is counted on its own, and who
        sends the sum gets the result for all."""
        rank, flags, rounds = header.rank, header.flags, self.rounds
        if flags & IN_HOST_SUM:
            current = rounds.round_in_host_sum(rank, header.round, header.step)
            if not flags & WANTS_RESULT:
                current.others.append(rank)
            current.ready_s[rank] = ready_s
            if flags & EXACT:
                current.exact = True
            if header.weight != 1.0:
                current.weigh(rank, header.weight, False)
        if flags & CARRIES:
            current = rounds.round_of_sum(rank, header.round, header.workers)
            current.in_sums -= header.workers
            if flags & WANTS_RESULT:
                current.wanting.append(rank)
            try:
                self._add(current, header, total)
            except NotFinite as error:
                # Workers have checked their gradients: it is no single one that is too large.
                raise NotFinite(error.what, self.plan.called, header.round) from None
        return current

    def _add(
        self,
        current: Round[SliceSum],
        header: PushHeader,
        gradient: Optional[Buffer],
        weight: float = 1.0,
    ) -> None:
        current.priority = header.priority
        if gradient is None:
            current.lacks_gradient = True
        elif header.flags & ENCODED:
            part = Part(self.offset, current.number, current.step)
            encoded = gradient.bytes[: header.payload_bytes]
            current.sum.add_encoded(header.rank, encoded, part, weight)
            gradient.retire()
        else:
            current.sum.add(header.rank, gradient, weight)

    # Rounds.

    def total(self, current: Round[SliceSum]) -> Optional[np.ndarray]:
        return current.sum.total().array if self._has_gradient(current) else None

    def end(self, current: Round[SliceSum]) -> Sequence[Round[SliceSum]]:
        optimizer = self.plan.optimizer
        if optimizer is not None and optimizer.whole_tensors:
            together = self.partners(current)
            if together is not None:
                self._end_together(together)
                return together
        has_gradient = self._begin_update(current)
        if has_gradient:
            self._update(optimizer, current)
        self.rounds.end(current, has_gradient)
        return (current,)

    def _update(self, optimizer: Optional[Optimizer], current: Round[SliceSum]) -> None:
        total = current.sum.total()
        if optimizer is None or current.number == INITIAL_ROUND:
            self._replace_value(total, current.number)
            if current.number == INITIAL_ROUND and self.plan.codecs.values.of_each_worker:
                self._sent_in[0] = INITIAL_ROUND  # who has given it
                part = Part(self.offset, INITIAL_ROUND, self._step)
                self.plan.encoder(0).sent_as_it_is(self.known_value().array, part)
        else:
            scaled = self._scaled(current, total) if current.is_counted else total
            if scaled is None:
                self._keep(current, total, self.rounds.weight(current))
                return
            value, rows, before = self.value, self.plan.zero_rows, None
            if value is None or value.sends:
                value = self._value_to_change()
            if rows is not None and current.have_last and rows.looks(current.number):
                before = value.array.copy()
            self._apply(optimizer, value.array, scaled.array, current)
            if scaled is total:  # and the mean by now
                self._keep(current, total)
            else:
                self.plan.state.pool.put(scaled)
                self._keep(current, total, self.rounds.weight(current))
            if rows is not None and before is not None:
                self._keep_changes(rows, before, current.number)

    def _scaled(self, current: Round[SliceSum], total: Buffer) -> Optional[Buffer]:
        """The scaled sum of a held round, in place where it is not kept; None if dropped."""
        state, out = self.plan.state, total
        if self.plan.declared.keeps_means and state.clipped.changes(current.step):
            out = state.pool.get(self.length, total.array.dtype)
        if state.clipped.scale(current.step, self.length, total.array, out.array):
            return out
        return None

    def _keep(self, current: Round[SliceSum], total: Optional[Buffer], divisor: float = 1) -> None:
        """Keep the sum of a round that ends in place of the last one's, or free it."""
        if self.plan.declared.keeps_means:
            kept, self.kept = self.kept, Kept(current.number, total, divisor, current.lacking)
            total = None if kept is None else kept.total
        if total is not None:
            self.plan.state.pool.put(total)

    def mean_of(self, round: int) -> Optional[Kept]:
        """The mean gradient of a round that has ended, or is held; None of one to come.
        ProtocolError for one that is gone."""
        held = self.rounds.open.get(round)
        if held is not None and held.is_counted:
            total = held.sum.total() if self._has_gradient(held) else None
            return Kept(round, total, self.rounds.weight(held), held.lacking)
        if self.round < round:
            return None
        if self.kept is None or self.kept.round != round:
            raise ProtocolError(f"it asked for the mean of {self.name} in round {round}, not kept")
        return self.kept

    def partners(self, current: Round[SliceSum]) -> Optional[List[Round[SliceSum]]]:
        optimizer = self.plan.optimizer
        if optimizer is None or current.number == INITIAL_ROUND:
            return None
        if not optimizer.needs_whole(self.rounds.settings_step(current)):
            return None
        found: List[Round[SliceSum]] = []
        # The last slices usually come last: if one is missing, it is found at once.
        for other in reversed(self.of_key):
            one = other.rounds.find(current.owner, current.number)
            if one is None or one.in_sums or not other.rounds.is_complete(one):
                return []
            found.insert(0, one)
        return found

    def _end_together(self, rounds: List[Round[SliceSum]]) -> None:
        """End the rounds of all slices of the tensor by one update of the whole; or of none."""
        if not rounds:
            return
        plan, slices = self.plan, self.of_key
        if len(plan.declared.runs) > 1:
            raise ProtocolError(
                f"the optimizer needs whole tensors, and {plan.called} was declared for "
                f"{len(plan.declared.runs)} servers"
            )
        have = [slice_._begin_update(current) for slice_, current in zip(slices, rounds)]
        if have[0]:
            self._update_together(rounds)
        for slice_, current in zip(slices, rounds):
            slice_.rounds.end(current, have[0])

    def _update_together(self, rounds: List[Round[SliceSum]]) -> None:
        plan, slices = self.plan, self.of_key
        totals = [current.sum.total() for current in rounds]
        joined = np.concatenate([total.array for total in totals])
        is_dropped = False
        for slice_, current, total in zip(slices, rounds, totals):
            if current.is_counted:
                clipped, part = plan.state.clipped, joined[slice_.offset :][: slice_.length]
                is_dropped = not clipped.scale(current.step, slice_.length, part, part)
            slice_._keep(current, total, slice_.rounds.weight(current))
        if is_dropped:
            return
        values = [slice_._value_to_change() for slice_ in slices]
        weight = np.concatenate([value.array for value in values])
        assert plan.optimizer is not None
        step = self.rounds.settings_step(rounds[0])
        slices[0]._keep_state(plan.optimizer, WHOLE, rounds[0].number)
        plan.optimizer.update(plan.declared, WHOLE, weight, joined, step)
        for slice_, value in zip(slices, values):
            value.array[:] = weight[slice_.offset : slice_.offset + slice_.length]

    def begin_at(self, round: int, value: np.ndarray) -> None:
        """Take the value of a round over from slices of another size."""
        self.value = self.plan.state.pool.get(self.length, self.plan.dtype)
        self.value.array[:] = value
        self.rounds.round = self._taken_over = round

    def known_value(self) -> Buffer:
        """The value, of a slice that has one."""
        assert self.value is not None
        return self.value

    def _has_gradient(self, current: Round[SliceSum]) -> bool:
        """Whether any worker has pushed a gradient in a complete round: else it changes nothing."""
        if not current.sum.empty:
            return True
        if not current.lacks_gradient:
            raise ProtocolError(f"nobody has sent the sum of {self.name} in round {current.number}")
        return False

    def _begin_update(self, current: Round[SliceSum]) -> bool:
        """Forget what held for the last value; return whether the round has a gradient."""
        if self._wire is not None:
            self._wire[0].retire()
            self._wire = None
        if self._predicted is not None:
            self._predicted.retire()
            self._predicted = None
        self.ready_s = current.ready_s
        self._step = current.step
        if not current.sum.empty or self._has_gradient(current):  # nearly always
            return True
        if current.is_counted:
            self.plan.state.clipped.scale(current.step, self.length, None, None)
        self._keep(current, None)
        return False

    def _apply(
        self,
        optimizer: Optimizer,
        value: np.ndarray,
        total: np.ndarray,
        current: Round[SliceSum],
    ) -> None:
        step = self.rounds.settings_step(current)
        self._keep_state(optimizer, self.index, current.number)
        optimizer.update(self.plan.declared, self.index, value, total, step)

    def _keep_state(self, optimizer: Optimizer, index: int, round: int) -> None:
        if self.plan.declared.keeps_means:
            self.before.keep(round, index, optimizer.seen(self.plan.declared, index))

    def copied_state(
        self, optimizer: Optimizer, index: int, before: Optional[int]
    ) -> Optional[State]:
        """Copy the optimizer's state at this index; `before`: as it was before this round."""
        if before is not None and self.before.knows(before, index):
            return self.before.copied(index)
        return optimizer.copied(self.plan.declared, index)

    def _keep_changes(self, rows: ZeroRows, before: np.ndarray, round_: int) -> None:
        """Keep which rows of the value a round has changed, if that is to be sent."""
        buffer = self.plan.state.pool.get(self.plan.codecs.values.most_bytes(self.length), _BYTE)
        part = Part(self.offset, round_, self._step)
        count = rows.encode_changes(before, self.known_value().array, part, buffer.bytes)
        if count:
            self._wire = buffer, buffer.bytes[:count]
        else:
            buffer.retire()

    def _replace_value(self, total: Buffer, round_: int) -> None:
        if self.value is not None:
            self.value.retire()
        if total.array.dtype != self.plan.dtype:
            total = self.plan.state.pool.cast(total, self.plan.dtype)
            if self.plan.state.checks_finite:
                check_sum(total.array, self.plan.called, round_)
        self.value = total

    def _value_to_change(self) -> Buffer:
        """The value's buffer; a copy where a straggler is still being sent the value."""
        value = self.value
        assert value is not None
        if value.sends:
            value = self.value = self.plan.state.pool.cast(value, self.plan.dtype)
        return value

    # Values.

    def wire(
        self, rank: int, answers_push: bool, exact: bool = False, has_last: bool = False
    ) -> Tuple[Buffer, Payload, int]:
        """How the value travels to a worker: a buffer that stays until it is sent, its bytes or
        what makes them when they begin to leave, and flags. By some consistency rules, pushes are
        answered with a predicted value. `exact`: as it is, whatever the codec. `has_last`: the
        worker has the value of the round before.

        A value is encoded once, when the first worker wants it, unless each gets something else. A
        true value is not encoded beside a predicted one.
        """
        assert self.value is not None
        value, codec = self.value, self.plan.codecs.values
        if self.travels_as_it_is and not (has_last and self._wire):
            return value, value.bytes, 0
        if self.plan.rule.predicts and self.round > INITIAL_ROUND:
            value = self._prediction(value) if answers_push else value
            if not answers_push and not codec.of_each_worker:
                return value, value.bytes, 0
        if codec.in_place and has_last and self._wire is not None:
            return (*self._wire, ENCODED)
        if codec.in_place or (self.round == INITIAL_ROUND and not codec.of_each_worker):
            return value, value.bytes, 0
        exact = exact or self.round == INITIAL_ROUND
        part = Part(self.offset, self.round, self._step)
        if codec.of_each_worker:
            encoder = self.plan.encoder(rank)
            is_known = not exact and self._knows_last(rank)
            self._sent_in[rank] = self.round
            if is_known:
                return (
                    value,
                    LateBytes(encoder, value, part, codec.most_bytes(self.length)),
                    ENCODED,
                )
            return value, LateBytes(encoder, value, part, 0), 0
        if exact or (codec.remembers and self.round == self._taken_over):
            return value, value.bytes, 0
        if self._wire is None:
            buffer = self.plan.state.pool.get(codec.most_bytes(self.length), _BYTE)
            count = self.plan.encoder().encode(value.array, part, buffer.bytes)
            self._wire = buffer, buffer.bytes[:count]
        return (*self._wire, ENCODED)

    def late_us(self, round: int) -> Dict[int, int]:
        """By rank, how much later than a worker's gradient the round's last was ready; {} of
        another round than the value's."""
        if round != self.rounds.round or not self.ready_s:
            return {}
        last_s = max(self.ready_s.values())
        return {rank: int(1e6 * (last_s - at_s)) % CLOCK_US for rank, at_s in self.ready_s.items()}

    def _knows_last(self, rank: int) -> bool:
        """Whether a worker has the value before this one, or by own rounds an older one. One that
        gets its host's values after another has left may have none for long."""
        last = self._sent_in.get(rank)
        if last is None:
            return False
        if last > INITIAL_ROUND and not self.plan.sums_on_hosts:
            return True
        return last >= self.round - 1

    def _prediction(self, value: Buffer) -> Buffer:
        if self._predicted is None:
            plan, optimizer = self.plan, self.plan.optimizer
            array = None
            if optimizer is not None and not optimizer.whole_tensors:
                rule = plan.rule
                array = self._predicted_by(optimizer, value.array, rule.predicts, rule.damped)
            if array is None:
                return value
            self._predicted = plan.state.pool.get(self.length, plan.dtype)
            self._predicted.array[:] = array
        return self._predicted

    def _predicted_by(
        self, optimizer: Optimizer, value: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        return optimizer.predicted(self.plan.declared, self.index, value, steps, damped)


class BucketSlice(ServerSlice):
    """The one slice of a bucket.

    Its tensors are updated as one, until a round ends in which no worker had a gradient of some of
    them. Only the others are updated then, and each has a state of its own from then on: Adam's
    count of steps, for example, differs. A tensor's index is one more than its place.
    """

    def __init__(self, plan: KeyPlan, first_round: int = INITIAL_ROUND) -> None:
        super().__init__(plan, 0, plan.kept_elems, 0, first_round)
        ends = [0, *accumulate(member.size_elems for member in plan.declared.members)]
        self._spans = [slice(start, end) for start, end in zip(ends, ends[1:])]
        self._is_split = False
        """Whether each tensor has a state of its own."""
        self._may_join = False
        """Whether these may be alike."""

    def begin_as(self, before: BucketSlice, round: int) -> None:
        """Take over from one that has ended its last round; states stay where they are."""
        self.begin_at(round, before.known_value().array)
        self._is_split, self._may_join = before._is_split, before._may_join
        self.kept, self.before = before.kept, before.before

    def copied_states(
        self, optimizer: Optimizer, before: Optional[int] = None
    ) -> List[Optional[State]]:
        """Copy the optimizer's state of each tensor, or None; between two updates, or as it was
        `before` this round."""
        if self._is_split:
            return [self.copied_state(optimizer, index, before) for index in self._indices]
        state = self.copied_state(optimizer, self.index, before)
        if state is None:
            return [None] * len(self._spans)
        return list(state.cut([one.stop - one.start for one in self._spans]))

    def replace_state(self, optimizer: Optimizer, member: int, state: Optional[State]) -> None:
        """Replace the optimizer's state of a tensor; ProtocolError unless it has a number for each
        element."""
        span = self._spans[member]
        for name, array in ({} if state is None else state.elements).items():
            if array.shape != (span.stop - span.start,):
                raise ProtocolError(
                    f"it sent the array {name!r} of shape {array.shape} for a state of "
                    f"{span.stop - span.start} elements of {self.plan.called}"
                )
        self._split(optimizer)
        self._may_join = True
        index = self._indices[member]
        optimizer.export(self.plan.declared, index)
        if state is not None:
            optimizer.load(self.plan.declared, index, state)

    def _apply(
        self,
        optimizer: Optimizer,
        value: np.ndarray,
        total: np.ndarray,
        current: Round[SliceSum],
    ) -> None:
        lacking = current.lacking
        if self._may_join and not lacking:
            self._join(optimizer)
        if not self._is_split and not lacking:
            super()._apply(optimizer, value, total, current)
            return
        self._split(optimizer)
        step = self.rounds.settings_step(current)
        for member, (index, span) in enumerate(zip(self._indices, self._spans)):
            if not lacking >> member & 1:
                self._keep_state(optimizer, index, current.number)
                optimizer.update(self.plan.declared, index, value[span], total[span], step)

    def _predicted_by(
        self, optimizer: Optimizer, value: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        if not self._is_split:
            return super()._predicted_by(optimizer, value, steps, damped)
        predicted = value.copy()
        for index, span in zip(self._indices, self._spans):
            found = optimizer.predicted(self.plan.declared, index, value[span], steps, damped)
            if found is not None:
                predicted[span] = found
        return predicted

    @property
    def _indices(self) -> range:
        return range(1, 1 + len(self._spans))

    def _split(self, optimizer: Optimizer) -> None:
        if self._is_split:
            return
        self._is_split = True
        state = optimizer.export(self.plan.declared, self.index)
        if state is not None:
            lengths = [one.stop - one.start for one in self._spans]
            for index, part in zip(self._indices, state.cut(lengths)):
                optimizer.load(self.plan.declared, index, part)

    def _join(self, optimizer: Optimizer) -> None:
        """Have all tensors have one state again, if theirs are alike, as after a checkpoint."""
        self._may_join = False
        declared = self.plan.declared
        states = [optimizer.copied(declared, index) for index in self._indices]
        known = [state for state in states if state is not None]
        if known and (len(known) < len(states) or not State.are_alike(known)):
            return
        self._is_split = False
        for index in self._indices:
            optimizer.export(declared, index)
        if known:
            optimizer.load(declared, self.index, State.joined(known))
