"""Trains with p3kv.torch, and compares with the same training in this process alone.

Arguments: the optimizer's name; a file for worker rank 0's weights; then perhaps a step after which
each worker kills itself.
"""

import p3kv.torch  # noqa: I001
import os
import signal
import sys
import time
import warnings
from typing import List, Tuple

import torch
from p3kv.worker import this_process

STEPS, BATCH = 24, 16
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "AdamW": {"lr": 0.01, "amsgrad": True},
    "Adagrad": {"lr": 0.1},
    "RMSprop": {"lr": 0.01},
    "Adafactor": {"lr": 0.05},
}
NAME, FILE, *DIES = sys.argv[1:]


class Net(torch.nn.Module):
    """Tied weights, attention, whose output projection is read without its module, and a layer that
    only some steps use."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 16)
        self.attention = torch.nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
        self.recurrent = torch.nn.LSTM(16, 16, batch_first=True)
        self.seldom = torch.nn.Linear(16, 16)
        self.out = torch.nn.Linear(16, 30, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.embedding(x)
        x = x + self.attention(x, x, x)[0]
        x = x + self.recurrent(x)[0]
        return self.out(x + self.seldom(x) if uses_all else x)


def batch(step: int, rank: int) -> Tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randint(30, (2, BATCH, 5), generator=random)
    return x, y.reshape(-1)


def uses_all(step: int, rank: int) -> bool:
    """In some steps nobody uses the seldom layer, in others only one worker."""
    return step % 4 == 1 or (step % 4 == 2 and rank == 0)


def backward(net: Net, step: int, rank: int, share: float) -> None:
    x, y = batch(step, rank)
    loss = torch.nn.functional.cross_entropy(net(x, uses_all(step, rank)).reshape(-1, 30), y)
    (loss * share).backward()


def made(net: Net) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, NAME)
    names = {"embedding.weight"}
    groups = [
        {"params": [one for name, one in net.named_parameters() if name in names]},
        {"params": [one for name, one in net.named_parameters() if name not in names], "lr": 0.02},
    ]
    optimizer: torch.optim.Optimizer = kind(groups, **OPTIMIZERS[NAME])
    return optimizer


def step_alone(net: Net, optimizer: torch.optim.Optimizer, step: int, workers: int) -> None:
    """The step of all workers' batches."""
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    for rank in range(workers):
        backward(net, step, rank, 1 / workers)
    optimizer.step()


def main() -> None:
    worker = this_process.worker()
    torch.manual_seed(7 if os.environ.get("DMLC_WORKER_ID", "0") == "0" else os.getpid())
    net, twin = Net(), Net()
    optimizer = p3kv.torch.Optimizer(net, made(net))
    rank, workers = worker.rank, worker.num_workers
    resumed = optimizer.resumed_steps
    twin.load_state_dict(net.state_dict())
    alone = made(twin)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of a scheduler that steps before its optimizer
        for _ in range(resumed):
            schedule.step()
    print(f"begins after {resumed} steps")
    for step in range(resumed, STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step % 3 == 0:
            # Gradients of two backward passes add up.
            with optimizer.no_sync():
                backward(net, step, rank, 0.5)
            backward(net, step, rank, 0.5)
        else:
            backward(net, step, rank, 1.0)
        optimizer.step()
        if not resumed and not DIES:
            for mine, theirs in zip(optimizer.param_groups, alone.param_groups):
                theirs["lr"] = mine["lr"]
            step_alone(twin, alone, step, workers)
        schedule.step()
        if step == 12 and not resumed and not DIES:
            saved = optimizer.state_dict()
            optimizer.load_state_dict(saved)
            same(saved, alone.state_dict())
        if DIES and step == int(DIES[0]) and not resumed:
            optimizer.wait()
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    if not resumed and not DIES:
        close([*net.parameters()], [*twin.parameters()])
        same(optimizer.state_dict(), alone.state_dict())
    if rank == 0:
        torch.save(net.state_dict(), FILE)
    print(f"right with {NAME}")


def close(mine: List[torch.Tensor], theirs: List[torch.Tensor]) -> None:
    for one, other in zip(mine, theirs):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-4, atol=1e-5)


def same(mine: dict, theirs: dict) -> None:
    """Optimizer states in torch's own format."""
    assert mine["state"].keys() == theirs["state"].keys()
    for at, state in theirs["state"].items():
        assert mine["state"][at].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][at][name], value, rtol=1e-4, atol=1e-5)


main()
