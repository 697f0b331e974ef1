"""Trains a model of some kind with p3kv.torch, and beside it with DistributedDataParallel over
gloo, and in this process alone.

Arguments: the model's name, the optimizer's, and a folder for worker rank 0's weights and for where
gloo meets.
"""

import p3kv.torch  # noqa: I001
import copy
import gc
import sys
from pathlib import Path
from typing import Dict, List, Tuple

import torch
from p3kv.worker import this_process
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

STEPS, BATCH, WORDS = 50, 4, 20
MODEL, NAME = sys.argv[1:3]
FOLDER = Path(sys.argv[3])
OPTIMIZERS = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "AdamW": {"lr": 0.002},
    "Adagrad": {"lr": 0.02},
}


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, WORDS),
        )  # fmt: skip


class Transformer(nn.Module):
    """With tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(16, WORDS, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embedding(x)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 12)
        self.recurrent = nn.LSTM(12, 16, num_layers=2, batch_first=True)
        self.out = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.recurrent(self.embedding(x))[0][:, -1])


MODELS = {
    "convolutions": Convolutions,
    "channels_last": Convolutions,
    "transformer": Transformer,
    "recurrent": Recurrent,
}


def made() -> nn.Module:
    model = MODELS[MODEL]()
    if MODEL == "channels_last":
        model = model.to(memory_format=torch.channels_last)
        assert not model[0].weight.is_contiguous()
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = getattr(torch.optim, NAME)(
        model.parameters(), **OPTIMIZERS[NAME]
    )
    return optimizer


def batch(step: int, rank: int) -> Tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    y = torch.randint(WORDS, (BATCH,), generator=random)
    if MODELS[MODEL] is not Convolutions:
        return torch.randint(WORDS, (BATCH, 6), generator=random), y
    x = torch.randn(BATCH, 3, 6, 6, generator=random)
    return x.to(memory_format=torch.channels_last) if MODEL == "channels_last" else x, y


def backward(model: nn.Module, step: int, rank: int, share: float = 1.0) -> None:
    x, y = batch(step, rank)
    (nn.functional.cross_entropy(model(x), y) * share).backward()


def close(mine: nn.Module, theirs: nn.Module) -> None:
    expected: Dict[str, torch.Tensor] = theirs.state_dict()
    for name, value in mine.state_dict().items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=2e-4,
            atol=2e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def main() -> None:
    worker = this_process.worker()
    torch.manual_seed(0)
    model = made()
    optimizer = p3kv.torch.Optimizer(model, optimizer_of(model))
    rank, workers = worker.rank, worker.num_workers
    parallel, alone = copy.deepcopy(model), copy.deepcopy(model)
    distributed.init_process_group("gloo", f"file://{FOLDER}/gloo", rank=rank, world_size=workers)
    ddp, of_ddp = DistributedDataParallel(parallel), optimizer_of(parallel)
    of_alone = optimizer_of(alone)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, step, rank)
        optimizer.step()
        of_ddp.zero_grad()
        backward(ddp, step, rank)
        of_ddp.step()
        of_alone.zero_grad()
        for one in range(workers):
            backward(alone, step, one, 1 / workers)
        of_alone.step()
    if rank == 0:
        close(model, parallel)
    elif MODELS[MODEL] is Convolutions:
        close_parameters([*model.parameters()], [*parallel.parameters()])
    if MODELS[MODEL] is not Convolutions:  # BatchNorm's statistics are each worker's batch's
        close(model, alone)
    if rank == 0:
        torch.save(model.state_dict(), FOLDER / "weights.pt")
    # Or DDP would be the last to drop the group, and wait with the GIL for gloo's threads.
    del ddp
    gc.collect()
    distributed.destroy_process_group()
    print(f"{MODEL} is right with {NAME}")


def close_parameters(mine: List[torch.Tensor], theirs: List[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=2e-4, atol=2e-5)


main()
