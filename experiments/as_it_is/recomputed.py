"""A transformer whose blocks are computed again in the backward pass, by reentrant checkpoints,
which torch's DistributedDataParallel takes with a static graph only."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

STEPS, BATCH, LENGTH, WIDTH = 50, 4, 12, sized(32, 192)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)
        self.others = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        x = self.embed(x)
        for block in (self.block, *self.others, self.block):  # the first one once more
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(Model(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(BATCH, LENGTH, 4).cumsum(1)
        loss = nn.functional.mse_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
