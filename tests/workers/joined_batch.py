"""The gradients of one process that has all workers' batches."""

from __future__ import annotations

import copy
from typing import Callable, Dict

import torch
from torch import nn


def mean_gradients(
    net: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], workers: int
) -> Dict[str, torch.Tensor]:
    """By name, the mean of all workers' gradients, of those parameters of which any has one.
    `loss(net, rank)`: that of a worker's batch, of its own copy of the net."""
    gradients: Dict[str, torch.Tensor] = {}
    for rank in range(workers):
        own = copy.deepcopy(net)
        own.zero_grad()
        loss(own, rank).backward()
        for name, parameter in own.named_parameters():
            if parameter.grad is not None:
                part = parameter.grad.to_dense() / workers
                gradients[name] = gradients.get(name, 0) + part
    return gradients
