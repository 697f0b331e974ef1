"""Trains with torch's GradScaler and p3kv.torch, in autocast by float16, and compares with one
process that has a scaler, too.

Argument: the norm to which steps are clipped.
"""

import p3kv.torch  # noqa: I001
import copy
import math
import sys
import time

import torch
from p3kv.worker import this_process
from torch import nn
from torch_refusals import refused

MAX_NORM = float(sys.argv[1])
CLIPS = math.isfinite(MAX_NORM)
STEPS, LEAVES_WITHIN_S = 24, 60
BAD = {5: 1, 6: 0, 13: 1}
"""By step, the worker of which a gradient overflows."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 20)
        self.hidden = nn.Linear(20, 60)
        self.out = nn.Linear(60, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.hidden(self.words(ids))))


def loss(net: Net, step: int, rank: int) -> torch.Tensor:
    ids = torch.randint(40, (16,), generator=torch.Generator().manual_seed(1000 * step + rank))
    with torch.autocast("cpu", dtype=torch.float16):
        y = net(ids)
    # Of a good size for the first scale, which is too large for float16.
    value = 8 * y.float().square().mean()
    return value * 1e38 if BAD.get(step) == rank else value


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4)


def clip(net: Net) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)


def main() -> None:
    torch.manual_seed(5)
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = p3kv.torch.Optimizer(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    alone = torch.optim.AdamW(twin.parameters(), lr=0.01)
    mine, its = scaler(), scaler()
    worker, workers = this_process.worker(), optimizer.num_workers
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            mine.scale(loss(net, step, optimizer.rank) / 2).backward()
        sent = worker.stats()["slices_sent"]
        mine.scale(loss(net, step, optimizer.rank) / 2).backward()
        deadline_s = time.monotonic() + LEAVES_WITHIN_S
        while step and worker.stats()["slices_sent"] == sent:
            assert time.monotonic() < deadline_s, "no gradient has left during backward"
            time.sleep(0.001)
        if CLIPS or step % 2:
            mine.unscale_(optimizer)
        norm = clip(net) if CLIPS else torch.zeros(())
        mine.step(optimizer)
        mine.update()

        alone.zero_grad()
        for rank in range(workers):
            its.scale(loss(twin, step, rank) / workers).backward()
        its.unscale_(alone)
        if CLIPS:
            torch.testing.assert_close(norm, clip(twin), rtol=1e-3, atol=1e-6, equal_nan=True)
        its.step(alone)
        its.update()

        assert mine.get_scale() == its.get_scale(), (step, mine.get_scale(), its.get_scale())
        scales.append(mine.get_scale())
        for (name, one), other in zip(net.named_parameters(), twin.parameters()):
            if CLIPS:
                torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(one.detach(), other.detach()), (step, name)
    for one, other in zip(net.parameters(), twin.parameters()):
        count = float(optimizer.state[one]["step"])
        assert count == float(alone.state[other]["step"]) <= STEPS - len(BAD), count
    pairs = [*zip(scales, scales[1:])]
    assert sum(after < before for before, after in pairs) >= len(BAD), scales
    assert any(after > before for before, after in pairs), scales
    if CLIPS:
        mine.scale(loss(net, 0, 0)).backward()
        clip(net)
        refused("call scaler.unscale_(optimizer) before", mine.step, optimizer)
    print(f"scales: {scales}")


def two_optimizers() -> None:
    """One scaler for both, of which one alone overflows and skips its step."""
    torch.manual_seed(5)
    net = nn.ModuleList([nn.Linear(3, 30), nn.Linear(30, 3)])
    twin = copy.deepcopy(net)
    optimizers = [p3kv.torch.Optimizer(one, torch.optim.AdamW(one.parameters())) for one in net]
    alone = [torch.optim.AdamW(one.parameters()) for one in twin]
    mine, its = scaler(), scaler()

    def loss_of(both: nn.ModuleList, step: int, rank: int) -> torch.Tensor:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        hidden = torch.tanh(both[0](x))
        beside = both[1](hidden.detach()).sum() * (math.inf if (step, rank) == (5, 1) else 0.01)
        return both[1](hidden).square().mean() + beside

    for step in range(10):
        for one in (*optimizers, *alone):
            one.zero_grad()
        mine.scale(loss_of(net, step, optimizers[0].rank)).backward()
        for rank in range(optimizers[0].num_workers):
            its.scale(loss_of(twin, step, rank) / optimizers[0].num_workers).backward()
        for one in optimizers:
            mine.unscale_(one)
            mine.step(one)
        for one in alone:
            its.step(one)
        mine.update()
        its.update()
        assert mine.get_scale() == its.get_scale(), step
        for one, other in zip(net.parameters(), twin.parameters()):
            assert torch.equal(one.detach(), other.detach()), step
    counts = [
        float(one.state[next(part.parameters())]["step"]) for one, part in zip(optimizers, net)
    ]
    assert counts == [10, 9], counts


main()
two_optimizers()
print("scaled as one process")
