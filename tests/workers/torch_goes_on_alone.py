"""Rank 0 goes on by itself when the others have ended, as to evaluate and to save, for as many
seconds as the argument says."""

import sys
import time

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.randn(6, 8)).sum().backward()
    optimizer.step()
if distributed.get_rank() == 0:
    time.sleep(float(sys.argv[1]))
    print("evaluated")
