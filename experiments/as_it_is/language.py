"""A small GPT: gradients of several batches add up, are clipped and may be scaled; groups with and
without decay, warm-up and a cosine. As nanoGPT trains."""

import json
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH = 50, 8, 32, 64, sized(48, 128)
ACCUMULATED, CLIP, RATE, LEAST, WARM_UP = 4, 1.0, 3e-3, 3e-4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            one.view(batch, length, 4, WIDTH // 4).transpose(1, 2)
            for one in self.attention(self.norm_1(x)).split(WIDTH, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.tokens.weight = self.head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.02 / math.sqrt(6) if name.endswith("projection.weight") else 0.02
                nn.init.normal_(parameter, std=scale)

    def forward(self, x, y):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


is_ddp = int(os.environ.get("RANK", -1)) != -1
if is_ddp:
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    accumulated = ACCUMULATED // world
else:
    rank, world, accumulated = 0, 1, ACCUMULATED
is_master = rank == 0
torch.manual_seed(1337 + rank)
data = torch.randint(0, 8, (4096,), generator=torch.Generator().manual_seed(7)).cumsum(0)
data = data % VOCABULARY


def get_batch():
    at = torch.randint(len(data) - LENGTH - 1, (BATCH,)).tolist()
    x = torch.stack([data[i : i + LENGTH] for i in at])
    y = torch.stack([data[i + 1 : i + 1 + LENGTH] for i in at])
    return x, y


model = GPT()
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
if is_ddp:
    model = DDP(model)
raw_model = model.module if is_ddp else model


def rate_at(step):
    if step < WARM_UP:
        return RATE * (step + 1) / (WARM_UP + 1)
    ratio = (step - WARM_UP) / (STEPS - WARM_UP)
    return LEAST + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (RATE - LEAST)


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(*get_batch())[1].item() for _ in range(2)]
    model.train()
    return sum(losses) / len(losses)


x, y = get_batch()
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step)
    if step % 20 == 0 and is_master:
        print(json.dumps({"rank": rank, "step": step, "validation": estimate_loss()}))
    for micro in range(accumulated):
        if is_ddp:
            model.require_backward_grad_sync = micro == accumulated - 1
        with nullcontext():
            logits, loss = model(x, y)
            loss = loss / accumulated
        x, y = get_batch()
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(json.dumps({"rank": rank, "step": step, "loss": loss.item() * accumulated}), flush=True)
if is_master:
    checkpoint = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict()}
    assert len(checkpoint["optimizer"]["state"]) == len(list(raw_model.parameters()))
if is_ddp:
    dist.destroy_process_group()
