"""Finds boxes: a backbone with frozen batch norms and a rate of its own, a transformer with learnt
queries, losses of each layer, a number of boxes that is reduced. As DETR trains."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss

STEPS, BATCH, WIDTH, QUERIES, CLASSES = 50, 4, sized(32, 192), 6, 5


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, width):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("mean", 0.1), ("var", 0.9)):
            self.register_buffer(name, torch.full((width,), value))

    def forward(self, x):
        scale = self.weight * (self.var + 1e-5).rsqrt()
        return x * scale[:, None, None] + (self.bias - self.mean * scale)[:, None, None]


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False), FrozenBatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, WIDTH, 3, 2, 1, bias=False), FrozenBatchNorm2d(WIDTH), nn.ReLU(),
        )  # fmt: skip
        self.backbone[0].weight.requires_grad_(False)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.decoders = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True) for _ in range(2)
        )
        self.queries = nn.Embedding(QUERIES, WIDTH)
        self.classes, self.boxes = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, 4)

    def forward(self, x):
        memory = self.encoder(self.backbone(x).flatten(2).transpose(1, 2))
        hidden = self.queries.weight.expand(len(x), -1, -1)
        found = []
        for decoder in self.decoders:
            hidden = decoder(hidden, memory)
            found.append((self.classes(hidden), self.boxes(hidden).sigmoid()))
        return found


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42 + rank)
    model = Detector()
    model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    without = model.module
    named = [(n, p) for n, p in without.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if "backbone" not in n]},
        {"params": [p for n, p in named if "backbone" in n], "lr": 1e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    for step in range(STEPS):
        x = torch.randn(BATCH, 3, 16, 16)
        labels, boxes = torch.randint(CLASSES, (BATCH, QUERIES)), torch.rand(BATCH, QUERIES, 4)
        count = torch.tensor([float(labels.gt(0).sum())])
        dist.all_reduce(count)
        count = torch.clamp(count / world, min=1).item()
        losses = {}
        for layer, (logits, places) in enumerate(model(x)):
            losses[f"class_{layer}"] = cross_entropy(logits.flatten(0, 1), labels.flatten())
            losses[f"box_{layer}"] = 5 * l1_loss(places, boxes, reduction="sum") / count / 4
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
