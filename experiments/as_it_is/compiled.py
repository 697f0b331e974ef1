"""A compiled model (without code generation, which needs a compiler), wrapped afterwards, as
nanoGPT has it."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH = 50, 8, sized(32, 384)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.LayerNorm(2 * WIDTH),
        nn.Linear(2 * WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model = torch.compile(model, backend="aot_eager")
    model = DDP(model)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
