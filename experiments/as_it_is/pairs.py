"""Contrastive learning of pictures and texts: features of all ranks are gathered, with gradients of
the own ones; a temperature that is learnt, and clamped after each step. As OpenCLIP trains."""

import json
import math

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, WIDTH = 50, 8, sized(16, 512)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = 2 * WIDTH
        self.visual = nn.Sequential(nn.Linear(24, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
        self.text = nn.Sequential(nn.EmbeddingBag(40, hidden), nn.GELU(), nn.Linear(hidden, WIDTH))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pictures, texts):
        images, words = self.visual(pictures), self.text(texts)
        return normalize(images, dim=-1), normalize(words, dim=-1), self.logit_scale.exp()


def gathered(features):
    every = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(every, features)
    every[dist.get_rank()] = features  # with its gradient
    return torch.cat(every)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DDP(Clip(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6)
    torch.manual_seed(10 + rank)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (step + 1) / 10)
        texts = torch.randint(40, (BATCH, 5))
        pictures = torch.randn(BATCH, 24) + texts.float().mean(1, keepdim=True) / 10
        images, words, scale = model(pictures, texts)
        logits = scale * gathered(images) @ gathered(words).t()
        right = torch.arange(len(logits))
        loss = (cross_entropy(logits, right) + cross_entropy(logits.t(), right)) / 2
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        optimizer.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
