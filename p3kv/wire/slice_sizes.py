"""Slice sizes on which all processes must agree, and from which round on they hold."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import List, Optional

from p3kv.errors import ProtocolError
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import SliceSizes

FIRST_GENERATION = 0
"""Whose slice sizes hold in all rounds of keys whose rounds are each worker's own."""


class SliceSizesByRound:
    """The slice sizes of every round, the same on all workers and servers.

    All must agree on them in a round, and this is the one way by which they change: new ones hold
    from a round on (`worker/tuning.py` has the proof that everybody knows them in time). A
    generation is consecutive rounds with the same slice sizes. Generations count from 0.
    """

    def __init__(self) -> None:
        self._from_rounds: List[int] = []
        self._sizes: List[SliceSizes] = []
        self._newest_from: float = math.inf
        self.last_generation = -1
        """The newest generation; -1 before the first."""

    def set(self, from_round: int, sizes: SliceSizes) -> bool:
        """Sets the slice sizes from a round on; False if that is known already. Raises
        ProtocolError when it contradicts an earlier announcement."""
        if self._from_rounds and from_round <= self._from_rounds[-1]:
            if (from_round, sizes) in zip(self._from_rounds, self._sizes):
                return False
            raise ProtocolError(
                f"it wants {sizes} from round {from_round} on, where {self._sizes[-1]} are agreed "
                f"on from round {self._from_rounds[-1]} on"
            )
        self._from_rounds.append(from_round)
        self._sizes.append(sizes)
        self._newest_from = from_round
        self.last_generation += 1
        return True

    def begin(self, sizes: SliceSizes) -> None:
        """Sets the slice sizes of the first rounds, on a worker, once. Worker rank 0 may already
        push then, and may have announced others for later rounds."""
        self._from_rounds.insert(0, INITIAL_ROUND)
        self._sizes.insert(0, sizes)
        self._newest_from = self._from_rounds[-1]
        self.last_generation += 1

    def generation(self, round: int) -> int:
        """The generation of a round; -1 before the first."""
        # Called for every slice, and nearly always for the last generation.
        if round >= self._newest_from:
            return self.last_generation
        return bisect_right(self._from_rounds, round) - 1

    def first_round(self, generation: int) -> int:
        """The first round of a generation."""
        return self._from_rounds[generation]

    def last_round(self, generation: int) -> float:
        """The last round of a generation; infinite while no other slice sizes are agreed on."""
        if generation + 1 == len(self._from_rounds):
            return math.inf
        return self._from_rounds[generation + 1] - 1

    def of(self, generation: int) -> SliceSizes:
        """The slice sizes of a generation."""
        return self._sizes[generation]

    @property
    def newest(self) -> Optional[SliceSizes]:
        """Slice sizes of the last generation; None before the first."""
        return self._sizes[-1] if self._sizes else None

    def first_only(self) -> SliceSizesByRound:
        """The slice sizes of the first generation, for all rounds."""
        first = SliceSizesByRound()
        first.set(self.first_round(FIRST_GENERATION), self.of(FIRST_GENERATION))
        return first

    @property
    def smallest_slice_size(self) -> int:
        """The smallest slice size of all generations; ValueError before the first."""
        return min(sizes.slice_size for sizes in self._sizes)
