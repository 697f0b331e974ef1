"""What all processes agree on holds from a round on, and contradictions are refused."""

from __future__ import annotations

import math
from typing import Dict

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p3kv.errors import ProtocolError
from p3kv.wire.messages import SliceSizes
from p3kv.wire.slice_sizes import SliceSizesByRound


class Rounds(RuleBasedStateMachine):
    """The slice sizes of all rounds, beside what was said."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = SliceSizesByRound()
        self.said: Dict[int, int] = {}

    @rule(from_round=st.integers(0, 9), size=st.integers(1, 3))
    def say(self, from_round: int, size: int) -> None:
        last = max(self.said, default=-1)
        if from_round > last:
            assert self.sizes.set(from_round, SliceSizes(size))
            self.said[from_round] = size
        elif self.said.get(from_round) == size:
            assert not self.sizes.set(from_round, SliceSizes(size))
        else:
            with pytest.raises(ProtocolError, match="agreed on"):
                self.sizes.set(from_round, SliceSizes(size))

    @invariant()
    def every_round_has_the_sizes_said_last(self) -> None:
        generations = [self.sizes.generation(round_) for round_ in range(12)]
        assert generations == sorted(generations)
        for round_, generation in enumerate(generations):
            before = [r for r in self.said if r <= round_]
            assert generation == len(before) - 1
            if before:
                assert self.sizes.of(generation).slice_size == self.said[max(before)]
                assert round_ <= self.sizes.last_round(generation)
                assert self.sizes.last_round(generation) + 1 in {*self.said, math.inf}


test_slice_sizes_hold_from_their_round_on = Rounds.TestCase
