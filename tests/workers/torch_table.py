"""Trains a p3kv.torch.Embedding, and beside it torch.nn.Embedding(sparse=True), both by p3kv.torch,
and a third one in this process alone.

Arguments: the optimizer's name. Then perhaps a file for worker rank 0's rows, so that the first is
trained alone, and a step after which each worker kills itself.
"""

import p3kv.torch  # noqa: I001
import os
import signal
import sys
import time
from typing import List

import numpy as np
import torch
from p3kv.common.seeded_rows import seeded_rows
from torch import nn

STEPS, ROWS, WIDTH = 12, 40, 6
OPTIMIZERS = {"SGD": {"lr": 0.02}, "Adagrad": {"lr": 0.1}, "SparseAdam": {"lr": 0.05}}
NAME, FILE, DIES = (*sys.argv[1:], "", "")[:3]
SEED, STD = 3, 0.5


class Net(nn.Module):
    """A table that is looked up twice in each pass, and one that is used now and then."""

    def __init__(self, kind: type, **settings: object) -> None:
        super().__init__()
        self.words = kind(ROWS, WIDTH, padding_idx=0, **settings)
        self.seldom = kind(ROWS, WIDTH, **settings)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        x = self.words(ids).sum(1) + self.words(ids[:, :2].int()).sum(1)
        if step % 3 == 0 or (step % 3 == 1 and rank == 0):
            x = x + self.seldom(ids[:, : 0 if step % 6 == 0 else 1]).sum(1)
        return self.out(x)


def batch(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(6 if step % 2 else ROWS, (5, 4), generator=random)


def loss(net: Net, step: int, rank: int) -> torch.Tensor:
    return net(batch(step, rank), step, rank).square().mean()


def made(net: Net) -> List[torch.optim.Optimizer]:
    tables = [*net.words.parameters(), *net.seldom.parameters()]
    kind = getattr(torch.optim, NAME)
    return [kind(tables, **OPTIMIZERS[NAME]), torch.optim.SGD(net.out.parameters(), lr=0.01)]


def all_rows(net: Net) -> List[torch.Tensor]:
    with torch.no_grad():
        return [one(torch.arange(ROWS)) for one in (net.words, net.seldom)]


def prefetch(net: Net, ids: torch.Tensor) -> None:
    if isinstance(net.words, p3kv.torch.Embedding):
        net.words.prefetch(ids)


def trained(net: Net, optimizers: List[torch.optim.Optimizer], step: int) -> torch.Tensor:
    """Makes a step; its last loss."""
    rank = optimizers[0].rank
    for one in optimizers:
        one.zero_grad()
    if step % 5 == 2:
        with optimizers[0].no_sync(), optimizers[1].no_sync():
            (loss(net, step, rank) / 2).backward()
        value = loss(net, step, rank) / 2
    else:
        value = loss(net, step, rank)
    if step % 3 == 1:
        prefetch(net, batch(step + 1, rank)[: step % 4])  # all or some of the rows
    value.backward()
    if step % 5 == 1:
        prefetch(net, batch(step + 1, rank))
    for one in optimizers:
        one.step()
    if step % 3 == 2:
        prefetch(net, batch(step + 1, rank))
    return value.detach()


def same_as_others(net: Net, optimizers: List[torch.optim.Optimizer]) -> None:
    rank, workers = optimizers[0].rank, optimizers[0].num_workers
    shared, alone = (Net(nn.Embedding, sparse=True) for _ in range(2))
    right = torch.from_numpy(seeded_rows(np.arange(ROWS), WIDTH, SEED, STD, False))
    right[0] = 0
    for other in (shared, alone):
        other.out.load_state_dict(net.out.state_dict())
        for mine, theirs in zip(all_rows(net), (other.words, other.seldom)):
            assert torch.equal(mine[1:], right[1:])
            theirs.weight.data.copy_(mine)
    assert torch.equal(all_rows(net)[0], right)
    shared_optimizers = [p3kv.torch.Optimizer(shared, one) for one in made(shared)]
    own = made(alone)
    for step in range(STEPS):
        losses = trained(net, optimizers, step), trained(shared, shared_optimizers, step)
        assert torch.equal(*losses), (step, losses)
        for one in own:
            one.zero_grad()
        for other in range(workers):
            (loss(alone, step, other) / workers).backward()
        for one in own:
            one.step()
        for mine, theirs, third in zip(*map(all_rows, (net, shared, alone))):
            assert torch.equal(mine, theirs), (step, rank)
            torch.testing.assert_close(mine, third, rtol=1e-4, atol=1e-5)
    assert torch.equal(all_rows(net)[0][0], torch.zeros(WIDTH))
    assert {*net.state_dict()} == {"out.weight", "out.bias"}


def main() -> None:
    torch.manual_seed(7)
    net = Net(p3kv.torch.Embedding, seed=SEED, std=STD, cache_rows=10)
    optimizers = [p3kv.torch.Optimizer(net, one) for one in made(net)]
    if not FILE:
        same_as_others(net, optimizers)
        print(f"right with {NAME}")
        return
    resumed = optimizers[0].resumed_steps
    print(f"begins after {resumed} steps")
    for step in range(resumed, STEPS):
        trained(net, optimizers, step)
        if str(step) == DIES and not resumed:
            for one in optimizers:
                one.wait()
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    if optimizers[0].rank == 0:
        torch.save([*all_rows(net), net.out.weight.detach()], FILE)


main()
