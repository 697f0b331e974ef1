"""Bounded: stale-synchronous parallel (Q. Ho et al., NIPS'13), eager and lazy."""

from __future__ import annotations

from typing import Union

from p3kv.consistency.consistency import (
    CONSISTENCIES,
    Consistency,
    LocalTraining,
    prediction,
    whole_number,
)
from p3kv.errors import ConfigError

_NAME = "bounded"


class Bounded(Consistency):
    """Stale-synchronous parallel: each push updates the value at once, and a worker goes on with a
    value that has all its own pushes, and those of each other worker but for the last `staleness`
    rounds.

    So no worker is more than `staleness` rounds ahead of the slowest (the modular parameter server,
    code 4.4, whose client asks for the same before it uses a layer). With staleness 0 workers share
    rounds, as bulk-synchronous ones do. What a worker computes depends on time.

    A lazy worker updates its own weights by its part of what its optimizer does, and exchanges what
    these have changed when its copy of all else would be older than `staleness` rounds: once in
    `staleness` + 1 steps, when it waits for the others' changes of as many steps. Its numbers do
    not depend on time.
    """

    def __init__(
        self,
        num_workers: int,
        staleness: int = 3,
        predict: Union[bool, str] = False,
        lazy: Union[bool, int] = False,
    ) -> None:
        """`predict`: servers send the weight predicted as many updates ahead as other workers make
        on average before this worker's next push: one each. By equation 4 of SpecTrain (True), or
        with momentum that decays ("damped").

        Raises ConfigError for a staleness that is not a whole number from 0 on, for another
        prediction, and for one with `lazy`: servers have no step of a worker's to predict.
        """
        super().__init__(num_workers)
        whole_number(staleness, 0, _NAME, "staleness")
        self.damped = prediction(predict, _NAME)
        if lazy not in (0, 1):
            raise ConfigError(f"the consistency {_NAME!r} has lazy={lazy!r}; it must be 0 or 1")
        if lazy and predict:
            raise ConfigError(
                f"the consistency {_NAME!r} has lazy={lazy} and predict={predict}: a "
                "lazy worker updates its weights itself, so servers can't predict them; leave "
                "one of them out"
            )
        self._slack = 0 if lazy else staleness
        """How many rounds a value may lack with which a worker goes on."""
        self.own_rounds = self._slack > 0
        self.window = 1 if self.own_rounds else 2
        self.predicts = num_workers - 1 if predict and self.own_rounds else 0
        if lazy and staleness:
            self.local = LocalTraining(staleness + 1, 1.0, 0.0, False, 0, adds=True)

    def needs(self, round: int) -> int:
        return round - self._slack


CONSISTENCIES.register(_NAME, Bounded)
