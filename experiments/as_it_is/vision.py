"""A mixer for images: AdamW without decay for vectors, a copy that follows the weights, stochastic
depth, buffers that each rank has for itself and that are reduced at the end of an epoch. As timm
trains."""

import copy
import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel as NativeDDP

STEPS, BATCH, WIDTH, CLASSES = 50, 8, sized(32, 384), 10


class Mixer(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.drop = drop
        self.norm = nn.BatchNorm1d(16)
        self.tokens, self.channels = nn.Linear(16, 16), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        kept = (torch.rand(x.shape[0], 1, 1) >= self.drop) if self.training else 1
        y = self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + kept * self.scale * self.channels(nn.functional.gelu(y))


class Follower:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        states = zip(self.module.state_dict().values(), model.state_dict().values())
        for mine, its in states:
            if mine.is_floating_point():
                mine.mul_(self.decay).add_(its, alpha=1 - self.decay)


class NativeScaler:
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def __call__(self, loss, optimizer, clip, parameters):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, clip)
        self.scaler.step(optimizer)
        self.scaler.update()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(42)
    model = nn.Sequential(
        nn.Linear(48, WIDTH), *(Mixer(0.1 * depth) for depth in range(3)), nn.Flatten(),
        nn.Linear(16 * WIDTH, CLASSES),
    )  # fmt: skip
    torch.manual_seed(42 + rank)
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    matrices = [p for p in model.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.05}], 2e-3
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    model = NativeDDP(model, broadcast_buffers=False)
    follower = Follower(model.module, 0.95)
    scaler = NativeScaler()
    for step in range(STEPS):
        labels = torch.randint(CLASSES, (BATCH,))
        patches = torch.randn(BATCH, 16, 48) + labels[:, None, None] / 4
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = nn.functional.cross_entropy(model(patches), labels)
        optimizer.zero_grad()
        scaler(loss, optimizer, 1.0, model.parameters())
        follower.update(model.module)
        schedule.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
        if step % 25 == 24:
            for name, buffer in model.module.named_buffers():
                if "running" in name:
                    dist.all_reduce(buffer)
                    buffer /= world
            with torch.no_grad():
                loss = nn.functional.cross_entropy(follower.module(patches), labels)
            print(json.dumps({"rank": rank, "step": step, "follower": loss.item()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
