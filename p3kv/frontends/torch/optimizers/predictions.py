"""torch's optimizers that can say what a weight will be some updates later."""

from __future__ import annotations

from typing import Optional

import numpy as np
import torch

from p3kv.consistency.predicting import adam, momentum_updates
from p3kv.frontends.torch.optimizers.optimizer_settings import class_of


def predicts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is one of those: SGD with momentum, Adam or AdamW."""
    kind, groups = class_of(optimizer), optimizer.param_groups
    if kind is torch.optim.SGD:
        return all(group["momentum"] for group in groups)
    return kind in (torch.optim.Adam, torch.optim.AdamW)


def predicted(
    optimizer: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: int, damped: bool
) -> Optional[np.ndarray]:
    """The only parameter of an optimizer, which has updated it, `steps` updates later, in a flat
    array of its own."""
    if not predicts(optimizer):
        return None
    (group,) = optimizer.param_groups
    state, sign = optimizer.state[parameter], -1.0 if group["maximize"] else 1.0
    weight = parameter.detach().numpy()
    if isinstance(optimizer, torch.optim.SGD):
        updates = momentum_updates(group["momentum"], steps, damped)
        if damped and group["nesterov"]:
            updates *= group["momentum"]
        buffer = state["momentum_buffer"].numpy()
        return np.asarray(weight - sign * float(group["lr"]) * updates * buffer)
    square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].numpy()
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    rate = float(group["lr"])
    return adam(
        weight, sign * state["exp_avg"].numpy(), square, int(state["step"]), rate, group["betas"],
        group["eps"], True, rate * group["weight_decay"] if decoupled else 0.0, steps, damped,
    )  # fmt: skip
