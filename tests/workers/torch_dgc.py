"""Trains with the codec dgc, which applies SGD's momentum on the workers, and compares with one
process."""

import p3kv.torch  # noqa: I001
from typing import Any

import torch
from p3kv.errors import StatesError
from p3kv.worker import this_process
from torch import nn
from torch_refusals import refused

STEPS, BATCH = 10, 16


def made(net: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, **settings)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 5))


def backward(net: nn.Module, step: int, rank: int, share: float) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn((BATCH, 20), generator=random), torch.randn((BATCH, 5), generator=random)
    (nn.functional.mse_loss(net(x), y) * share).backward()


def main() -> None:
    net, twin = network(), network()
    optimizer, alone = p3kv.torch.Optimizer(net, made(net)), made(twin)
    rank, workers = this_process.worker().rank, this_process.worker().num_workers
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        for one in (optimizer, alone):
            one.zero_grad()
        backward(net, step, rank, 1.0)
        for other in range(workers):
            backward(twin, step, other, 1 / workers)
        alone.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        if step == 0:
            refused("not the gradient", optimizer.clip_grad_norm_, 1.0)
        optimizer.step()
        alone.step()
        schedule.step()
    for mine, theirs in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
    refused("a file would lack it", optimizer.state_dict, kind=StatesError)
    other = network()
    refused(
        "without nesterov", p3kv.torch.Optimizer, other,
        made(other, nesterov=True),
    )  # fmt: skip
    adam = torch.optim.Adam(other.parameters())
    refused("SGD with momentum", p3kv.torch.Optimizer, other, adam)
    print("right with dgc")


main()
