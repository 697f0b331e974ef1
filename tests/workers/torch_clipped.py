"""Clips the gradients of each step with p3kv.torch, and compares with one process."""

import p3kv.torch  # noqa: I001
import math
import time
from typing import List, Tuple

import torch
from p3kv.errors import ConfigError, NotSupportedError
from p3kv.frontends.torch.clipping import Late
from p3kv.frontends.torch.values.watched import _WATCHERS
from p3kv.worker import this_process
from torch import nn
from torch_refusals import refused

REFUSALS = (ConfigError, NotSupportedError)

STEPS, BATCH, LEAVES_WITHIN_S = 12, 16, 60
NORMS = [0.1, 1e-3, math.inf, 0.05, None, 1e3]
"""By step: most steps are clipped, and in some clip_grad_norm_ is not called."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(20, 60)
        self.out = nn.Linear(60, 5)
        self.seldom = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        y = self.out(torch.relu(self.hidden(x)))
        return y * self.seldom if uses_all else y


def made(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)


def backward(net: Net, step: int, rank: int, share: float) -> None:
    random = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn((BATCH, 20), generator=random), torch.randn((BATCH, 5), generator=random)
    loss = nn.functional.mse_loss(net(x, step % 4 == 1 and rank == 0), y)
    (loss * share).backward()


def clip() -> None:
    torch.manual_seed(3)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    alone = made(twin)
    optimizer = p3kv.torch.Optimizer(net, made(net))
    worker = this_process.worker()
    rank, workers = worker.rank, worker.num_workers
    norms: List[Tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        alone.zero_grad()
        if rank == 1:
            time.sleep(0.1)  # so that norms are late
        with optimizer.no_sync():
            backward(net, step, rank, 0.5)
        sent = worker.stats()["slices_sent"]
        backward(net, step, rank, 0.5)
        deadline_s = time.monotonic() + LEAVES_WITHIN_S
        while step and worker.stats()["slices_sent"] == sent:  # leaves before the script clips
            assert time.monotonic() < deadline_s, "no gradient has left during backward"
            time.sleep(0.001)
        for other in range(workers):
            backward(twin, step, other, 1 / workers)
        max_norm = NORMS[step % len(NORMS)]
        if max_norm is not None:
            # The number of worker rank 0 counts.
            norm = optimizer.clip_grad_norm_(max_norm if rank == 0 else 7.0)
            norms.append((norm, nn.utils.clip_grad_norm_(twin.parameters(), max_norm)))
        if step % 3 == 0:
            assert norm > 0 and type(norm) is torch.Tensor, norm
        optimizer.step()
        alone.step()
    for mine, theirs in zip(net.parameters(), twin.parameters()):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-4, atol=1e-5)
    late = sum(isinstance(one, Late) for one in _WATCHERS.values())
    assert late <= 1, "norms that nobody has read are kept"
    for norm, expected in norms:  # also of those that are read long after
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert sum(float(norm) > 0.1 for norm, _ in norms) > 5
    before = [one.detach().clone() for one in net.parameters()]
    backward(net, 0, rank, 1.0)
    optimizer.clip_grad_norm_(1.0)
    skipped = optimizer.skip_step(rank == 1)  # for the first time
    optimizer.step()
    assert skipped and all(map(torch.equal, net.parameters(), before))
    raise_where_not_finite(optimizer, net)
    refuse_others(optimizer, net)
    print("clipped as one process")


def raise_where_not_finite(optimizer: p3kv.torch.Optimizer, net: Net) -> None:
    """On all workers, also where the gradients of one are bad; and the next step is one."""
    before = [one.detach().clone() for one in net.parameters()]
    for bad in (math.nan, math.inf):
        optimizer.zero_grad()
        backward(net, 0, optimizer.rank, bad if optimizer.rank == 1 else 1.0)
        try:
            optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except RuntimeError as error:
            assert "norm of order 2.0 for gradients from `parameters` is non-finite" in str(error)
        else:
            raise AssertionError("no error")
        assert all(map(torch.equal, net.parameters(), before))
    optimizer.zero_grad()
    backward(net, 0, optimizer.rank, 1.0)
    assert 0 < optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True) < 100
    optimizer.step()
    assert not any(map(torch.equal, net.hidden.parameters(), before))


def refuse_others(optimizer: p3kv.torch.Optimizer, net: Net) -> None:
    for words, arguments in [
        ("norm_type is 1.0", (1.0, 1.0)),
        ("max_norm is -1.0", (-1.0,)),
        ("max_norm is nan", (math.nan,)),
    ]:
        refused(words, optimizer.clip_grad_norm_, *arguments, kind=REFUSALS)
    others = p3kv.torch.Optimizer(net, made(net), updates="servers")
    for _ in range(2):
        backward(net, 0, 0, 1.0)
        others.clip_grad_norm_(1.0)
        others.step()
    backward(net, 0, 0, 1.0)
    others.clip_grad_norm_(1.0)
    refused("was called before in this step", others.clip_grad_norm_, 1.0)
    refused("skip_step was not called in the first step", others.skip_step, False)
    others.step()


clip()
