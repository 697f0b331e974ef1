"""Workers sum one number by p3kv.torch.Optimizer.sum."""

import p3kv.torch  # noqa: I001
import math

import torch
from p3kv.errors import ConfigError
from torch_refusals import refused


def main() -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.1))
    rank, workers = optimizer.rank, optimizer.num_workers
    for number in ("2", None, 1j, [1], torch.ones(2), 2**63):
        refused("opt.sum() takes", optimizer.sum, number, kind=ConfigError)
    parts = [0.1 * (one + 1) / 3 for one in range(workers)]
    total = 0.0
    for part in parts:
        total += part
    for repeat in range(20):
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.sum(parts[rank]) == total  # also between steps, and bit for bit
        counted = optimizer.sum(10**15 * rank + repeat)
        assert type(counted) is int
        assert counted == 10**15 * sum(range(workers)) + workers * repeat
    assert optimizer.sum(torch.tensor(rank)) == sum(range(workers))
    assert optimizer.sum(torch.tensor(0.5)) == 0.5 * workers
    assert optimizer.sum(rank == 0) == 1
    mixed = optimizer.sum(1 if rank else 0.25)
    assert type(mixed) is float and mixed == workers - 0.75
    assert optimizer.sum(2**62) == float(workers * 2**62) or workers == 1  # more than 64 bits
    assert math.isnan(optimizer.sum(math.nan if rank == 0 else 1.0))
    print(f"worker {rank} has the sums")


main()
