"""Sums of a slice's gradients in one round."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, Dict, List, Optional

import numpy as np

from p3kv.codecs import Part
from p3kv.common.finite import check_sum
from p3kv.server.engine.buffers import Buffer
from p3kv.server.engine.plan import KeyPlan
from p3kv.wire.header import INITIAL_ROUND


class SliceSum(ABC):
    """Takes over the gradients' buffers."""

    empty = True
    """Whether no gradient has been added."""

    def __init__(self, plan: KeyPlan, length: int) -> None:
        """`length` is the slice's, in elements."""
        self._plan = plan
        self._length = length

    @abstractmethod
    def add(self, rank: int, gradient: Buffer) -> None:
        """Adds a worker's gradient."""

    def add_encoded(self, rank: int, encoded: memoryview, part: Part) -> None:
        """Adds a gradient that the key's codec has encoded, and leaves its memory to the caller."""
        gradient = self._plan.rules.pool.get(self._length, self._plan.dtype)
        self._plan.decoder.decode(encoded, part, gradient.array)
        self.add(rank, gradient)

    @abstractmethod
    def latest(self, rank: int) -> np.ndarray:
        """Array with a worker's gradient in it, the one added last."""

    @abstractmethod
    def total(self) -> Buffer:
        """The sum, once all that is to be added has been."""


class RunningSum(SliceSum):
    """Adds in the order of arrival; the first gradient's buffer becomes the sum without a copy."""

    _total: Optional[Buffer] = None

    def add(self, rank: int, gradient: Buffer) -> None:
        if self._total is None:
            self._total, self.empty = gradient, False
        else:
            np.add(self._total.array, gradient.array, out=self._total.array)
            gradient.retire()

    def add_encoded(self, rank: int, encoded: memoryview, part: Part) -> None:
        if self._total is None:
            super().add_encoded(rank, encoded, part)
        else:
            self._plan.decoder.add(encoded, part, self._total.array)

    def latest(self, rank: int) -> np.ndarray:
        return self.total().array

    def total(self) -> Buffer:
        assert self._total is not None
        return self._total


class OrderedSum(SliceSum):
    """Adds in the order of ranks, when all gradients are there: bit for bit the same each time."""

    def __init__(self, plan: KeyPlan, length: int) -> None:
        super().__init__(plan, length)
        self._by_rank: Dict[int, Buffer] = {}

    def add(self, rank: int, gradient: Buffer) -> None:
        self._by_rank[rank], self.empty = gradient, False

    def latest(self, rank: int) -> np.ndarray:
        return self._by_rank[rank].array

    def total(self) -> Buffer:
        ranks = sorted(self._by_rank)
        total = self._by_rank[ranks[0]]
        for rank in ranks[1:]:
            gradient = self._by_rank.pop(rank)
            np.add(total.array, gradient.array, out=total.array)
            gradient.retire()
        return total


class _Wrapping(SliceSum):
    def __init__(self, plan: KeyPlan, length: int, inner: SliceSum) -> None:
        super().__init__(plan, length)
        self._inner = inner

    def latest(self, rank: int) -> np.ndarray:
        return self._inner.latest(rank)

    def total(self) -> Buffer:
        return self._inner.total()


class Widening(_Wrapping):
    """Adds half-precision numbers as single-precision ones."""

    def add(self, rank: int, gradient: Buffer) -> None:
        if gradient.array.dtype != self._plan.sum_dtype:  # else it is a host's sum
            gradient = self._plan.rules.pool.cast(gradient, self._plan.sum_dtype)
        self._inner.add(rank, gradient)
        self.empty = False


class Finite(_Wrapping):
    """Raises NotFinite as soon as the sum has nan or infinity."""

    def __init__(self, plan: KeyPlan, length: int, inner: SliceSum, round: int) -> None:
        super().__init__(plan, length, inner)
        self._round = round

    def add(self, rank: int, gradient: Buffer) -> None:
        self._inner.add(rank, gradient)
        self.empty = False
        check_sum(self.latest(rank), self._plan.called, self._round, rank)

    def add_encoded(self, rank: int, encoded: memoryview, part: Part) -> None:
        self._inner.add_encoded(rank, encoded, part)
        self.empty = False
        check_sum(self.latest(rank), self._plan.called, self._round, rank)

    def total(self) -> Buffer:
        total = super().total()
        check_sum(total.array, self._plan.called, self._round)
        return total


def maker_of_sums(plan: KeyPlan, length: int) -> Callable[[int], SliceSum]:
    """Function that makes the sum of a round, of a slice of so many elements."""
    wraps: List[Callable[[SliceSum, int], SliceSum]] = []
    if plan.sum_dtype != plan.dtype:
        wraps.append(lambda inner, round_: Widening(plan, length, inner))
    if plan.rules.checks_finite:
        wraps.append(lambda inner, round_: Finite(plan, length, inner, round_))
    kind = OrderedSum if plan.rules.deterministic else RunningSum

    def make(round_: int) -> SliceSum:
        total: SliceSum = kind(plan, length)
        if wraps and round_ > INITIAL_ROUND:
            for wrap in wraps:
                total = wrap(total, round_)
        return total

    return make
