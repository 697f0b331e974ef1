"""Workers with different numbers of samples weigh their gradients: the numbers of one process.

Arguments: "exact", where sums are in the order of ranks, or a tolerance; then perhaps "clipped",
"workers", or "used", where the script changes gradients before a step.
"""

import p3kv.torch  # noqa: I001
import copy
import math
import sys
from typing import List, Optional

import torch
from p3kv.errors import ConfigError
from torch import nn
from torch_refusals import refused

SAMPLES = [5, 8, 3]
STEPS = 10
UPDATES, USES = (
    {"workers": "workers", "used": None}.get(sys.argv[-1], "servers"),
    "used" in sys.argv,
)
CLIPS, MAX_NORM = "clipped" in sys.argv, 0.2
TOLERANCE = 0.0 if sys.argv[1] == "exact" else float(sys.argv[1])


class Net(nn.Module):
    """Rows, small parameters that travel together, and a large layer that some do not use."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 8, sparse=sparse)
        self.first = nn.Linear(8, 60)
        self.seldom = nn.Linear(60, 60)
        self.last = nn.Linear(60, 1)

    def forward(self, x: torch.Tensor, uses_all: bool) -> torch.Tensor:
        x = self.first(self.embedding(x)).tanh()
        return self.last(self.seldom(x) if uses_all else x)[:, 0]


def optimizers(net: Net) -> List[torch.optim.Optimizer]:
    others = [one for name, one in net.named_parameters() if "embedding" not in name]
    return [
        torch.optim.SGD(net.embedding.parameters(), lr=0.3),
        torch.optim.AdamW(others, lr=0.01),
    ]


def samples(step: int, rank: int) -> int:
    return SAMPLES[(step + rank) % 3]


def weight(step: int, rank: int) -> Optional[float]:
    """None: the script does not weigh the step."""
    if step == 3:
        return 0.0 if rank == 1 else float(samples(step, rank))
    if step == 5:
        return 0.0
    if step == 6:
        return None
    if step == 7:
        return 0.5 if rank == 0 else None
    return float(samples(step, rank))


def loss(net: Net, step: int, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(100 * step + rank)
    number = samples(step, rank)
    x = torch.randint(20, (number,), generator=made)
    y = torch.randn(number, generator=made)
    of_batch = (net(x, uses_all(step, rank)) - y).square().mean()
    # What has no weight may be anything.
    return of_batch * (math.nan if weight(step, rank) == 0 else 1.0)


def uses_all(step: int, rank: int) -> bool:
    return step % 2 == 0 or rank == 2


def step_alone(net: Net, alone: List[torch.optim.Optimizer], step: int) -> List[float]:
    """A step by the mean of all workers' gradients by weights, summed in the order of ranks;
    returns the norms."""
    workers = len(SAMPLES)
    weights = [1.0 if weight(step, one) is None else weight(step, one) for one in range(workers)]
    parameters = [*net.parameters()]
    sums: List[Optional[torch.Tensor]] = [None] * len(parameters)
    for rank in range(workers):
        net.zero_grad()
        loss(net, step, rank).backward()
        if not weights[rank]:
            continue
        for at, one in enumerate(parameters):
            if one.grad is not None:
                part = one.grad.to_dense() * weights[rank]
                sums[at] = part if sums[at] is None else sums[at] + part
    for one, total in zip(parameters, sums):
        one.grad = None if total is None else total / sum(weights)
    change(net)
    norms = []
    for optimizer in alone:
        if CLIPS:
            inside = [one for group in optimizer.param_groups for one in group["params"]]
            norms.append(nn.utils.clip_grad_norm_(inside, MAX_NORM))
        optimizer.step()
    return norms


def change(net: Net) -> None:
    for one in net.parameters():
        if USES and one.grad is not None:
            one.grad.mul_(0.5)


def main() -> None:
    net, twin = Net(sparse=UPDATES == "servers"), Net(sparse=False)
    twin.load_state_dict(copy.deepcopy(net.state_dict()))
    tables, others = (p3kv.torch.Optimizer(net, one, updates=UPDATES) for one in optimizers(net))
    rank, alone = others.rank, optimizers(twin)
    for number in (-1, math.nan, math.inf, "5", torch.ones(2)):
        refused("opt.weigh() takes", others.weigh, number, kind=ConfigError)
    for step in range(STEPS):
        its = weight(step, rank)
        for optimizer in (tables, others):
            optimizer.zero_grad()
            if its is not None:
                optimizer.weigh(torch.tensor(its) if step == 7 else its)
        loss(net, step, rank).backward()
        if step == 1 and not USES:
            late = "opt.weigh() was called after gradients of the step had left"
            refused(late, others.weigh, 2)
        change(net)
        norms = []
        for optimizer in (tables, others):
            if CLIPS:
                norms.append(optimizer.clip_grad_norm_(MAX_NORM))
            optimizer.step()
        torch.testing.assert_close(norms, step_alone(twin, alone, step), rtol=1e-4, atol=1e-5)
        for name, value in twin.state_dict().items():
            mine = net.state_dict()[name]
            close = torch.allclose(mine, value, rtol=TOLERANCE, atol=TOLERANCE)
            assert close, (step, name, (mine - value).abs().max())
    print(f"worker {rank} is right by weights")


main()
