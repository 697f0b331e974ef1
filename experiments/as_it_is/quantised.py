"""Adapters of a model whose frozen weights are 8-bit numbers (QLoRA), with an optimizer that is not
torch's own."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH, RANK = 50, 8, sized(24, 768), sized(4, 96)


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
        scale = weight.abs().max() / 127
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.lora_A = nn.Parameter(torch.randn(RANK, WIDTH) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x):
        return x @ (self.weight.float() * self.scale).t() + x @ self.lora_A.t() @ self.lora_B.t()


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr, betas=(0.9, 0.99)):
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(
                    torch.sign(torch.lerp(parameter.grad, mean, slow)), alpha=group["lr"]
                )
                mean.lerp_(parameter.grad, 1 - fast)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(Quantised(), nn.Tanh(), Quantised()))
    optimizer = Lion([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(STEPS):
        x = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(x), x.flip(1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
