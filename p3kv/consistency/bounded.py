"""Bounded: stale-synchronous parallel (Q. Ho et al., NIPS'13)."""

from __future__ import annotations

from typing import Union

from p3kv.consistency.consistency import CONSISTENCIES, Consistency, prediction, whole_number

_NAME = "bounded"


class Bounded(Consistency):
    """Stale-synchronous parallel: each push updates the value at once, and a worker goes on with a
    value that has all its own pushes, and those of each other worker but for the last `staleness`
    rounds.

    So no worker is more than `staleness` rounds ahead of the slowest (the modular parameter server,
    code 4.4, whose client asks for the same before it uses a layer). With staleness 0 workers share
    rounds, as bulk-synchronous ones do. What a worker computes depends on time.
    """

    def __init__(
        self, num_workers: int, staleness: int = 3, predict: Union[bool, str] = False
    ) -> None:
        """`predict`: servers send the weight predicted as many updates ahead as other workers make
        on average before this worker's next push: one each. By equation 4 of SpecTrain (True), or
        with momentum that decays ("damped").

        Raises ConfigError for a staleness that is not a whole number from 0 on, and for another
        prediction.
        """
        super().__init__(num_workers)
        self._staleness = whole_number(staleness, 0, _NAME, "staleness")
        self.own_rounds = staleness > 0
        self.window = 1 if self.own_rounds else 2
        self.damped = prediction(predict, _NAME)
        self.predicts = num_workers - 1 if predict and self.own_rounds else 0

    def needs(self, round: int) -> int:
        return round - self._staleness


CONSISTENCIES.register(_NAME, Bounded)
