"""Autocast in float16 with a scaler of losses, whose first scale overflows, so that steps are
skipped; gradients are unscaled and clipped."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH, HIDDEN = 50, 8, sized(24, 512), sized(64, 1024)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=10)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x).float(), x.roll(1, 1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        print(
            json.dumps(
                {"rank": rank, "step": step, "loss": loss.item(), "scale": scaler.get_scale()}
            ),
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
