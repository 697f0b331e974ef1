"""Delayed: a worker goes on with the value of an earlier round than its own."""

from __future__ import annotations

from typing import Union

from p3kv.consistency.consistency import CONSISTENCIES, Consistency, prediction, whole_number

_NAME = "delayed"


class Delayed(Consistency):
    """Stale gradients by a fixed number of rounds: a worker that has pushed for a round goes on
    with the value of the one `staleness` rounds before.

    Sums are still those of one round and of all workers, and which value a worker has does not
    depend on time, so a job repeats bit for bit. With staleness 0 it is bulk-synchronous. A worker
    is at most `staleness` rounds ahead of the slowest.
    """

    def __init__(
        self, num_workers: int, staleness: int = 1, predict: Union[bool, str] = False
    ) -> None:
        """`predict`: servers send the weight predicted `staleness` updates ahead (SpecTrain, 3.3),
        by its equation 4 (True), or with momentum that decays ("damped").

        Raises ConfigError for a staleness that is not a whole number from 0 on, and for another
        prediction.
        """
        super().__init__(num_workers)
        self._staleness = whole_number(staleness, 0, _NAME, "staleness")
        # As bulk-synchronous, one round more may be open than workers wait for.
        self.window = staleness + 2
        self.damped = prediction(predict, _NAME)
        self.predicts = staleness if predict else 0

    def needs(self, round: int) -> int:
        return round - self._staleness


CONSISTENCIES.register(_NAME, Delayed)
