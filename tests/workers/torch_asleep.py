"""Freezes and thaws parameters on some workers or on all, and leaves some unused: the numbers of
one process, and nothing travels for what nobody trains.

Argument: the norm to which steps are clipped, if they are.
"""

import p3kv.torch  # noqa: I001
import copy
import math
import random
import sys
from typing import List

import torch
from p3kv.worker import this_process
from torch import nn

from joined_batch import mean_gradients

MAX_NORM = float(sys.argv[1]) if sys.argv[1:] else None
STEPS, LAYERS = 40, 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(LAYERS))
        self.words = nn.Embedding(20, 5, sparse=True)
        self.large = nn.Parameter(torch.rand(500, 1000), requires_grad=False)
        self.used: List[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for at in self.used:
            x = x + self.layers[at](x).tanh()
        return x + (self.words(torch.tensor([3, 4])).sum() if 0 in self.used else 0)


def prepare(net: Net, step: int, rank: int) -> torch.Tensor:
    """What is used and frozen on a worker in a step, and its batch."""
    chance = random.Random(1000 * step + rank)
    together = random.Random(step // 5)  # a schedule that all workers know
    for layer in net.layers:
        layer.requires_grad_(together.random() < 0.5 if step % 3 else chance.random() < 0.3)
    net.words.requires_grad_(chance.random() < 0.2)
    net.first.requires_grad_(not 20 < step < 25)
    net.used = [at for at in range(LAYERS) if chance.random() < 0.5]
    if not net.first.weight.requires_grad and rank == 1:
        net.used = []
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def loss(net: Net, x: torch.Tensor) -> torch.Tensor:
    y = net(x).square().mean()
    return y if y.requires_grad else torch.zeros((), requires_grad=True)


def one_process(net: Net, optimizer: torch.optim.Optimizer, step: int, workers: int) -> float:
    gradients = mean_gradients(net, lambda own, at: loss(own, prepare(own, step, at)), workers)
    norm = torch.stack([one.norm() for one in gradients.values()] or [torch.zeros(())]).norm()
    scale = 1.0 if MAX_NORM is None else min(1.0, MAX_NORM / (norm.item() + 1e-6))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(True)
        parameter.grad = gradients[name] * scale if name in gradients else None
    optimizer.step()
    return norm.item()


def what_has_not_changed_is_not_sent() -> None:
    """Where nobody has used a weight in a step, and where rounds are each worker's own."""
    for rule, most_values in (("bulk_synchronous", 3.5), ("asynchronous", 1.5)):
        seldom, often = nn.Linear(500, 1000, bias=False), nn.Linear(1, 1)
        seldom.requires_grad_(rule == "bulk_synchronous")
        model = nn.ModuleList([seldom, often])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opt = p3kv.torch.Optimizer(model, inner, consistency=rule)
        before = this_process.worker().stats()["bytes_received"]
        for step in range(6):
            opt.zero_grad()
            loss = often(torch.ones(1)).sum()
            if rule == "bulk_synchronous" and step % 2 == 0:
                loss = loss + seldom(torch.ones(500)).sum()
            loss.backward()
            opt.step()
        opt.wait()
        received = this_process.worker().stats()["bytes_received"] - before
        assert received < most_values * 4 * seldom.weight.numel(), (rule, received)


def each_worker_reads_what_it_has_woken() -> None:
    """As a mixture of experts does: nobody reads another's, by which it would hear of it."""
    experts = nn.ModuleList(nn.Linear(500, 1000, bias=False) for _ in range(2))
    model = nn.ModuleList([nn.Linear(1, 1), experts])
    opt = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = [one.weight.detach().clone() for one in experts]
    uses = [True, False, False, True, True, True, False, True]
    for used in uses:
        opt.zero_grad()
        loss = model[0](torch.ones(1)).sum()
        if used:
            loss = loss + experts[opt.rank % 2](torch.ones(500)).sum()
        loss.backward()
        opt.step()
    for at, (expert, first) in enumerate(zip(experts, before)):
        share = len(range(at, opt.num_workers, 2)) / opt.num_workers
        torch.testing.assert_close(expert.weight.detach(), first - 0.5 * share * sum(uses))


def main() -> None:
    worker = this_process.worker()
    torch.manual_seed(7)
    net = Net()
    expected = copy.deepcopy(net)

    def optimizer_of(net: Net) -> torch.optim.Optimizer:
        rows = net.words.weight
        groups = [
            {"params": [one for one in net.parameters() if one is not rows], "momentum": 0.9},
            {"params": [rows], "momentum": 0.0, "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1, weight_decay=0.01)

    opt, reference = p3kv.torch.Optimizer(net, optimizer_of(net)), optimizer_of(expected)
    for step in range(STEPS):
        opt.zero_grad()
        loss(net, prepare(net, step, opt.rank)).backward()
        norm = opt.clip_grad_norm_(MAX_NORM) if MAX_NORM is not None else None
        opt.step()
        its_norm = one_process(expected, reference, step, opt.num_workers)
        if norm is not None:
            assert math.isclose(norm.item(), its_norm, rel_tol=1e-4, abs_tol=1e-6), (norm, its_norm)
        if step % 4 == 0:  # one parameter alone, which may be frozen here
            name = f"layers.{step // 4 % LAYERS}.weight"
            torch.testing.assert_close(net.state_dict()[name], expected.state_dict()[name])
        if step % 4 == 1 or step == STEPS - 1:
            for (name, mine), theirs in zip(net.named_parameters(), expected.parameters()):
                torch.testing.assert_close(mine.detach(), theirs.detach(), msg=f"{name}, {step}")
        if step == 5:
            before = worker.stats()["bytes_received"]
    large_bytes = 4 * net.large.numel()
    assert worker.stats()["bytes_received"] - before < large_bytes, "the frozen one has travelled"
    assert all(type(one) is nn.Parameter for one in net.parameters())
    each_worker_reads_what_it_has_woken()
    what_has_not_changed_is_not_sent()
    print("nothing travels for what nobody trains")


main()
