"""Workers have different numbers of batches, those of the arguments, and leave one after the other.

Beside the same training in this process, by the mean gradient of the workers that are there.
"""

import p3kv.torch  # noqa: I001
import copy
import sys

import torch
from torch import nn
from torch_refusals import refused

BATCHES = [int(number) for number in sys.argv[1:]]


class Net(nn.Module):
    """Layers, of which workers of odd rank use the last one in odd steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, uses_last: bool) -> torch.Tensor:
        x = self.norm(self.first(x)).tanh()
        return (self.last(x) if uses_last else x).square().mean()


def loss(net: Net, step: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    return net(torch.randn(6, 4, generator=made), rank % 2 == 0 or step % 2 == 1)


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)


def main() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    optimizer, alone = p3kv.torch.Optimizer(net, sgd(net)), sgd(twin)
    refused("the mean of buffers would be wrong", p3kv.torch.Optimizer, net, sgd(net), "average")
    refused("clipped by the mean gradient's norm would be wrong", optimizer.clip_grad_norm_, 1.0)
    rank = optimizer.rank
    for step in range(BATCHES[rank]):
        optimizer.zero_grad()
        loss(net, step, rank).backward()
        optimizer.step()
        there = [one for one, batches in enumerate(BATCHES) if step < batches]
        alone.zero_grad()
        before = copy.deepcopy(twin.norm.state_dict())
        for one in there:
            twin.norm.load_state_dict(before)
            (loss(twin, step, one) / len(there)).backward()
            if one == 0:
                of_rank_0 = copy.deepcopy(twin.norm.state_dict())
        if 0 in there:
            before = of_rank_0
        # The statistics are worker 0's; its weights are updated with the others.
        buffers = {name: before[name] for name, _ in twin.norm.named_buffers()}
        twin.norm.load_state_dict({**twin.norm.state_dict(), **buffers})
        alone.step()
        for name, value in twin.state_dict().items():
            torch.testing.assert_close(net.state_dict()[name], value)
    print(f"worker {rank} was right for {BATCHES[rank]} steps")


main()
