"""A script that starts its ranks itself, as PyTorch's tutorial does; they meet at a port, or where
an URL says, as those of many older scripts do."""

import json
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, RANKS = 50, 2


def setup(rank, world_size):
    where = sys.argv[1] if sys.argv[1:] else "12355"
    if "://" in where:
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
        return
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = where
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(rank)
    model = ToyModel()
    ddp_model = DDP(model)
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        loss = loss_fn(outputs, torch.randn(20, 5))
        loss.backward()
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size,), nprocs=world_size, join=True)


if __name__ == "__main__":
    run_demo(demo_basic, RANKS)
