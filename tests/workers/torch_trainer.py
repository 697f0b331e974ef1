"""Trains by Hugging Face's Trainer as docs/torch.md says, beside the same training in this process
alone: with accumulated gradients, clipping and a schedule."""

import p3kv.torch  # noqa: F401, I001
import contextlib
import math
import os
import tempfile
from typing import Any, Dict, List

import torch
from torch.utils.data import Dataset, SequentialSampler
from torch_habits import WORKERS, Pair, loss_of

SIZE, ACCUMULATED, MAX_NORM = 4, 2, 0.1


class Rows(Dataset):
    def __init__(self, rank: int) -> None:
        self.x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))[rank::WORKERS]

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, at: int) -> Dict[str, torch.Tensor]:
        return {"x": self.x[at]}


class Loss(torch.nn.Module):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, x)}


def main() -> None:
    pair = Pair()
    optimizer, rank = pair.optimizer, pair.optimizer.rank
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    from transformers import Trainer, TrainingArguments

    class P3Trainer(Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            is_last = self.accelerator.sync_gradients
            with contextlib.nullcontext() if is_last else optimizer.no_sync():
                return super().training_step(*args, **kwargs)

        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # for the comparison

    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0) -> Any:
        return None if max_norm == math.inf else optimizer.clip_grad_norm_(max_norm)

    def schedule(of: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(of, 2, 0.5)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, num_train_epochs=2, per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=ACCUMULATED, max_grad_norm=MAX_NORM, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = P3Trainer(
            Loss(pair.model), arguments, train_dataset=Rows(rank),
            optimizers=(optimizer, schedule(optimizer)),
        )  # fmt: skip
        trainer.accelerator.clip_grad_norm_ = clip
        trainer.train()
    of_alone = schedule(pair.alone)
    for _ in range(2):
        batches: List[List[torch.Tensor]] = [
            list(Rows(one).x.split(SIZE)) for one in range(WORKERS)
        ]
        for at in range(0, len(batches[0]), ACCUMULATED):
            together = [x for one in batches for x in one[at : at + ACCUMULATED]]
            pair.step_alone(together, MAX_NORM)
            of_alone.step()
    pair.check()
    print("right with the Trainer")


main()
