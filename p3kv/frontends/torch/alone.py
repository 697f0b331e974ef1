"""Steps of a process without p3kv's servers."""

from __future__ import annotations

import logging
from typing import Any, Callable, Optional

import torch

from p3kv.frontends.torch.steps import Steps
from p3kv.frontends.torch.trials import TorchTrial

_log = logging.getLogger("p3kv")


class AloneSteps(Steps):
    """Does what the script's optimizer does, in a process that belongs to no job or that `p3kv
    compare` runs without p3kv."""

    takes_more_parameters = True
    takes_scaled_gradients = False  # as most of torch's own: the scaler unscales before `step`

    def __init__(self, optimizer: torch.optim.Optimizer, trial: Optional[TorchTrial]) -> None:
        super().__init__(optimizer)
        self._trial = trial
        if trial is None:
            _log.warning(
                "p3kv: p3kv.torch.Optimizer trains in this process alone, since no launcher has "
                "started it. 'p3kv launch -n 2 -- python train.py' starts two workers."
            )

    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        if self._trial is None:
            return self._optimizer.step(closure)
        return self._trial.update(self._optimizer, closure)

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def stop(self) -> None:
        pass
