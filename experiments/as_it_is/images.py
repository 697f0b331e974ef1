"""Classifies images with a small ResNet: SGD with warm-up and a cosine, label smoothing, mixup, an
average of weights, metrics that are reduced. As torchvision's reference scripts train."""

import json

import torch
import torch.distributed as dist
from sizes import sized
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, CLASSES, WARM_UP, WIDTH = 5, 8, 10, 1, sized(16, 96)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.layers(x))


def reduced(value, count):
    """The mean over all ranks, as a meter has it."""
    numbers = torch.tensor([value * count, count], dtype=torch.float64)
    dist.barrier()
    dist.all_reduce(numbers)
    return (numbers[0] / numbers[1]).item()


def main():
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    data = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (160,), generator=data)
    pictures = torch.randn(160, 3, 12, 12, generator=data) + labels[:, None, None, None] / 5
    train = TensorDataset(pictures, labels)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, BATCH, sampler=sampler, drop_last=True)
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU(),
        Block(WIDTH), Block(WIDTH), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    plain = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD(
        [{"params": decayed}, {"params": plain, "weight_decay": 0.0}],
        lr=0.05, momentum=0.9, weight_decay=1e-4, nesterov=True,
    )  # fmt: skip
    schedule = SequentialLR(
        optimizer,
        [LinearLR(optimizer, 0.1, total_iters=WARM_UP), CosineAnnealingLR(optimizer, EPOCHS)],
        [WARM_UP],
    )
    model = DistributedDataParallel(model)
    without = model.module
    averaged = AveragedModel(without, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    step = 0
    for epoch in range(EPOCHS):
        model.train()
        sampler.set_epoch(epoch)
        for image, target in loader:
            share = torch.distributions.Beta(0.2, 0.2).sample()
            mixed = share * image + (1 - share) * image.roll(1, 0)
            output = model(mixed)
            loss = share * criterion(output, target)
            loss = loss + (1 - share) * criterion(output, target.roll(1, 0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 2 == 0:
                averaged.update_parameters(model.module)
            print(json.dumps({"rank": rank, "step": step, "loss": loss.item()}), flush=True)
            step += 1
        schedule.step()
        model.eval()
        with torch.inference_mode():
            right = (model(pictures[:40]).argmax(1) == labels[:40]).float().mean().item()
            loss = criterion(averaged(pictures[:40]), labels[:40]).item()
        right, loss = reduced(right, 40), reduced(loss, 40)
        if rank == 0:
            print(json.dumps({"rank": 0, "step": step, "averaged": loss, "right": right}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
