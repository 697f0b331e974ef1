"""A slice on its server: its value, and how a round changes it."""

from __future__ import annotations

from typing import Dict, Optional, Sequence, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.finite import check_sum
from p3kv.server.engine.ledger import Ledger, new_ledger
from p3kv.server.engine.plan import KeyPlan
from p3kv.server.engine.rounds import Round
from p3kv.server.engine.sums import SliceSum, maker_of_sums
from p3kv.server.engine.unit import Unit
from p3kv.server.optimizer import WHOLE
from p3kv.wire.header import ENCODED, INITIAL_ROUND

_BYTE = np.dtype(np.uint8)


class SliceState(Unit):
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
        self.offset = offset
        """The slice's first element among those that this server keeps of the key."""
        self.first_round = first_round
        """The first round that has slices of this size."""
        self.of_key: Dict[int, SliceState] = {index: self}
        """All slices of this size that the server keeps of the key, by index, in the order of their
        elements."""
        self.value: Optional[Buffer] = None
        self.ledger: Ledger[SliceSum] = new_ledger(plan, maker_of_sums(plan, length), self.name)
        self.ready_s: Dict[int, float] = {}
        """By rank, when the gradients of the value's round were ready; for those that are known."""
        self._wire: Optional[Tuple[Buffer, memoryview]] = None
        """The value as its codec has encoded it."""

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
        self.ledger.round = round

    def known_value(self) -> Buffer:
        """The value, of a slice that has one."""
        assert self.value is not None
        return self.value

    def wire(self) -> Tuple[Buffer, memoryview, int]:
        """How the value travels: a buffer that stays until it is sent, its bytes, and flags.

        A value is encoded once, when the first worker wants it.
        """
        value, codec = self.known_value(), self.plan.codecs.values
        if codec.in_place or self.round == INITIAL_ROUND:
            return value, value.bytes, 0
        if self._wire is None:
            buffer = self.plan.rules.pool.get(codec.most_bytes(self.length), _BYTE)
            count = codec.encode(value.array, self.offset, buffer.bytes)
            self._wire = buffer, buffer.bytes[:count]
        return (*self._wire, ENCODED)

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
        optimizer, total = self.plan.optimizer, current.sum.total()
        if current.number == INITIAL_ROUND or optimizer is None:
            self._replace_value(total, current.number)
        else:
            value = self._value_to_change()
            self.scale(current, total.array)
            step = self.plan.update_step(current)
            optimizer.update(self.plan.declared, self.index, value.array, total.array, step)
            total.retire()
        return True

    def _begin_update(self, current: Round[SliceSum]) -> bool:
        """Forgets what held for the last value; whether the round has a gradient."""
        if self._wire is not None:
            self._wire[0].retire()
            self._wire = None
        self.ready_s = current.ready_s
        if self.has_gradient(current):
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
        value = self.known_value()
        if value.sending:
            value = self.value = self.plan.rules.pool.cast(value, self.plan.dtype)
        return value


def update_together(states: Sequence[SliceState], rounds: Sequence[Round[SliceSum]]) -> bool:
    """As `SliceState.update`, of all slices of a key: with one update of the whole tensor."""
    plan = states[0].plan
    if len(plan.declared.runs) > 1:
        raise ProtocolError(
            f"the optimizer needs whole tensors, and {plan.called} was declared for "
            f"{len(plan.declared.runs)} servers"
        )
    have = [state._begin_update(current) for state, current in zip(states, rounds)]
    if not have[0]:
        return False
    totals = [current.sum.total() for current in rounds]
    for state, current, total in zip(states, rounds, totals):
        state.scale(current, total.array)
    joined = np.concatenate([total.array for total in totals])
    for total in totals:
        total.retire()
    values = [state._value_to_change() for state in states]
    weight = np.concatenate([value.array for value in values])
    optimizer = plan.optimizer
    assert optimizer is not None
    optimizer.update(plan.declared, WHOLE, weight, joined, plan.update_step(rounds[0]))
    for state, value in zip(states, values):
        value.array[:] = weight[state.offset : state.offset + state.length]
    return True
