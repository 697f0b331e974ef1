"""Optimizers with rules of their own in one job. Gradients do not depend on the weights, so each
weight is known after each step.

Argument, if any: "disagrees" has worker 1 choose another rule than worker 0.
"""

import p3kv.torch  # noqa: I001
import math
import os
import sys

import torch
from p3kv import config
from p3kv.errors import ConfigError
from p3kv.worker import this_process

STEPS, SIZE, STALENESS = 8, 50, 2
LOCAL = "local:steps=2,streaming=false,rate=1,momentum=0"


class Weight(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SIZE))
        self.register_buffer("seen", torch.zeros(1))

    def backward(self, step: int, rank: int) -> None:
        self.zero_grad()
        self.seen.fill_(rank)
        (self.weight * gradient(step, rank)).sum().backward()


def gradient(step: int, rank: int) -> torch.Tensor:
    """None of the last step, by which that of others comes for sure."""
    if step == STEPS:
        return torch.zeros(SIZE)
    return torch.randint(
        9, (SIZE,), generator=torch.Generator().manual_seed(9 * step + rank)
    ).float()


def made(rule: str) -> "tuple[Weight, p3kv.torch.Optimizer]":
    net = Weight()
    chosen = None if rule == config.current().consistency and len(sys.argv) == 1 else rule
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    return net, p3kv.torch.Optimizer(net, inner, consistency=chosen)


def has(net: Weight, value: torch.Tensor) -> None:
    torch.testing.assert_close(net.weight.detach(), value, rtol=0, atol=0)


if "disagrees" in sys.argv:
    made(f"delayed:staleness={1 + int(os.environ['DMLC_WORKER_ID'])}")

same, waits = made("bulk_synchronous")
rank, workers = waits.rank, waits.num_workers
try:
    made("delayd")
except ConfigError as error:
    assert "there is no consistency 'delayd'" in str(error), error
else:
    raise AssertionError("made")
late, goes_on = made(f"delayed:staleness={STALENESS}")
own, learns = made(LOCAL)
ahead, leads = made("bounded:staleness=1")
after = [torch.zeros(SIZE)]
for step in range(1, STEPS + 1):
    every = [gradient(step, one) for one in range(workers)]
    after.append(after[-1] - sum(every) / workers)
    for net, optimizer in ((same, waits), (late, goes_on), (own, learns), (ahead, leads)):
        net.backward(step, rank)
        optimizer.step()
    has(same, after[step])
    has(late, after[max(0, step - STALENESS)])
    has(own, after[step] if step % 2 == 0 else after[step - 1] - every[rank])
    assert [net.seen.item() for net in (same, late, own, ahead)] == [0, rank, rank, rank]
has(ahead, after[STEPS])
goes_on.synchronize()
has(late, after[STEPS])

# The first worker makes its steps before the others make more than one: no step waits for the norm
# of the one before.
net, optimizer = made(f"delayed:staleness={STALENESS}")
norms = []
for step in range(1, STALENESS + 2):
    if rank > 0 and step == 2:
        this_process.worker().barrier("to come later")
    net.backward(step, rank)
    norms.append(optimizer.clip_grad_norm_(math.inf))
    optimizer.step()
if rank == 0:
    this_process.worker().barrier("to come later")
for step, norm in enumerate(norms, start=1):
    mean = sum(gradient(step, one) for one in range(workers)) / workers
    torch.testing.assert_close(norm, mean.norm())
print("every weight is right by its rule")
