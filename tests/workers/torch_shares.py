"""Workers get shares of batches by how fast they are: the last is half as fast as the others.

Arguments: seconds for a sample of a fast one; how many epochs; who updates.
"""

import p3kv.torch  # noqa: I001
import copy
import sys
import time
from typing import Any, List

import torch
from p3kv.errors import ConfigError
from p3kv.frontends.torch.shares import parts_of, shares_of
from torch import nn
from torch_refusals import refused

SAMPLE_S, EPOCHS = float(sys.argv[1]), int(sys.argv[2])
BATCH, BATCHES, LEFT = 56, 4, 9


def numbers_are_shared_out() -> None:
    assert parts_of(56, [2 / 7, 2 / 7, 2 / 7, 1 / 7]) == [16, 16, 16, 8]
    assert parts_of(5, [0.9, 0.05, 0.05]) == [3, 1, 1]
    assert parts_of(3, [0.98, 0.01, 0.01]) == [1, 1, 1]
    for size in range(4, 40):
        parts = parts_of(size, [0.1, 0.2, 0.3, 0.4])
        assert sum(parts) == size and min(parts) >= 1
    assert shares_of([0.0, 0.0]) == [0.5, 0.5]
    assert shares_of([3.0, 0.0, 1.0]) == [0.5, 1 / 3, 1 / 6]


def loss(net: nn.Module, data: torch.Tensor, batch: List[int]) -> torch.Tensor:
    return (net(data[batch, :6]) - data[batch, 6:]).square().mean()


def main() -> None:
    numbers_are_shared_out()
    torch.manual_seed(1)
    data = torch.randn(BATCH * BATCHES + LEFT, 8)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    twin = copy.deepcopy(net)
    made: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer = p3kv.torch.Optimizer(net, made, updates=sys.argv[3])
    alone = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    rank, workers = optimizer.rank, optimizer.num_workers
    refused(
        "give a whole number from", p3kv.torch.ShareSampler, data, optimizer, 0, kind=ConfigError
    )
    assert optimizer.shares() == [1 / workers] * workers
    sample_s = SAMPLE_S * (2 if rank == workers - 1 else 1)
    sampler = p3kv.torch.ShareSampler(data, optimizer, BATCH)
    loader = torch.utils.data.DataLoader(range(len(data)), batch_sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sizes, times_s = [], []
        for x in loader:
            optimizer.zero_grad()
            optimizer.weigh(len(x))
            time.sleep(sample_s * len(x))  # computes
            loss(net, data, x.tolist()).backward()
            optimizer.step()
            sizes.append(len(x))
            times_s.append(time.monotonic())
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch)).tolist()
        assert len(sizes) == len(sampler) == BATCHES + 1
        for first in range(0, len(data), BATCH):
            alone.zero_grad()
            loss(twin, data, order[first : first + BATCH]).backward()
            alone.step()
        for mine, theirs in zip(net.parameters(), twin.parameters()):
            torch.testing.assert_close(mine, theirs)
        step_s = (times_s[-2] - times_s[0]) / (BATCHES - 1)
        reached = BATCH / step_s * SAMPLE_S
        print(f"worker {rank}, epoch {epoch}: {sizes}, {reached:.3f} workers", flush=True)
    print(f"worker {rank} takes {sizes[0]}")


main()
