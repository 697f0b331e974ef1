"""Worker 1's script is over while its last step waits for worker 0, which fails then. Argument 3 is
a folder in which it says so."""

import sys
import time
from pathlib import Path

import torch

import p3kv.torch

model = torch.nn.Linear(40, 50)
optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(2 + optimizer.rank):
    optimizer.zero_grad()
    model(torch.ones(3, 40)).sum().backward()
    optimizer.step()
if optimizer.rank == 1:
    print("trained")
    Path(sys.argv[3], "trained").touch()
    sys.exit()
optimizer.synchronize()
while not Path(sys.argv[3], "trained").exists():
    time.sleep(0.02)
raise ValueError("there is no such label")
