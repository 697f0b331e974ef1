"""Trains a model with buffers, and looks whose each worker has.

Arguments: what p3kv.torch does with them; a file for worker rank 0's state; then perhaps a step
after which each worker kills itself.
"""

import p3kv.torch  # noqa: I001
import copy
import os
import signal
import sys
import time
from typing import List

import torch
from p3kv.errors import NotSupportedError
from p3kv.worker import this_process
from torch import nn

STEPS = 12
HOW, FILE, *DIES = sys.argv[1:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)
        self.seldom, self.uses_all = nn.Linear(4, 3), True
        self.frozen = nn.Linear(4, 3, bias=False).requires_grad_(False)
        self.outside = nn.Linear(4, 3).requires_grad_(False)  # the optimizer does not have it
        self.bits = nn.Parameter(torch.rand(3) > 0.5, requires_grad=False)
        self.register_buffer("mask", torch.rand(300, 300) > 0.5)  # large, and constant
        self.register_buffer("turns", torch.rand(3, dtype=torch.complex64))
        self.register_buffer("halves", torch.rand(3).bfloat16())
        self.register_buffer("lifts", torch.rand(2, 3).t())
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("nothing", None)
        self.register_buffer("again", self.halves)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + len(x)
        x = self.norm(x)
        if self.uses_all:
            x = x + self.seldom(x).mean()
        x = self.out(x) + self.frozen(x) + self.outside(x) + self.bits
        return x + self.halves.float() + self.turns.real


def batch(step: int, rank: int) -> torch.Tensor:
    return 1 + torch.randn(3 + rank, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def expected_norms(norms: List[nn.BatchNorm1d], step: int) -> None:
    """Has a copy of BatchNorm of each worker see its batch, and what comes to it then."""
    for rank, norm in enumerate(norms):
        norm(batch(step, rank))
    if HOW == "broadcast":
        for norm in norms:
            norm.load_state_dict(norms[0].state_dict())
    elif HOW == "average":
        for name in ("running_mean", "running_var"):
            mean = torch.stack([getattr(norm, name) for norm in norms]).mean(0)
            for norm in norms:
                getattr(norm, name).copy_(mean)


def check(net: Net, norm: nn.BatchNorm1d, step: int, rank: int) -> None:
    """Reads buffers in one way or another while they may be under way."""
    if step % 3 == 0:
        net = copy.deepcopy(net)
    if step % 3 == 1:
        x = torch.zeros(1, 4)
        found = nn.functional.batch_norm(x, net.norm.running_mean, net.norm.running_var)
        expected = nn.functional.batch_norm(x, norm.running_mean, norm.running_var)
        torch.testing.assert_close(found, expected)
    state = net.state_dict()
    for name, value in norm.state_dict().items():
        if name.startswith(("running", "num")):
            torch.testing.assert_close(state[f"norm.{name}"], value)
    of = rank if HOW == "own" else 0
    assert state["seen"] == (step + 1) * (3 + of), state["seen"]
    assert type(net.norm.running_mean) is torch.Tensor


def main() -> None:
    worker = this_process.worker()
    torch.manual_seed(7 if os.environ.get("DMLC_WORKER_ID", "0") == "0" else os.getpid())
    net = Net()
    trained = [one for name, one in net.named_parameters() if not name.startswith("outside")]
    inner = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    optimizer = p3kv.torch.Optimizer(net, inner, buffers=HOW)
    rank = worker.rank
    begins = optimizer.resumed_steps
    if not begins:
        torch.manual_seed(7)
        first = Net()  # worker 0's, also what never changes
        theirs = first.state_dict()
        for name, mine in net.state_dict().items():
            assert torch.equal(mine, theirs[name]), name
    norms = [copy.deepcopy(net.norm) for _ in range(worker.num_workers)]
    for step in range(begins, STEPS):
        optimizer.zero_grad()
        net.uses_all = step % 3 == 0
        with torch.no_grad():
            net.frozen.weight += 0.01 * (step + 1)
            net.outside.weight += 0.01 * (step + 1)
            net.mask[0, step] ^= step == 5
        net(batch(step, rank)).square().mean().backward()
        if rank == 1 and step == 1:
            time.sleep(0.3)
        optimizer.step()
        if not begins:
            expected_norms(norms, step)
            check(net, norms[rank], step, rank)
        if DIES and step == int(DIES[0]) and not begins:
            optimizer.wait()
            time.sleep(3)  # until the checkpoint is written
            os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        torch.save(net.state_dict(), FILE)
    if not DIES:
        assert worker.stats()["bytes_sent"] < 4 * net.mask.numel()  # not in each step
        misuse()
    print(f"begins after {begins} steps, and buffers are right: {HOW}")


def misuse() -> None:
    net = nn.BatchNorm1d(2)
    net.register_buffer("rows", torch.eye(2).to_sparse())
    inner = torch.optim.SGD(net.parameters())
    try:
        p3kv.torch.Optimizer(net, inner, buffers=HOW)
    except NotSupportedError as error:
        assert "the buffer 'rows' is torch.float32, torch.sparse_coo" in str(error)
    else:
        assert HOW == "own"


main()
