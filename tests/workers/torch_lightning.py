"""Trains by Lightning as docs/torch.md says, beside the same training in this process alone: with
accumulated gradients, clipping and a schedule."""

import p3kv.torch  # noqa: F401, I001
import contextlib
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torch_habits import WORKERS, Pair, loss_of

SIZE, ACCUMULATED, MAX_NORM = 4, 2, 0.1


def schedule(of: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(of, 1, 0.5)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.model = pair.model
        self.p3 = pair.optimizer

    def configure_optimizers(self) -> Any:
        return [self.p3], [schedule(self.p3)]

    def training_step(self, x: torch.Tensor, at: int) -> torch.Tensor:
        self.is_last = (at + 1) % ACCUMULATED == 0
        return loss_of(self.model, x)

    def backward(self, loss: torch.Tensor) -> None:
        with contextlib.nullcontext() if self.is_last else self.p3.no_sync():
            loss.backward()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.p3.clip_grad_norm_(MAX_NORM)


def main() -> None:
    pair = Pair()
    data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    samplers = [DistributedSampler(data, WORKERS, rank) for rank in range(WORKERS)]
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, accumulate_grad_batches=ACCUMULATED,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(pair), DataLoader(data, SIZE, sampler=samplers[pair.rank]))
    of_alone = schedule(pair.alone)
    for epoch in range(2):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(DataLoader(data, SIZE, sampler=sampler)) for sampler in samplers]
        for at in range(0, len(batches[0]), ACCUMULATED):
            together = [x for one in batches for x in one[at : at + ACCUMULATED]]
            pair.step_alone(together, MAX_NORM)
        of_alone.step()
    pair.check()
    print("right with lightning")


main()
