"""A script for DistributedDataParallel that looks at BatchNorm's statistics between a step and the
next forward pass: each rank's own, their means, which all ranks take as timm's trainings do after
an epoch, and those with which a rank evaluates. Servers update the first model, workers the other.
Prints all as losses."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 24


def tell(step: int, loss: torch.Tensor) -> None:
    told = {"rank": dist.get_rank(), "step": step, "loss": loss.item()}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


def batch(step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, 8, generator=random)


def train(number: int, clips: bool) -> None:
    torch.manual_seed(number)
    model = DDP(nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Linear(300, 8)))
    norm = model.module[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(batch(step)) - 1).square().mean().backward()
        if clips:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        at = 1000 * number + 10 * step
        tell(at, norm.running_mean.square().sum())
        if step % 6 == 3:
            for buffer in model.module.buffers():
                if buffer.dtype.is_floating_point:
                    dist.all_reduce(buffer)
                    buffer /= dist.get_world_size()
            tell(at + 1, norm.running_var.sum())
        if step % 6 > 2:
            model.eval()
            with torch.no_grad():
                tell(at + 2, model.module(batch(-1 - step)).square().sum())
                if step % 3 == 0:
                    tell(at + 3, model(batch(-1 - step)).square().sum())
            model.train()


dist.init_process_group("gloo")
train(0, clips=False)
train(1, clips=True)
dist.destroy_process_group()
