"""Trains a small residual network on handwritten digits with PyTorch and P3.

Start it with `scripts/quickstart torch`, or with any number of workers that divides the batch:

    p3kv launch -n 2 -s 2 -- python -m scripts.quickstart_torch

Each worker takes its part of every batch. Then the same workers repeat the training with
DistributedDataParallel over gloo, and worker 0 repeats it alone on the whole batches. All three
begin with the same weights and give the same model: the script ends with an error if not.
"""

from __future__ import annotations

import p3kv.torch  # First: in a server's role a script goes no further than this line.

# isort: split
import copy
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from scripts import digits
from scripts.digits import BATCH, EPOCHS, Digits, Training


class Residual(nn.Module):
    """Two convolutions around which the input also goes straight to the output.

    There is no batch normalisation: its statistics would depend on how a batch is split among the
    workers, and the comparison would not be one of the optimizer.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        # Zero at first: the block starts as its straight way and needs no normalisation.
        nn.init.zeros_(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(nn.functional.gelu(self.first(x)))


def build_network() -> nn.Module:
    """A network without kinks: rectifiers and maximum pooling would blow a difference in the last
    bit, which any other order of a sum makes, up to one in the third digit within an epoch."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GELU(),
        Residual(32),
        nn.Conv2d(32, 64, 3),
        nn.GELU(),
        Residual(64),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 3 * 3, 10),
    )


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        net.parameters(), digits.RATE, digits.MOMENTUM, weight_decay=digits.WEIGHT_DECAY
    )


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_digits: Digits,
    test_digits: Digits,
    taken: slice,
    shown: slice,
    title: str,
    quiet: bool,
) -> Training:
    """Trains on `taken` of every batch, and notes the loss of `shown` of what is taken."""
    losses: list[float] = []
    start_s = time.perf_counter()
    with tqdm(total=EPOCHS * (len(train_digits.labels) // BATCH), desc=title, disable=quiet) as bar:
        for epoch in range(EPOCHS):
            for batch in digits.batches(train_digits, epoch):
                x = torch.from_numpy(train_digits.images[batch[taken]])
                y = torch.from_numpy(train_digits.labels[batch[taken]])
                optimizer.zero_grad()
                each = nn.functional.cross_entropy(net(x), y, reduction="none")
                each.mean().backward()
                optimizer.step()
                losses.append(each[shown].mean().item())
                bar.update()
            bar.set_postfix(loss=f"{np.mean(losses[-bar.total // EPOCHS :]):.4f}")
    # Reads the weights, and so waits for those of the last step.
    weights = {name: value.clone().numpy() for name, value in net.state_dict().items()}
    took_s = time.perf_counter() - start_s
    with torch.no_grad():
        guesses = net(torch.from_numpy(test_digits.images)).argmax(dim=1).numpy()
    accuracy = float((guesses == test_digits.labels).mean())
    return Training(title, weights, losses, took_s, accuracy)


def main() -> int:
    torch.set_num_threads(1)
    read = digits.read_digits()
    torch.manual_seed(digits.SEED)
    net = build_network()
    for_ddp, for_alone = copy.deepcopy(net), copy.deepcopy(net)

    optimizer = p3kv.torch.Optimizer(net, sgd(net))
    rank, num_workers = optimizer.rank, optimizer.num_workers
    part, whole, quiet = digits.part_of_batch(rank, num_workers), slice(None), rank != 0
    title = f"P3, {num_workers} workers"
    with_p3 = train(net, optimizer, *read, part, whole, title, quiet)

    torch.distributed.init_process_group("gloo")
    title = f"DDP, {num_workers} workers"
    wrapped = DistributedDataParallel(for_ddp)
    ddp = train(wrapped, sgd(wrapped), *read, part, whole, title, quiet)
    ddp = ddp._replace(weights={name[len("module.") :]: w for name, w in ddp.weights.items()})
    torch.distributed.destroy_process_group()
    if rank != 0:
        return 0

    alone = train(for_alone, sgd(for_alone), *read, whole, part, "one process", quiet)
    experiment = "experiments.torch_training --quick --output output"
    return digits.report(with_p3, [alone, ddp], "", f"{sys.executable} -m {experiment}")


if __name__ == "__main__":
    sys.exit(main())
