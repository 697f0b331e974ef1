"""Refusals of settings and parameters with which p3kv.torch can't train."""

from __future__ import annotations

import torch

from p3kv import config
from p3kv.consistency import Consistency
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.tensors import DTYPES


def check_rule(rule: Consistency, chosen: str) -> None:
    """Raises NotSupportedError for a rule by which p3kv.torch would do something else."""
    if not rule.exchanges_all:
        raise NotSupportedError(
            f"p3kv.torch exchanges each step's gradients, and the consistency '{chosen}' does not: "
            "use another rule"
        )


def check_all_stay(settings: config.Settings, what: str) -> None:
    """Raises NotSupportedError where workers may leave: a worker divides `what` by the number of
    all, and does not know who has left."""
    if settings.let_workers_leave:
        raise NotSupportedError(
            f"{what} would be wrong after a worker has left, and P3KV_LET_WORKERS_LEAVE=1 lets "
            "workers leave: do without one of both"
        )


def check_parameter(parameter: torch.nn.Parameter, name: str) -> None:
    """Raises NotSupportedError for a parameter that can't travel."""
    if parameter.dtype not in DTYPES:
        raise NotSupportedError(
            f"the parameter '{name}' is {parameter.dtype}; p3kv.torch takes "
            f"{', '.join(DTYPES.values())}"
        )
    if torch.nn.parameter.is_lazy(parameter):
        raise NotSupportedError(
            f"the parameter '{name}' has no shape yet: run one forward pass before you make "
            "p3kv.torch.Optimizer"
        )
    if any(not stride and size > 1 for size, stride in zip(parameter.shape, parameter.stride())):
        raise NotSupportedError(
            f"elements of the parameter '{name}', of shape {tuple(parameter.shape)}, share memory: "
            "give each its own by parameter.data = parameter.data.clone()"
        )
