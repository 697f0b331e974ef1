"""A script for torch's DistributedDataParallel with a GradScaler: with clipping, without, and as a
scale that is far too large, or one rank's gradient, overflows. Prints losses and scales."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 40


def train(number: int, clips: bool, unscales: bool, init_scale: float) -> None:
    torch.manual_seed(number)
    net = nn.Sequential(nn.Embedding(40, 20), nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=5)
    rank = dist.get_rank()
    for step in range(STEPS):
        random = torch.Generator().manual_seed(1000 * step + rank)
        ids = torch.randint(40, (16,), generator=random)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=number == 2):
            y = model(ids)
        loss = y.float().square().mean()
        overflows = step in (7, 29) and rank == step % 2
        scaler.scale(loss * torch.inf if overflows else loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        for at, value in ((step, loss.item()), (STEPS + step, scaler.get_scale())):
            told = {"rank": rank, "step": 1000 * number + at, "loss": value}
            print(json.dumps(told), flush=True)


dist.init_process_group("gloo")
train(0, clips=True, unscales=True, init_scale=1024.0)
train(1, clips=False, unscales=False, init_scale=1024.0)
train(2, clips=True, unscales=True, init_scale=2.0**40)
dist.destroy_process_group()
