"""Skips steps that any worker finds bad, with p3kv.torch, and compares with one process.

Arguments: the optimizer, the norm to which steps are clipped, and who updates the weights.
"""

import p3kv.torch  # noqa: I001
import copy
import math
import sys
from typing import Any, List, Optional, Tuple

import torch
from torch import nn

from joined_batch import mean_gradients
from torch_refusals import refused

NAME = sys.argv[1]
MAX_NORM = float(sys.argv[2])
CLIPS = math.isfinite(MAX_NORM)
UPDATES = sys.argv[3]
STEPS = 20
BAD = {0: [0], 3: [1], 4: [0, 1], 7: [1], 8: [0], 9: [1], 15: [0], 19: [1]}
"""By step, the workers that skip it."""


class Net(nn.Module):
    """Small tensors that share a bucket, a large one of several slices, rows, and a layer that some
    workers use in some steps, or nobody does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 20, sparse=NAME == "Adagrad")
        self.hidden = nn.Linear(20, 60)
        self.seldom = nn.Linear(60, 60)
        self.out = nn.Linear(60, 5)

    def forward(self, ids: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = torch.relu(self.hidden(self.words(ids)))
        return self.out(self.seldom(x) if uses_all else x)


class Fails(torch.autograd.Function):
    """Raises in `backward`, when gradients of later layers are there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory, as it were")


def made(net: nn.Module) -> torch.optim.Optimizer:
    settings = {"weight_decay": 0.1} if NAME == "AdamW" else {}
    return getattr(torch.optim, NAME)(net.parameters(), lr=0.05, **settings)


def loss(net: nn.Module, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(40, (16,), generator=random)
    return net(ids, 4 < step < 10 and (rank + step) % 2 == 0).square().mean()


def bad_backward(net: Net, step: int, rank: int) -> bool:
    """A gradient that is nan, one that is missing, or an exception half way; whether it is to be
    skipped."""
    if step % 3 == 0:
        (loss(net, step, rank) * math.nan).backward()
    elif step % 3 == 1:
        hidden = net.hidden.register_forward_hook(lambda module, x, output: Fails.apply(output))
        whole = loss(net, step, rank)
        hidden.remove()
        try:
            whole.backward()
        except RuntimeError as error:
            assert "out of memory" in str(error)
        assert net.out.weight.grad is not None and net.hidden.weight.grad is None
    return True


def one_process(net: Net, optimizer: torch.optim.Optimizer, step: int, workers: int) -> None:
    gradients = mean_gradients(net, lambda own, rank: loss(own, step, rank), workers)
    for name, parameter in net.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None and name == "words.weight" and NAME == "Adagrad":
            gradient = gradient.to_sparse(1)
        parameter.grad = gradient
    if CLIPS:
        nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
    optimizer.step()


def same(net: Net, twin: Net) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), twin.parameters()):
        if not CLIPS:
            assert torch.equal(mine.detach(), theirs.detach()), name
        else:
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-4)


def main() -> None:
    torch.manual_seed(5)
    net = Net()
    twin = copy.deepcopy(net)
    optimizer, alone = p3kv.torch.Optimizer(net, made(net), updates=UPDATES), made(twin)
    rank, workers = optimizer.rank, optimizer.num_workers
    skipped: List[Tuple[torch.Tensor, bool]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        is_bad = rank in BAD.get(step, [])
        if is_bad:
            is_bad = bad_backward(net, step, rank)
        else:
            loss(net, step, rank).backward()
        norm: Optional[torch.Tensor] = None
        if CLIPS and step % 2 == 0:
            norm = optimizer.clip_grad_norm_(MAX_NORM)
            if step in (0, 8, 10):  # before anyone has voted, and also in the first step
                is_bad = not math.isfinite(norm) or is_bad
        outcome = optimizer.skip_step(torch.tensor(is_bad) if step % 2 else is_bad)
        if CLIPS and step % 2:
            optimizer.clip_grad_norm_(MAX_NORM)
        if step == 2 and UPDATES == "servers":
            refused("known only after opt.step()", bool, outcome)
        optimizer.step()
        if step % 5 == 0:
            assert bool(outcome) == (step in BAD), step
        skipped.append((outcome, step in BAD))
        if step not in BAD:
            one_process(twin, alone, step, workers)
        if step % 4 == 3:
            same(net, twin)
    same(net, twin)
    for outcome, expected in skipped:
        assert outcome.item() is expected and type(outcome) is torch.Tensor
    for mine, theirs in zip(net.parameters(), twin.parameters()):
        state, expected_state = optimizer.state[mine], alone.state[theirs]
        assert state.keys() == expected_state.keys()
        assert "step" not in state or float(state["step"]) == float(expected_state["step"])
    print(f"skipped as one process: {NAME}")


main()
