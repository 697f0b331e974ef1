"""How an optimizer trains: what `AloneSteps`, `ServerSteps` and `LocalSteps` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Callable, Dict, List, Optional

import torch


class Steps(ABC):
    """Makes an optimizer's steps. Where a subclass says nothing else, this process updates the
    weights itself: the script's optimizer has all states, and gradients are this process's.

    Belongs to the script's thread.
    """

    takes_more_parameters = False
    """Whether parameters may be added."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        """`optimizer` is the script's."""
        self._optimizer = optimizer

    @abstractmethod
    def step(self, closure: Optional[Callable[[], Any]]) -> Any:
        """Has the weights be those of this step for whoever reads them from now on; returns what
        the closure returns."""

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clips the step by the norm of its gradients, which is returned."""
        return torch.nn.utils.clip_grad_norm_(parameters_of(self._optimizer), max_norm)

    @abstractmethod
    def wait(self) -> None:
        """Waits until all weights and buffers are there."""

    def settle(self) -> None:
        """As `wait`, also for values that weights are to take in a later step."""
        self.wait()

    @abstractmethod
    def synchronize(self) -> None:
        """Waits until all weights are there, and gives them the servers' own values."""

    @abstractmethod
    def stop(self) -> None:
        """Waits for all values; other steps train the parameters from now on."""

    def check_states(self, call: str) -> None:  # noqa: B027
        """Raises NotSupportedError where the states can't be read or set, as `call` is to do."""

    def fetch_states(self) -> None:  # noqa: B027
        """Has the script's optimizer have the states after all steps."""

    def give_states(self, state_dict: Dict[str, Any]) -> None:  # noqa: B027
        """Goes on from the states that the script's optimizer has taken from a `state_dict`."""

    @property
    @abstractmethod
    def takes_scaled_gradients(self) -> bool:
        """Whether `step` unscales what torch's GradScaler has scaled, and not the scaler."""


def parameters_of(optimizer: torch.optim.Optimizer) -> List[torch.nn.Parameter]:
    """All parameters of an optimizer, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def evaluated(closure: Optional[Callable[[], Any]]) -> Any:
    """What a closure returns that is called with gradients; None where there is none."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
