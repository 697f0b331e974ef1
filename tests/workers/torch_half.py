"""Trains in half precision with p3kv.torch, and beside it in this process alone, by float32 copies
of the weights: bit for bit the same.

Arguments: a dtype, or "autocast" for float32 that computes in bfloat16; the optimizer's name; then
perhaps a step after which each worker kills itself.
"""

import p3kv.torch  # noqa: I001
import os
import signal
import sys
import time
from typing import List

import torch
from p3kv.worker import this_process
from torch import nn

STEPS, BATCH = 16, 8
OPTIMIZERS = {"SGD": {"lr": 0.05, "momentum": 0.9}, "AdamW": {"lr": 0.01}}
DTYPE, NAME, *DIES = sys.argv[1:]
IS_AUTOCAST = DTYPE == "autocast"
HALF = torch.float32 if IS_AUTOCAST else getattr(torch, DTYPE)


class Net(nn.Module):
    """All but its last layer are of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(20, 40).to(HALF)
        self.norm = nn.LayerNorm(40).to(HALF)
        self.out = nn.Linear(40, 5)
        self.out_scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=IS_AUTOCAST):
            return self.out_scale * self.out(
                torch.relu(self.norm(self.hidden(x.to(HALF)))).to(torch.float32)
            )


def made(parameters: List[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, NAME)(parameters, **OPTIMIZERS[NAME])
    return optimizer


def backward(net: Net, step: int, rank: int) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn((BATCH, 20), generator=random), torch.randn((BATCH, 5), generator=random)
    nn.functional.mse_loss(net(x).float(), y).backward()


class Alone:
    """One process with float32 copies of the weights."""

    def __init__(self, workers: int) -> None:
        torch.manual_seed(3)
        self.net = Net()
        self.masters = [nn.Parameter(one.detach().float()) for one in self.net.parameters()]
        self.optimizer = made(self.masters)
        self.workers = workers

    def step(self, step: int) -> None:
        for master in self.masters:
            master.grad = None
        for rank in range(self.workers):
            self.net.zero_grad()
            backward(self.net, step, rank)
            for master, one in zip(self.masters, self.net.parameters()):
                gradient = one.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
        for master in self.masters:
            master.grad /= self.workers
        self.optimizer.step()
        for master, one in zip(self.masters, self.net.parameters()):
            one.data.copy_(master.data)


def main() -> None:
    torch.manual_seed(3)
    net = Net()
    optimizer = p3kv.torch.Optimizer(net, made(list(net.parameters())))
    rank, workers = this_process.worker().rank, this_process.worker().num_workers
    alone = Alone(workers)
    resumed = optimizer.resumed_steps
    print(f"begins after {resumed} steps")
    for step in range(STEPS):
        alone.step(step)
        if step < resumed:
            continue
        optimizer.zero_grad()
        backward(net, step, rank)
        optimizer.step()
        if step == 6:
            optimizer.load_state_dict(optimizer.state_dict())
        equal(net, alone)
        if DIES and step == int(DIES[0]) and not resumed:
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    states = optimizer.state_dict()["state"]
    for at, (master, one) in enumerate(zip(alone.masters, net.parameters())):
        if one.dtype is torch.float32:
            assert "master_param" not in states[at]
        else:
            assert torch.equal(states[at].pop("master_param"), master.detach())
        for name, value in alone.optimizer.state_dict()["state"][at].items():
            torch.testing.assert_close(states[at].pop(name), value, rtol=0, atol=0)
        assert not states[at], states[at].keys()
    print(f"right in {DTYPE}")


def equal(net: Net, alone: Alone) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), alone.net.parameters()):
        assert torch.equal(mine.detach(), theirs.detach()), name
        assert mine.dtype == (HALF if "out" not in name else torch.float32)


main()
