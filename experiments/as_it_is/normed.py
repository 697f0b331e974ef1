"""Weight norm and spectral norm, whose vectors are buffers that each forward pass changes."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

STEPS, BATCH, WIDTH = 50, 8, sized(16, 512)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        weight_norm(nn.Conv1d(2, WIDTH, 3, padding=1)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)), nn.LeakyReLU(0.1),
        nn.utils.spectral_norm(nn.Conv1d(WIDTH, 2, 3, padding=1)),
    )  # fmt: skip
    model = DDP(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    for step in range(STEPS):
        x = torch.randn(BATCH, 2, 20).cumsum(2)
        loss = nn.functional.smooth_l1_loss(model(x)[..., :-1], x[..., 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        schedule.step(total)
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
