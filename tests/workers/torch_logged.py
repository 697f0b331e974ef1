"""A script for DistributedDataParallel that logs gradients now and then, for the first time after
its first step: it prints their norms beside the losses."""

import json
import os
import sys
from contextlib import nullcontext
from typing import Any, List

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 500), nn.Linear(500, 8))
    wrapped = DDP(model)
    clips, adds, by_first = ("clips" in sys.argv, "adds" in sys.argv, "first" in sys.argv)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    histogram: List[Any] = []
    for step in range(60):
        for last in (False, True) if adds else (True,):
            with nullcontext() if last else wrapped.no_sync():
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))
                loss = (wrapped(x) - x.flip(1)).square().mean()
                loss.backward()
        logs = (rank == 0 or not by_first) and step % 3 == 1
        norms = []
        if logs and step % 2:
            norms = [one.grad.norm().item() for one in wrapped.parameters()]
        if clips:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
            if logs and step % 6 == 4:
                norms = [one.grad.abs().max().item() for one in wrapped.parameters()]
        optimizer.step()
        if logs and not norms:
            norms = torch.stack(torch._foreach_norm([p.grad for p in model.parameters()])).tolist()
            histogram.append(model[2].weight.grad.histc(10).tolist())
        optimizer.zero_grad()
        for number, norm in enumerate([loss.item(), *norms]):
            line = {"rank": rank, "step": 100 * step + number, "loss": norm}
            sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    assert os.environ.get("P3KV_UPDATES") or histogram or clips or by_first
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
