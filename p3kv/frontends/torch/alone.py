"""Steps of a process without p3kv's servers, and of copies."""

from __future__ import annotations

import importlib
import logging
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, List, NoReturn, Optional

import torch

from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.environment import has_launcher
from p3kv.frontends.torch.joining import How
from p3kv.frontends.torch.steps import Number, Steps, evaluated, own_step
from p3kv.frontends.torch.trials import TorchTrial

_log = logging.getLogger("p3kv")


class AloneSteps(Steps):
    """Does what the script's optimizer does, in a process that belongs to no job or that `p3kv
    compare` runs without p3kv."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, trial: Optional[TorchTrial] = None
    ) -> None:
        super().__init__(None, optimizer)
        self._trial = trial
        self._counts = True
        """Whether the next step has a weight, so that it is made."""

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        skips = self._takes_skip()
        counts, self._counts = self._counts, True
        if skips or not counts:
            return evaluated(closure)
        if self._trial is None:
            return own_step(self._optimizer, closure)
        return self._trial.update(self._optimizer, closure)

    def check_added(self, parameters: Any) -> None:
        pass

    def wait(self) -> None:
        pass

    def joined(self, how: How) -> ContextManager[None]:
        return nullcontext()

    def shares(self) -> List[float]:
        workers = 1 if self._trial is None else self._trial.place[1]
        return [1 / workers] * workers

    def weigh(self, weight: float) -> None:
        """A mean of one is that one, whatever its weight; and nothing if that is 0."""
        self._counts = weight > 0

    def sum(self, number: Number) -> Number:
        return number if self._trial is None else self._trial.sum(number)

    def stop(self) -> None:
        pass


class CopiedSteps(AloneSteps):
    """Refuses the steps of a copy in a job, which would train one worker alone."""

    def step(self, *_: Any, **__: Any) -> NoReturn:
        raise NotSupportedError(
            "this optimizer is a copy, which trains nothing: attach it by optimizer = "
            "p3kv.torch.Optimizer(model, optimizer), with the model that has its parameters"
        )

    clip = skip = weigh = sum = step


def warn_alone(what: str = "p3kv.torch.Optimizer") -> None:
    """Says that no launcher has started this process."""
    _log.warning(
        "p3kv: %s trains in this process alone, since no launcher has started it. 'p3kv launch "
        "-n 2 -- python train.py' starts two workers.",
        what,
    )


def meet_alone() -> None:
    """Has a process group of a process that no launcher has started be of this process alone,
    where torch would ask for RANK."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    from_environment = rendezvous._rendezvous_handlers["env"]

    def meet(url: str, **named: Any) -> Any:
        if has_launcher() or "rank=" in url or "world_size=" in url:
            return from_environment(url, **named)
        return iter([(torch.distributed.HashStore(), 0, 1)])

    rendezvous._rendezvous_handlers["env"] = meet
