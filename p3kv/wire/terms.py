"""Terms on which all processes must agree, and from which round on they hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import List, Optional

from p3kv.errors import ProtocolError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import Terms

FIRST_GENERATION = 0
"""Whose terms hold in all rounds of keys whose rounds are each worker's own."""


class TermsByRound:
    """The terms of every round, the same on all workers and servers.

    This is the one way by which anything changes that all must agree on in a round: new terms hold
    from a round on (`worker/tuning.py` has the proof that everybody knows them in time). A
    generation is consecutive rounds with the same terms. Generations count from 0.
    """

    def __init__(self) -> None:
        self._from_rounds: List[int] = []
        self._terms: List[Terms] = []
        self._newest_from: float = math.inf

    def set(self, from_round: int, terms: Terms) -> bool:
        """Sets the terms from a round on; False if that is known already.

        Raises ProtocolError when it contradicts an earlier announcement.
        """
        if self._from_rounds and from_round <= self._from_rounds[-1]:
            if (from_round, terms) in zip(self._from_rounds, self._terms):
                return False
            raise ProtocolError(
                f"it wants {terms} from round {from_round} on, where {self._terms[-1]} are agreed "
                f"on from round {self._from_rounds[-1]} on"
            )
        self._from_rounds.append(from_round)
        self._terms.append(terms)
        self._newest_from = from_round
        return True

    def begin(self, terms: Terms) -> None:
        """Sets the terms of the first rounds, on a worker, once. Worker rank 0 may already push
        then, and may have announced others for later rounds."""
        self._from_rounds.insert(0, INITIAL_ROUND)
        self._terms.insert(0, terms)
        self._newest_from = self._from_rounds[-1]

    def generation(self, round: int) -> int:
        """The generation of a round; -1 before the first."""
        # Called for every slice, and nearly always for the last generation.
        if round >= self._newest_from:
            return len(self._terms) - 1
        return bisect_right(self._from_rounds, round) - 1

    def first_round(self, generation: int) -> int:
        """The first round of a generation."""
        return self._from_rounds[generation]

    def last_round(self, generation: int) -> float:
        """The last round of a generation; infinite while no other terms are agreed on."""
        if generation + 1 == len(self._from_rounds):
            return math.inf
        return self._from_rounds[generation + 1] - 1

    def of(self, generation: int) -> Terms:
        """The terms of a generation."""
        return self._terms[generation]

    @property
    def last_generation(self) -> int:
        """The newest generation; -1 before the first."""
        return len(self._terms) - 1

    @property
    def newest(self) -> Optional[Terms]:
        """Terms of the last generation; None before the first."""
        return self._terms[-1] if self._terms else None

    def first_only(self) -> TermsByRound:
        """The terms of the first generation, for all rounds."""
        first = TermsByRound()
        first.set(self.first_round(FIRST_GENERATION), self.of(FIRST_GENERATION))
        return first

    @property
    def smallest_slice_size(self) -> int:
        """The smallest slice size of all generations; ValueError before the first."""
        return min(terms.slice_size for terms in self._terms)
