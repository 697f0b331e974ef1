"""A script that is a rank itself, starts the other one, and waits for that one's end:
python torch_launching.py RANK PORT."""

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

BATCH = 6
WAIT_S = 60.0


def train(rank: int, port: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=port)
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    drawn = torch.Generator().manual_seed(rank)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(BATCH, 4, generator=drawn))[:, 0].sum().backward()
        optimizer.step()
    total = sum(float(weight.detach().sum()) for weight in model.parameters())
    print(f"rank {rank}: {total:.5f}", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    rank, port = int(sys.argv[1]), sys.argv[2]
    other = torch.multiprocessing.get_context("spawn").Process(target=train, args=(1 - rank, port))
    other.start()
    train(rank, port)
    other.join(WAIT_S)
    print(f"the other ended with {other.exitcode}", flush=True)
