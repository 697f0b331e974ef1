"""Ranks with different numbers of batches, in torch's `join`. Without momentum: torch's own leaves
that of a rank behind that has no more batches, and ranks differ from then on."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS, BATCHES, BATCH, WIDTH = 5, 10, 8, sized(16, 512)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = 0
    for _ in range(EPOCHS):
        with model.join(divide_by_initial_world_size=False):
            for _ in range(BATCHES - 2 * rank):
                x = torch.randn(BATCH, WIDTH)
                loss = nn.functional.mse_loss(model(x), x.flip(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
                step += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
