"""p3kv's own rules: bulk-synchronous, asynchronous, delayed, bounded and local."""

from __future__ import annotations

import math
from typing import Any, Optional, Union

from p3kv.consistency.consistency import (
    CONSISTENCIES,
    Consistency,
    LocalTraining,
    prediction,
    whole_number,
)
from p3kv.errors import ConfigError


class BulkSynchronous(Consistency):
    """Synchronous SGD. One round more may be open than workers wait for, so that a worker that is
    ahead sends its next gradients while the last round ends."""

    window = 2

    def needs(self, round: int) -> int:
        return round


CONSISTENCIES.register("bulk_synchronous", BulkSynchronous)


ASYNCHRONOUS = "asynchronous"


class Asynchronous(Consistency):
    """Asynchronous SGD: a worker waits for no other. It goes on with the value that has its own
    pushes, and all pushes of others that came before. It may push for one round more while it waits
    for that value."""

    own_rounds = True
    window = 2

    def needs(self, round: int) -> int:
        return 0


CONSISTENCIES.register(ASYNCHRONOUS, Asynchronous)


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
        self._staleness = whole_number(staleness, 0, "delayed", "staleness")
        # As bulk-synchronous, one round more may be open than workers wait for.
        self.window = staleness + 2
        self.damped = prediction(predict, "delayed")
        self.predicts = staleness if predict else 0

    def needs(self, round: int) -> int:
        return round - self._staleness


CONSISTENCIES.register("delayed", Delayed)


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
        whole_number(staleness, 0, "bounded", "staleness")
        self.damped = prediction(predict, "bounded")
        if lazy not in (0, 1):
            raise ConfigError(f"the consistency 'bounded' has lazy={lazy!r}; it must be 0 or 1")
        if lazy and predict:
            raise ConfigError(
                f"the consistency 'bounded' has lazy={lazy} and predict={predict}: a "
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


CONSISTENCIES.register("bounded", Bounded)


_MOST_STEPS = 1_000_000


class Local(BulkSynchronous):
    """DiLoCo (A. Douillard et al., arXiv 2311.08105): a worker makes `steps` steps with its own
    optimizer. Then it pushes by how much its weights differ from the servers' last value, and an
    outer optimizer there, SGD with Nesterov's momentum, makes a new value by the mean difference.

    `streaming`: keys take turns, so that each step sends about as many bytes, and a worker goes on
    meanwhile (arXiv 2501.18512). It adds to a value that comes what it has learned since the
    difference left, so all that a worker learns is in exactly one difference. The paper mixes its
    own weight and the value by a factor in place of this, and loses a part of both.
    """

    def __init__(
        self,
        num_workers: int,
        steps: int = 50,
        rate: float = 0.7,
        momentum: float = 0.9,
        streaming: bool = True,
        delay: Optional[int] = None,
    ) -> None:
        """`rate` and `momentum` are those of the outer optimizer: with `rate=1,momentum=0` the new
        value is the mean of the workers' weights. `delay`: for how many steps more than a link
        needs that carries all of the model in `steps` steps, a worker goes on before it takes a
        value; by default a tenth of `steps`.

        Raises ConfigError for other values.
        """
        super().__init__(num_workers)
        if not _is_whole(steps) or not 1 <= steps <= _MOST_STEPS:
            _refuse("steps", steps, f"a whole number from 1 to {_MOST_STEPS}")
        if not _is_number(rate) or not 0 < rate < math.inf:
            _refuse("rate", rate, "a number above 0")
        if not _is_number(momentum) or not 0 <= momentum < 1:
            _refuse("momentum", momentum, "a number from 0 to less than 1")
        if not isinstance(streaming, bool):
            _refuse("streaming", streaming, "true or false")
        if delay is None:
            delay = math.ceil(steps / 10)
        elif not streaming:
            raise ConfigError(
                f"the consistency 'local' has delay={delay!r} with streaming=false, where workers "
                "wait for values at once: leave one of them out"
            )
        elif not _is_whole(delay) or not 0 <= delay < steps:
            _refuse("delay", delay, f"a whole number from 0 to less than steps, {steps}")
        # One step has no turns to take.
        streams = streaming and steps > 1
        self.local = LocalTraining(steps, float(rate), float(momentum), streams, delay)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


def _refuse(name: str, value: Any, instead: str) -> None:
    raise ConfigError(f"the consistency 'local' has {name}={value!r}; it must be {instead}")


CONSISTENCIES.register("local", Local)
