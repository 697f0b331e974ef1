"""A slice on its server: its value, and how a round changes it."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np

from p3kv.codecs import Codec, Encoder, Part
from p3kv.codecs.zero_rows import ZeroRows
from p3kv.common.finite import check_sum
from p3kv.errors import ProtocolError
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.ledger import Ledger, new_ledger
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.rounds import Round
from p3kv.server.engine.sums import SliceSum, maker_of_sums
from p3kv.server.engine.unit import Unit
from p3kv.server.optimizer import WHOLE, Optimizer, State
from p3kv.wire.header import CLOCK_US, ENCODED, INITIAL_ROUND

_BYTE = np.dtype(np.uint8)

Payload = Union[memoryview, Callable[[], memoryview]]
"""Bytes that travel, or what makes them when they begin to leave."""


class ServerSlice(Unit):
    """One slice on its server."""

    def __init__(
        self,
        plan: KeyPlan,
        index: int,
        length: int,
        offset: int = 0,
        first_round: int = INITIAL_ROUND,
    ) -> None:
        self.plan = plan
        self.index = index
        self.length = length
        self.size_bytes = length * plan.dtype.itemsize
        self.offset = offset
        """The slice's first element among those that this server keeps of the key."""
        self.first_round = first_round
        """The first round that has slices of this size."""
        self.of_key: Dict[int, ServerSlice] = {index: self}
        """All slices of this size that the server keeps of the key, by index, in the order of their
        elements."""
        self.travels_as_it_is = plan.codecs.values.in_place and not plan.consistency.predicts
        """Whether a worker that was sent the value has it, and not one that is rounded, or is a
        prediction."""
        self.value: Optional[Buffer] = None
        self.ledger: Ledger[SliceSum] = new_ledger(plan, maker_of_sums(plan, length), self.name)
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
        self._sent_in: Dict[int, int] = {}
        """By rank of a worker to which values may go encoded by what it has: the round of the last
        value that it was sent, or has given."""

    @property
    def name(self) -> str:
        return f"{self.plan.called}, slice {self.index}"

    @property
    def size_elems(self) -> int:
        return self.length

    def summed(self, current: Round[SliceSum]) -> Optional[np.ndarray]:
        return current.sum.total().array if self.has_gradient(current) else None

    def begin_at(self, round: int, value: np.ndarray) -> None:
        """Takes the value of a round over from slices of another size."""
        self.value = self.plan.rules.pool.get(self.length, self.plan.dtype)
        self.value.array[:] = value
        self.ledger.round = self._taken_over = round

    def known_value(self) -> Buffer:
        """The value, of a slice that has one."""
        assert self.value is not None
        return self.value

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
        if self.plan.consistency.predicts and self.round > INITIAL_ROUND:
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
                return value, partial(_encode, codec, encoder, value, part), ENCODED
            return value, partial(_send_as_it_is, encoder, value, part), 0
        if exact or (codec.remembers and self.round == self._taken_over):
            return value, value.bytes, 0
        if self._wire is None:
            buffer = self.plan.rules.pool.get(codec.most_bytes(self.length), _BYTE)
            count = self.plan.encoder().encode(value.array, part, buffer.bytes)
            self._wire = buffer, buffer.bytes[:count]
        return (*self._wire, ENCODED)

    def late_us(self, rank: int, round: int) -> int:
        """How much later than a worker's gradient the last one of the value's round was ready; 0
        if the value is of another round than this."""
        if round != self.ledger.round or not self.ready_s:
            return 0
        last_s = max(self.ready_s.values())
        return int(1e6 * (last_s - self.ready_s.get(rank, last_s))) % CLOCK_US

    def _knows_last(self, rank: int) -> bool:
        """Whether a worker has the value before this one, or by rounds of its own an older one. A
        worker begins with the initial value, in a job that goes on, too; one that gets the values
        of its host after another has left may have none for long."""
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
                rule = plan.consistency
                array = self._predicted_by(optimizer, value.array, rule.predicts, rule.damped)
            if array is None:
                return value
            self._predicted = plan.rules.pool.get(self.length, plan.dtype)
            self._predicted.array[:] = array
        return self._predicted

    def has_gradient(self, current: Round[SliceSum]) -> bool:
        """Whether any worker has pushed a gradient in a complete round: else it changes nothing."""
        if not current.sum.empty:
            return True
        if not current.lacks_gradient:
            raise ProtocolError(f"nobody has sent the sum of {self.name} in round {current.number}")
        return False

    def update(self, current: Round[SliceSum]) -> bool:
        if not self._begin_update(current):
            return False
        optimizer, total = self.plan.optimizer_of(current), current.sum.total()
        if current.number == INITIAL_ROUND or optimizer is None:
            self._replace_value(total, current.number)
            if current.number == INITIAL_ROUND and self.plan.codecs.values.of_each_worker:
                self._sent_in[0] = INITIAL_ROUND  # who has given it
                part = Part(self.offset, INITIAL_ROUND, self._step)
                self.plan.encoder(0).sent_as_it_is(self.known_value().array, part)
        else:
            value, rows = self._value_to_change(), self.plan.zero_rows
            if self.plan.rules.held_rounds.steps:
                self.scale(current, total.array)
            before = None
            if rows is not None and current.have_last and rows.looks(current.number):
                before = value.array.copy()
            self._update_by(optimizer, current, value.array, total.array)
            total.retire()
            if rows is not None and before is not None:
                self._keep_changes(rows, before, current.number)
        return True

    def _keep_changes(self, rows: ZeroRows, before: np.ndarray, round_: int) -> None:
        """Keeps which rows of the value a round has changed, if that is to be sent."""
        buffer = self.plan.rules.pool.get(self.plan.codecs.values.most_bytes(self.length), _BYTE)
        part = Part(self.offset, round_, self._step)
        count = rows.encode_changes(before, self.known_value().array, part, buffer.bytes)
        if count:
            self._wire = buffer, buffer.bytes[:count]
        else:
            buffer.retire()

    def _update_by(
        self, optimizer: Optimizer, current: Round[SliceSum], value: np.ndarray, total: np.ndarray
    ) -> None:
        step = self.plan.update_step(current)
        optimizer.update(self.plan.declared, self.index, value, total, step)

    def _predicted_by(
        self, optimizer: Optimizer, value: np.ndarray, steps: int, damped: bool
    ) -> Optional[np.ndarray]:
        return optimizer.predicted(self.plan.declared, self.index, value, steps, damped)

    def _begin_update(self, current: Round[SliceSum]) -> bool:
        """Forgets what held for the last value; whether the round has a gradient."""
        if self._wire is not None:
            self._wire[0].retire()
            self._wire = None
        if self._predicted is not None:
            self._predicted.retire()
            self._predicted = None
        self.ready_s = current.ready_s
        self._step = current.step
        if not current.sum.empty or self.has_gradient(current):  # nearly always
            return True
        self.scale(current, None)
        return False

    def _replace_value(self, total: Buffer, round_: int) -> None:
        if self.value is not None:
            self.value.retire()
        if total.array.dtype != self.plan.dtype:
            total = self.plan.rules.pool.cast(total, self.plan.dtype)
            if self.plan.rules.checks_finite:
                check_sum(total.array, self.plan.called, round_)
        self.value = total

    def _value_to_change(self) -> Buffer:
        """The value's buffer; another one where a straggler is still being sent the value, which
        must stay as it is then."""
        value = self.value
        assert value is not None
        if value.sends:
            value = self.value = self.plan.rules.pool.cast(value, self.plan.dtype)
        return value


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
        """Takes over everything of one that has ended its last round; states stay where they
        are."""
        self.begin_at(round, before.known_value().array)
        self._is_split, self._may_join = before._is_split, before._may_join

    def copied_states(self, optimizer: Optimizer) -> List[Optional[State]]:
        """Copies what an optimizer remembers of each tensor; None of those that it does not know.
        To be called between two updates."""
        declared = self.plan.declared
        if self._is_split:
            return [optimizer.copied(declared, index) for index in self._indices]
        state = optimizer.copied(declared, self.index)
        if state is None:
            return [None] * len(self._spans)
        return list(state.cut([one.stop - one.start for one in self._spans]))

    def replace_state(self, optimizer: Optimizer, member: int, state: Optional[State]) -> None:
        """Gives an optimizer another state of a tensor, or none; as `copied_states`. Raises
        ProtocolError for one that has not one number for each element."""
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

    def _update_by(
        self, optimizer: Optimizer, current: Round[SliceSum], value: np.ndarray, total: np.ndarray
    ) -> None:
        if self._may_join and not current.lacking:
            self._join(optimizer)
        if not self._is_split and not current.lacking:
            super()._update_by(optimizer, current, value, total)
            return
        self._split(optimizer)
        declared, step = self.plan.declared, self.plan.update_step(current)
        for member, (index, span) in enumerate(zip(self._indices, self._spans)):
            if not current.lacking >> member & 1:
                optimizer.update(declared, index, value[span], total[span], step)

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
        """Has all tensors have one state again, if theirs are alike, as after a checkpoint."""
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


def update_together(slices: Sequence[ServerSlice], rounds: Sequence[Round[SliceSum]]) -> bool:
    """Updates all slices of a key like `ServerSlice.update`, by one update of the whole tensor."""
    plan = slices[0].plan
    if len(plan.declared.runs) > 1:
        raise ProtocolError(
            f"the optimizer needs whole tensors, and {plan.called} was declared for "
            f"{len(plan.declared.runs)} servers"
        )
    have = [slice_._begin_update(current) for slice_, current in zip(slices, rounds)]
    if not have[0]:
        return False
    totals = [current.sum.total() for current in rounds]
    for slice_, current, total in zip(slices, rounds, totals):
        slice_.scale(current, total.array)
    joined = np.concatenate([total.array for total in totals])
    for total in totals:
        total.retire()
    values = [slice_._value_to_change() for slice_ in slices]
    weight = np.concatenate([value.array for value in values])
    optimizer = plan.optimizer_of(rounds[0])
    assert optimizer is not None
    optimizer.update(plan.declared, WHOLE, weight, joined, plan.update_step(rounds[0]))
    for slice_, value in zip(slices, values):
        value.array[:] = weight[slice_.offset : slice_.offset + slice_.length]
    return True


def _encode(codec: Codec, encoder: Encoder, value: Buffer, part: Part) -> memoryview:
    out = memoryview(bytearray(codec.most_bytes(len(value.array))))
    return out[: encoder.encode(value.array, part, out)]


def _send_as_it_is(encoder: Encoder, value: Buffer, part: Part) -> memoryview:
    encoder.sent_as_it_is(value.array, part)
    return value.bytes
