"""Trains embeddings with sparse gradients by p3kv.torch, and beside it in this process alone.

Arguments: the optimizer's name; a file for worker rank 0's weights; then perhaps a step after which
each worker kills itself.
"""

import p3kv.torch  # noqa: I001
import os
import signal
import sys
import time
from typing import List

import torch
from torch import nn

STEPS, ROWS, WIDTH = 14, 40, 6
OPTIMIZERS = {
    "SGD": {"lr": 0.02},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1},
    "SparseAdam": {"lr": 0.05},
}
NAME, FILE, *DIES = sys.argv[1:]


class Net(nn.Module):
    """A table with a row that is never trained, a bag, a table that one worker alone uses in some
    steps and nobody in others, one that nobody uses, and a layer with dense gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=0, sparse=True)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)
        self.seldom = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.unused = nn.Embedding(3, WIDTH, sparse=True)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, ids: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        x = self.words(ids).sum(1) + self.bags(ids)
        if step % 3 == 0 or (step % 3 == 1 and rank == 0):
            # Nobody's rows in some steps: a gradient all the same.
            x = x + self.seldom(ids[:, : 0 if step % 6 == 0 else 1]).sum(1)
        return self.out(x)


def batch(step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    few = 6 if step % 2 else ROWS
    return torch.randint(few, (5, 4), generator=random)


def backward(net: Net, step: int, rank: int, share: float) -> None:
    (net(batch(step, rank), step, rank).square().mean() * share).backward()


def made(net: Net) -> List[torch.optim.Optimizer]:
    """SparseAdam trains nothing but embeddings."""
    kind, settings = getattr(torch.optim, NAME), OPTIMIZERS[NAME]
    if NAME != "SparseAdam":
        groups = [
            {"params": [*net.words.parameters(), *net.out.parameters()], "lr": 0.01},
            {"params": [*net.bags.parameters(), *net.seldom.parameters()]},
            {"params": [*net.unused.parameters()]},
        ]
        return [kind(groups, **settings)]
    tables = [one for name, one in net.named_parameters() if "out" not in name]
    return [kind(tables, **settings), torch.optim.Adam(net.out.parameters(), lr=0.01)]


def states(optimizers: List[torch.optim.Optimizer]) -> List[dict]:
    return [one.state_dict() for one in optimizers]


def main() -> None:
    torch.manual_seed(7 if os.environ.get("DMLC_WORKER_ID", "0") == "0" else os.getpid())
    net, twin = Net(), Net()
    optimizers = [p3kv.torch.Optimizer(net, one) for one in made(net)]
    rank, workers = optimizers[0].rank, optimizers[0].num_workers
    resumed = optimizers[0].resumed_steps
    print(f"begins after {resumed} steps")
    twin.load_state_dict(net.state_dict())
    alone = made(twin)
    compares = not resumed and not DIES
    for step in range(resumed, STEPS):
        for one in (*optimizers, *alone):
            one.zero_grad(set_to_none=step % 4 != 3)
        if step % 5 == 2:
            with optimizers[0].no_sync(), optimizers[-1].no_sync():
                backward(net, step, rank, 0.25)
            backward(net, step, rank, 0.75)
        else:
            backward(net, step, rank, 1.0)
        for one in optimizers:
            one.step()
        if compares:
            for other in range(workers):
                backward(twin, step, other, 1 / workers)
            for one in alone:
                one.step()
            close(net, twin, step)
        if compares and step == 6:
            for one, saved in zip(optimizers, states(optimizers)):
                one.load_state_dict(saved)
        if DIES and step == int(DIES[0]) and not resumed:
            for one in optimizers:
                one.wait()
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    if compares:
        same(states(optimizers), states(alone))
        assert torch.equal(net.words.weight[0], torch.zeros(WIDTH))
    if rank == 0:
        torch.save(net.state_dict(), FILE)
    print(f"right with {NAME}")


def close(net: Net, twin: Net, step: int) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), twin.parameters()):
        torch.testing.assert_close(
            mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5, msg=f"{name} in step {step}"
        )


def same(mine: List[dict], theirs: List[dict]) -> None:
    """States in torch's own format; SGD has none."""
    for one, other in zip(mine, theirs):
        assert not other["state"] or one["state"].keys() == other["state"].keys()
        for at, state in other["state"].items():
            assert one["state"][at].keys() == state.keys()
            for name, value in state.items():
                torch.testing.assert_close(one["state"][at][name], value, rtol=1e-4, atol=1e-5)


main()
