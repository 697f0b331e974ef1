"""A mixture of experts: a gate sends each sample to one, so that a batch leaves some without a
gradient, on other ranks others."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH, EXPERTS = 50, 4, sized(16, 128), 6


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x):
        chances = self.gate(x).softmax(-1)
        weight, chosen = chances.max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            its = chosen == number
            if its.any():
                y[its] = expert(x[its]) * weight[its, None]
        balance = EXPERTS * (chances.mean(0) * chosen.bincount(minlength=EXPERTS) / len(x)).sum()
        return x + y, balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.head(x), sum(balances)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3 + rank)
    model = DDP(Model(), find_unused_parameters=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        output, balance = model(x)
        loss = nn.functional.mse_loss(output[:, 0], x[:, :3].prod(1)) + 0.01 * balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
