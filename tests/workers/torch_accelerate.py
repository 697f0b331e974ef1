"""Trains as Hugging Face's accelerate has it, beside the same training in this process alone."""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from torch_habits import WORKERS, Pair, loss_of


def main() -> None:
    pair = Pair()
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)))
    samplers = [
        DistributedSampler(data, pair.optimizer.num_workers, rank) for rank in range(WORKERS)
    ]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    accelerator = Accelerator(cpu=True)
    schedule = torch.optim.lr_scheduler.StepLR(pair.optimizer, 2, 0.5)
    optimizer, loader, schedule = accelerator.prepare(
        pair.optimizer, DataLoader(data, 4, sampler=samplers[pair.optimizer.rank]), schedule
    )
    of_alone = torch.optim.lr_scheduler.StepLR(pair.alone, 2, 0.5)
    all_batches = [list(DataLoader(data, 4, sampler=sampler)) for sampler in samplers]
    for step, (x,) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(loss_of(pair.model, x))
        optimizer.step()
        schedule.step()
        pair.alone.zero_grad()
        for batches in all_batches:
            (loss_of(pair.twin, batches[step][0]) / WORKERS).backward()
        pair.alone.step()
        of_alone.step()
    assert step == 2
    pair.check()
    torch.testing.assert_close(optimizer.state_dict()["state"], pair.alone.state_dict()["state"])
    print("right with accelerate")


main()
