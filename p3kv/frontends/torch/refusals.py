"""Refusals of settings and parameters with which p3kv.torch can't train."""

from __future__ import annotations

import torch

from p3kv import config
from p3kv.consistency import make_consistency
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.buffer_places import AVERAGE, OWN
from p3kv.frontends.torch.tensors import DTYPES


def check_settings(settings: config.Settings) -> None:
    """Raises NotSupportedError for settings by which p3kv.torch would do something else."""
    is_exact = settings.consistency == config.Settings.consistency
    trains_locally = not is_exact and make_consistency(settings.consistency, 1).local is not None
    if not (is_exact or trains_locally) or settings.let_workers_leave:
        raise NotSupportedError(
            "p3kv.torch divides each sum by the number of all workers, and waits for all of them: "
            "unset P3KV_CONSISTENCY and P3KV_LET_WORKERS_LEAVE"
        )


def buffers_with(local: bool, buffers: str) -> str:
    """What becomes of buffers after a step; `local`: workers train by themselves. Raises
    NotSupportedError where they can't be averaged."""
    if not local:
        return buffers
    if buffers == AVERAGE:
        raise NotSupportedError(
            "buffers='average' would have each step wait for the network, and workers train by "
            "themselves (P3KV_CONSISTENCY): leave it out, and each worker keeps its own buffers"
        )
    return OWN


def check_parameter(parameter: torch.nn.Parameter, name: str) -> None:
    """Raises NotSupportedError for a parameter that can't travel."""
    if parameter.device.type != "cpu" or parameter.dtype not in DTYPES:
        raise NotSupportedError(
            f"the parameter '{name}' is {parameter.dtype} on {parameter.device}; p3kv.torch takes "
            f"{', '.join(DTYPES.values())} on the CPU"
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
