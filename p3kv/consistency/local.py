"""Local: workers train by themselves, and exchange what they have learned every some steps."""

from __future__ import annotations

import math
from typing import Any, Optional

from p3kv.consistency.bulk_synchronous import BulkSynchronous
from p3kv.consistency.consistency import CONSISTENCIES, LocalTraining
from p3kv.errors import ConfigError

MOST_STEPS = 1_000_000


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
        if not _is_whole(steps) or not 1 <= steps <= MOST_STEPS:
            _refuse("steps", steps, f"a whole number from 1 to {MOST_STEPS}")
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
