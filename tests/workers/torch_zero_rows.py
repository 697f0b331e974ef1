"""PyTorch: embeddings whose gradients are dense, beside the optimizer in this process alone.

One has gradients with few rows, which are dense for a while. The other one is as large, and its
gradients are always dense. Argument: the momentum.
"""

import p3kv.torch  # isort: skip
import sys

import torch

from p3kv.worker import this_process

ROWS, COLUMNS, STEPS, DENSE = 600, 32, 24, range(15, 18)
MOMENTUM = float(sys.argv[1])


def gradients(rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    both = torch.randn(2, ROWS, COLUMNS, generator=random)
    if step not in DENSE:
        some = torch.randint(ROWS, (20,), generator=random)
        few = torch.zeros(ROWS, COLUMNS)
        few[some] = both[0, some]
        few[torch.randint(ROWS, (1,), generator=random), 3] = -0.0
        both[0] = few
    if step == STEPS - 1:
        both[0, 0, 0] = torch.nan
    return both


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.few = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
        self.all = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))

    def forward(self, both: torch.Tensor) -> torch.Tensor:
        return (self.few * both[0]).sum() + (self.all * both[1]).sum()


def sgd(net: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        net.parameters(), lr=0.5, momentum=MOMENTUM, weight_decay=0.01 * MOMENTUM
    )


net, alone = Net(), Net()
own, opt = sgd(alone), p3kv.torch.Optimizer(net, sgd(net))
size_bytes = 4 * ROWS * COLUMNS
for step in range(STEPS):
    before = this_process.worker().stats()
    net(gradients(opt.rank, step)).backward()
    opt.step()
    opt.zero_grad()
    total = sum(gradients(rank, step) for rank in range(opt.num_workers)) / opt.num_workers
    alone.few.grad, alone.all.grad = total[0].clone(), total[1].clone()
    own.step()
    for mine, theirs in zip(net.parameters(), alone.parameters()):
        mine, theirs = mine.detach().view(torch.int32), theirs.detach().view(torch.int32)
        assert torch.equal(mine, theirs), step
    after = this_process.worker().stats()
    few, both = (after["travels"][at] for at in range(2))
    if 4 <= step < DENSE[0]:
        assert few.startswith("by rows: 9"), after["travels"]
        sent = after["bytes_sent"] - before["bytes_sent"]
        assert sent < 1.2 * size_bytes, (step, sent)
    if 7 <= step < DENSE[0]:
        changes = MOMENTUM == 0
        assert few.endswith("changed rows") == changes, (step, few)
        received = after["bytes_received"] - before["bytes_received"]
        assert (received < 1.3 * size_bytes) == changes, (step, received)
    assert step < 4 or both.startswith("whole: 0%"), both
assert few.startswith("whole: ") and few.endswith("Values: whole"), few
print(f"exact: {few}", flush=True)
