"""A rank's script ends in order while the others wait for it in a collective of their own, of gloo.
torch_ends_early.py RANK"""

from __future__ import annotations

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.ones(4, 4)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 2 and rank == int(sys.argv[1]):
        sys.exit()
    total = loss.detach().clone()
    distributed.all_reduce(total)
    sys.stdout.write(f"worker {rank} has made step {step}\n")  # at once: both ranks write
    sys.stdout.flush()
