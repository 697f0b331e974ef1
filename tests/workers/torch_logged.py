"""A script for DistributedDataParallel that logs gradients now and then, for the first time after
its first step: it prints their norms beside the losses. Each argument is how one training does so,
by some of these words. With `unused`, some steps have no gradient of one layer; with `parts`, that
layer has a backward pass of its own; with `two`, two models are trained in turn; with any of them,
workers add up a number before `step`. With `clips`, gradients are clipped; with `adds`, a step has
two passes; by `first`, rank 0 alone reads gradients."""

import json
import os
import sys
from contextlib import nullcontext
from typing import Any, List, Tuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Sequential):
    """With one layer more, which is trained by what the others give."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.more = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, has_more: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x, self.more(x.detach()) if has_more else x


def train(number: int, how: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    clips, adds, by_first = "clips" in how, "adds" in how, "first" in how
    unused, parts, two = "unused" in how, "parts" in how, "two" in how
    trained = []
    for _ in range(1 + two):
        model = Model(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 500), nn.Linear(500, 8))
        wrapped = DDP(model, find_unused_parameters=unused)
        trained.append((model, wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-3)))
    histogram: List[Any] = []
    for step in range(60):
        model, wrapped, optimizer = trained[step % len(trained)]
        for last in (False, True) if adds else (True,):
            with nullcontext() if last else wrapped.no_sync():
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                y, more = wrapped(x, not unused or step % 2 == 0)
                losses = [(one - x.flip(1)).square().mean() for one in (y, more)]
                loss = sum(losses, torch.zeros(()))
                for one in losses if parts else [loss]:
                    one.backward()
        logs = (rank == 0 or not by_first) and step % 3 == 1 and step >= len(trained)
        norms = []
        if logs and step % 2:
            norms = [p.grad.norm().item() for p in wrapped.parameters() if p.grad is not None]
        if unused or parts or two:
            dist.all_reduce(loss.detach().clone())
        if clips:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
            if logs and step % 6 == 4:
                norms = [p.grad.abs().max().item() for p in wrapped.parameters()]
        optimizer.step()
        if logs and not norms:
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            norms = torch.stack(torch._foreach_norm(gradients)).tolist()
            histogram.append(model[2].weight.grad.histc(10).tolist())
        optimizer.zero_grad()
        for at, norm in enumerate([loss.item(), *norms]):
            line = {"rank": rank, "step": 10_000 * number + 100 * step + at, "loss": norm}
            sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    assert os.environ.get("P3KV_UPDATES") or histogram or clips or by_first


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for number, how in enumerate(sys.argv[1:]):
        train(number, how)
    dist.destroy_process_group()
