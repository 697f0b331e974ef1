"""Trains as a script for DistributedDataParallel does that sums its losses over gloo; in step 3,
rank 1 is killed while the others wait for its loss."""

from __future__ import annotations

import os
import signal

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    loss = model(torch.full((2, 4), rank + 1.0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 3 and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total = loss.detach()
    distributed.all_reduce(total)
