"""Self-distillation: a teacher that follows the student, gradients that are clipped by parameter,
those of the last layer cancelled in the first epoch, schedules of rate and decay. As DINO's."""

import json
import math

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, FROZEN, BATCH, WIDTH = 50, 10, 8, sized(24, 768)
HIDDEN, OUT = WIDTH // 2, WIDTH * 2 // 3


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(HIDDEN, OUT, bias=False))

    def forward(self, x):
        return self.last_layer(nn.functional.normalize(self.mlp(x), dim=-1))


def made():
    return nn.Sequential(nn.Linear(10, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), Head())


def clip_gradients(model, most):
    norms = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = parameter.grad.data.norm(2)
            norms.append(norm.item())
            if most / (norm + 1e-6) < 1:
                parameter.grad.data.mul_(most / (norm + 1e-6))
    return norms


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    student, teacher = DDP(made()), made()
    teacher.load_state_dict(student.module.state_dict())
    for parameter in teacher.parameters():
        parameter.requires_grad = False
    named = [*student.named_parameters()]
    groups = [
        {"params": [p for n, p in named if not n.endswith("bias") and p.ndim > 1]},
        {"params": [p for n, p in named if n.endswith("bias") or p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    center = torch.zeros(1, OUT)
    for step in range(STEPS):
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = 2e-3 * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
            if number == 0:
                group["weight_decay"] = 0.04 + 0.36 * step / STEPS
        x = torch.randn(BATCH, 10)
        views = [x + 0.3 * torch.randn_like(x) for _ in range(2)]
        with torch.no_grad():
            aims = [((teacher(one) - center) / 0.1).softmax(-1) for one in views]
        guesses = [(student(one) / 0.3).log_softmax(-1) for one in views]
        loss = -(aims[0] * guesses[1] + aims[1] * guesses[0]).sum(-1).mean() / 2
        if not math.isfinite(loss.item()):
            raise SystemExit(1)
        optimizer.zero_grad()
        loss.backward()
        clip_gradients(student, 0.3)
        if step < FROZEN:
            for name, parameter in student.named_parameters():
                if "last_layer" in name:
                    parameter.grad = None
        optimizer.step()
        with torch.no_grad():
            momentum = 0.99
            for mine, its in zip(student.module.parameters(), teacher.parameters()):
                its.data.mul_(momentum).add_((1 - momentum) * mine.detach().data)
            batch_center = torch.cat(aims).sum(0, keepdim=True)
            dist.all_reduce(batch_center)
            center = 0.9 * center + 0.1 * batch_center / (2 * BATCH * world)
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
