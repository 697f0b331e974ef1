"""Trains matrices by Muon and the other parameters by AdamW, with two optimizers of p3kv.torch, and
compares with the same training in this process alone."""

import p3kv.torch  # noqa: I001
from typing import List

import torch
from p3kv.worker import this_process
from torch import nn

STEPS, BATCH = 8, 16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 60)
        self.second = nn.Linear(60, 30)
        self.out = nn.Linear(30, 5)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))


def made(net: Net) -> List[torch.optim.Optimizer]:
    matrices = [net.first.weight, net.second.weight]
    others = [one for one in net.parameters() if all(one is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]


def backward(net: Net, step: int, rank: int, share: float) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn((BATCH, 20), generator=random), torch.randn((BATCH, 5), generator=random)
    (nn.functional.mse_loss(net(x), y) * share).backward()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    optimizers = [p3kv.torch.Optimizer(net, one) for one in made(net)]
    rank, workers = this_process.worker().rank, this_process.worker().num_workers
    alone = made(twin)
    for step in range(STEPS):
        for one in (*optimizers, *alone):
            one.zero_grad()
        backward(net, step, rank, 1.0)
        for other in range(workers):
            backward(twin, step, other, 1 / workers)
        for one in (*optimizers, *alone):
            one.step()
        if step == 3:
            for one in optimizers:
                one.load_state_dict(one.state_dict())
    # Muon rounds gradients to bfloat16: with two workers, whose sum has no order, they are equal.
    for (name, mine), theirs in zip(net.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5, msg=name)
    for mine, theirs in zip(optimizers, alone):
        for one, other in zip(mine.state_dict()["state"].values(), theirs.state.values()):
            assert one.keys() == other.keys()
            for name, value in other.items():
                torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5, msg=name)
    print("right with Muon")


main()
