"""A script that starts its other rank by its own command line, as Lightning does. Argument: a port.
Prints losses."""

import json
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import __main__

rank = int(os.environ.get("LOCAL_RANK", 0))
if rank == 0:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1], "WORLD_SIZE": "2"}
    os.environ.update(place, LOCAL_RANK="0")
    name = [sys.argv[0]] if __main__.__spec__ is None else ["-m", __main__.__spec__.name]
    command = [sys.executable, *name, *sys.argv[1:]]
    subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": "1"})
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.manual_seed(rank)
model = DDP(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    sys.stdout.write(json.dumps({"rank": rank, "step": step, "loss": loss.item()}) + "\n")
    sys.stdout.flush()
dist.destroy_process_group()
