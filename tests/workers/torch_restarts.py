"""Trains by torchrun, and one rank fails the first time: its last argument is the file by which it
knows."""

import p3kv.torch  # noqa: I001
import os
import sys
from pathlib import Path

import torch

STEPS, LR = 6, 0.5


def main() -> None:
    failing, mark = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(3)
    model = torch.nn.Linear(2, 1)
    begun = model.weight.detach().clone()
    optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=LR))
    print(f"a worker of the job '{os.environ.get('P3KV_JOB')}'")
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if step == 3 and optimizer.rank == failing and not mark.exists():
            mark.touch()
            raise ValueError("boom")
    # A fresh job begins with the first weights, and not where the failed one ended.
    assert torch.equal(model.weight.detach(), begun - LR * STEPS)
    print(f"worker {optimizer.rank} of {optimizer.num_workers} has trained")


main()
