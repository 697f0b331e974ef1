"""Trains compiled models, blocks and functions, and counts what torch compiles.

Argument: torch's backend.
"""

import sys
import time
from typing import Any, Callable, Dict, List

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch_habits import Pair, batch, loss_of, trained
from torch_refusals import refused

BACKEND = sys.argv[1]
STEPS = 4
HOW: Dict[str, Any] = {"backend": BACKEND, "fullgraph": True}  # a graph break raises


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def blocks() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 2))


class Net(nn.Module):
    """A weight that is read without its module, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inner, self.out = blocks(), nn.Linear(2, 4, bias=False)
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) - self.norm.running_mean
        return nn.functional.linear(self.inner(x), self.out.weight)


def train(pair: Pair, forward: Callable[[torch.Tensor], torch.Tensor], steps: int = STEPS) -> None:
    """Trains, worker 0 with late values; `forward` is the compiled one."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if model is pair.twin:
            return loss_of(model, x)
        if pair.rank == 1 and pair.steps % 2:
            time.sleep(0.1)
        return forward(x).square().mean()

    for _ in range(steps):
        pair.step(loss)
    pair.check()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def a_model_after_a_step(pair: Pair) -> int:
    train(pair, pair.model, 1)
    train(pair, torch.compile(pair.model, **HOW))
    return 1


def by_another_way(pair: Pair) -> int:
    """Not by `torch.compile`."""
    train(pair, pair.model, 1)
    train(pair, torch._dynamo.optimize(BACKEND, nopython=True)(pair.model))
    return 1


def a_model_in_place(pair: Pair) -> int:
    train(pair, pair.model, 1)
    pair.model.compile(**HOW)
    train(pair, pair.model)
    return 1


def blocks_in_place(pair: Pair) -> int:
    for block in pair.model.inner[:2]:
        block.compile(**HOW)
    train(pair, pair.model)
    return 1  # of their common code


def blocks_and_all(pair: Pair) -> int:
    pair.model.inner[0].compile(**HOW)
    pair.model.inner[1] = torch.compile(pair.model.inner[1], **HOW)
    whole = torch.compile(pair.model, **HOW)
    pair.twin.inner[1] = torch.compile(pair.twin.inner[1], backend="eager")  # so called, too
    train(pair, whole)
    return 2  # and the twin's block


def a_function(pair: Pair) -> int:
    @torch.compile(**HOW)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return pair.model(x)

    outer = torch.compile(lambda x: forward(x) * 1, **HOW)
    train(pair, forward)
    train(pair, outer)
    return 2


def a_step(pair: Pair) -> int:
    """All of a step; torch breaks the graph at `backward`, with and without p3kv."""

    @torch.compile(backend=BACKEND)
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()

    for at in range(STEPS):
        step(pair.model, pair.optimizer, batch(at, pair.rank))
        if at == 1:
            before = graphs()
    assert graphs() == before
    for at in range(STEPS):
        pair.alone.zero_grad()
        for rank in range(2):
            (loss_of(pair.twin, batch(at, rank)) / 2).backward()
        pair.alone.step()
    pair.check()
    return graphs()


CASES: List[Callable[[Pair], int]] = [
    a_model_after_a_step, by_another_way, a_model_in_place, blocks_in_place, blocks_and_all,
    a_function, a_step,
]  # fmt: skip


def main() -> None:
    torch._dynamo.config.error_on_recompile = True
    model = Net()
    early = torch.compile(model, **HOW)
    counters.clear()
    train(Pair(lambda: model), early)
    assert graphs() == 1, counters
    print("compiled once: a_model_before_its_optimizer")
    for case in CASES:
        torch._dynamo.reset()
        counters.clear()
        torch._dynamo.config.error_on_recompile = case is not a_step
        expected = case(Pair(Net))
        assert graphs() == expected, (case.__name__, counters)
        print("compiled once:", case.__name__, dict(counters["graph_break"]))
    shared = nn.Linear(4, 2)
    shared.weight.data = torch.ones(1).expand(2, 4)
    refused("elements of the parameter 'weight', of", trained, torch.compile(shared))
    print("compiled models are right")


main()
