"""Rounds that go on without workers that have left."""

from __future__ import annotations

import logging
from typing import Collection, List, Optional, Set

from p3kv.server.optimizer import Optimizer
from p3kv.wire.header import INITIAL_ROUND

_log = logging.getLogger(__name__)


class Leavers:
    """The workers that have left in order, if the job lets them: rounds do not wait for them.

    A worker's goodbye comes after its last push, on each server. So all servers sum the same
    workers' gradients in a round, whenever the goodbye comes.

    Some rounds need worker rank 0 all the same. It alone gives initial values, and tells the
    servers their optimizer before its first push, so the first round of each key needs it; so does
    every round of a job that clips gradients, and of an optimizer to which rank 0 tells a number
    for each update. Belongs to the server's thread.
    """

    def __init__(self) -> None:
        self.ranks: Set[int] = set()
        """Empty while none has left, and where rounds wait for all workers."""
        self.gone: Set[int] = set()
        """All that have left, whether or not rounds wait for them."""
        self.clips = False
        """Whether a step's gradients have been clipped."""
        self._warned = False

    def ends(
        self,
        num_workers: int,
        round: int,
        arrived: Set[int],
        optimizer: Optional[Optimizer],
    ) -> bool:
        """Whether a round ends, which is not the initial one, now that these workers have pushed.

        `optimizer` is that of the key's store.
        """
        if self._needs_rank_0(round, arrived, optimizer):
            return False
        ends = len(arrived | self.ranks) == num_workers
        if ends and 0 not in arrived and not self._warned:
            self._warned = True
            _log.warning(
                "the job goes on without worker 0, which has left: the optimizer's settings, such "
                "as the learning rate, the forward order and the slice size stay as they are"
            )
        return ends

    def missing(
        self,
        num_workers: int,
        round: int,
        arrived: Set[int],
        optimizer: Optional[Optimizer],
    ) -> List[int]:
        """Ranks for whose pushes a round still waits; those that have left, too, if needed."""
        if round == INITIAL_ROUND:
            return [0]
        missing = [
            rank for rank in range(num_workers) if rank not in arrived and rank not in self.ranks
        ]
        if self.ranks and self._needs_rank_0(round, arrived, optimizer):
            return [0, *missing]
        return missing

    def absent(self, arrived: Set[int]) -> int:
        """How many workers have left before a round for which these have pushed."""
        return len(self.ranks - arrived) if self.ranks else 0

    def leads_no_more(self, arrived: Collection[int]) -> bool:
        """Whether worker rank 0 has left before a round for which these workers have pushed."""
        return 0 in self.ranks and 0 not in arrived

    def _needs_rank_0(
        self, round: int, arrived: Collection[int], optimizer: Optional[Optimizer]
    ) -> bool:
        if not self.leads_no_more(arrived):
            return False
        by_rank_0 = optimizer is not None and optimizer.needs_rank_0
        return round == INITIAL_ROUND + 1 or self.clips or by_rank_0
