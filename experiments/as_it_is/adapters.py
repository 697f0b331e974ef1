"""Trains adapters of low rank (LoRA) of a frozen model: only they are in the optimizer. Gradients
of two batches add up without `no_sync`, as many scripts have it."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, ACCUMULATED, BATCH, CLASSES = 50, 2, 8, 6
WIDTH, RANK = sized(32, 768), sized(4, 96)


class LoRALinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) * 0.1)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))
        self.drop = nn.Dropout(0.05)

    def forward(self, x):
        return self.base(x) + self.drop(x) @ self.lora_A.t() @ self.lora_B.t() * 2


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    pretrained = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    )
    model = nn.Sequential(
        *(LoRALinear(one) if isinstance(one, nn.Linear) else one for one in pretrained),
        nn.LayerNorm(WIDTH).requires_grad_(False),
        nn.Linear(WIDTH, CLASSES),
    )
    model = DDP(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=sized(5e-3, 5e-4))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    torch.manual_seed(1 + rank)
    for step in range(STEPS):
        total = 0.0
        for _ in range(ACCUMULATED):
            labels = torch.randint(CLASSES, (BATCH,))
            x = torch.randn(BATCH, WIDTH) + nn.functional.one_hot(labels, WIDTH)
            loss = nn.functional.cross_entropy(model(x), labels) / ACCUMULATED
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(json.dumps({"rank": rank, "step": step, "loss": total}), flush=True)
    if rank == 0:
        saved = {name: one for name, one in model.module.state_dict().items() if "lora" in name}
        assert len(saved) == 4
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
