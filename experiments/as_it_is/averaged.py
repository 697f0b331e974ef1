"""Stochastic weight averaging: an average from the middle on, with a rate of its own, and batch
norms that are computed once more at the end."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

STEPS, BEGIN, BATCH, INPUTS, WIDTH = 50, 25, 16, sized(6, 512), sized(24, 2048)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(INPUTS, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
    )
    model = DDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, BEGIN)
    averaged = AveragedModel(model)
    constant = SWALR(optimizer, swa_lr=0.02, anneal_epochs=5)
    batches = [torch.randn(BATCH, INPUTS) for _ in range(5)]
    for step in range(STEPS):
        x = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x)[:, 0], x[:, :2].prod(1))
        loss.backward()
        optimizer.step()
        if step >= BEGIN:
            averaged.update_parameters(model)
            constant.step()
        else:
            schedule.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    update_bn(batches, averaged)
    with torch.no_grad():
        loss = nn.functional.mse_loss(averaged.module(x)[:, 0], x[:, :2].prod(1))
    print(json.dumps({"rank": rank, "step": STEPS, "averaged": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
