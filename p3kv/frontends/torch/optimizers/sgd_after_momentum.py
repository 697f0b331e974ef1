"""SGD for gradients whose momentum a codec has applied on the workers."""

from __future__ import annotations

from typing import Any, Iterable

import torch


class SGDAfterMomentum(torch.optim.Optimizer):
    """SGD with momentum for gradients that bring theirs along: only weight decay gets it here.

    In torch's SGD, buffer = momentum * buffer + gradient + decay * weight, and the weight loses lr
    * buffer. The gradient's part of the buffer is what arrives.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize
        }  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Updates all parameters by their gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                update = -parameter.grad if group["maximize"] else parameter.grad
                if group["weight_decay"]:
                    buffer = self.state[parameter].get("momentum_buffer")
                    if buffer is None:
                        buffer = torch.zeros_like(parameter)
                        self.state[parameter]["momentum_buffer"] = buffer
                    buffer.mul_(group["momentum"]).add_(parameter, alpha=group["weight_decay"])
                    update = update + buffer
                parameter.add_(update, alpha=-group["lr"])
