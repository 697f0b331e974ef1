"""Sharpness-aware minimisation (SAM): an optimizer around another one, whose step takes two
backward passes. As the usual implementation has it."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH = 50, 8, sized(16, 512)


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"]]
        scale = self.param_groups[0]["rho"] / (torch.stack(grads).norm(p=2) + 1e-12)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale)
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH)))
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        loss.backward()
        optimizer.first_step(zero_grad=True)
        nn.functional.mse_loss(model(x), x.flip(1)).backward()
        optimizer.second_step(zero_grad=True)
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
