"""Segments images: a second head and loss, rates of the head ten times the backbone's, a polynomial
schedule. SyncBatchNorm takes GPUs only, so batch norms are each rank's own on CPUs."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.functional import cross_entropy, interpolate
from torch.nn.parallel import DistributedDataParallel as DDP

STEPS, BATCH, CLASSES, WIDTH = 50, 4, 4, sized(16, 192)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 3, 2, 1), nn.BatchNorm2d(WIDTH), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1), nn.BatchNorm2d(2 * WIDTH), nn.ReLU()
        )
        self.head = nn.Conv2d(2 * WIDTH, CLASSES, 1)
        self.auxiliary = nn.Conv2d(WIDTH, CLASSES, 1)

    def forward(self, x):
        low = self.stem(x)
        return {
            name: interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)
            for name, y in (("out", self.head(self.body(low))), ("aux", self.auxiliary(low)))
        }


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(5 + rank)
    model = Net()
    if torch.cuda.is_available():
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model.cuda())
    model = DDP(model)
    backbone = [*model.module.stem.parameters(), *model.module.body.parameters()]
    heads = [*model.module.head.parameters(), *model.module.auxiliary.parameters()]
    optimizer = torch.optim.SGD(
        [{"params": backbone}, {"params": heads, "lr": 0.1}], lr=0.01, momentum=0.9
    )
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, 0.9)
    for step in range(STEPS):
        device = next(model.parameters()).device
        x = torch.randn(BATCH, 3, 16, 16, device=device)
        target = (x.mean(1) * 2 + 2).clamp(0, CLASSES - 1).long()
        found = model(x)
        loss = cross_entropy(found["out"], target) + 0.5 * cross_entropy(found["aux"], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
