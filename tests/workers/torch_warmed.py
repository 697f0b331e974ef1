"""A script for DistributedDataParallel that changes after its first steps: gradients of several
batches add up from then on, without `no_sync`, or a batch is left out after its backward pass.
Steps are clipped, or by a GradScaler. Prints losses."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS = 60


def train(number: int, clips: bool, scales: bool, leaves_out: bool) -> None:
    torch.manual_seed(number)
    net = nn.Sequential(
        nn.Linear(8, 600), nn.BatchNorm1d(600), nn.Tanh(), nn.Linear(600, 500), nn.Linear(500, 8)
    )
    net[3].bias.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7, enabled=scales)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9)
    waiting = 0
    for step in range(STEPS):
        accumulates = 1 if leaves_out else 1 + step // 20
        random = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(16, 8, generator=random)
        loss = (model(x) - x.flip(1)).square().mean()
        scaler.scale(loss / accumulates).backward()
        waiting += 1
        told = {"rank": dist.get_rank(), "step": 1000 * number + step, "loss": loss.item()}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        if leaves_out and step in (25, 26, 40):
            optimizer.zero_grad()
            continue
        if waiting < accumulates:
            continue
        waiting = 0
        scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()


dist.init_process_group("gloo")
train(0, clips=True, scales=False, leaves_out=False)
train(1, clips=True, scales=True, leaves_out=False)
train(2, clips=False, scales=True, leaves_out=False)
train(3, clips=True, scales=False, leaves_out=True)
dist.destroy_process_group()
