"""Trains by rounds of each worker's own, with p3kv.torch, and goes on from a checkpoint where there
is one.

The last worker is slow, and the first one begins late: what others push before has the rate of its
scheduler, which comes with its first step. Each gradient is a number that says whose it is, so the
weight tells how many pushes of each worker it has; another weight is trained by Adam. Argument:
after how many steps to end, when two checkpoints are complete, unless after all. The last worker
does not train a third weight, and takes what others have trained of it.
"""

import p3kv.torch  # noqa: I001
import os
import sys
import time
from typing import List

import torch
from complete import Complete
from p3kv.worker import this_process

STEPS, UNIT, FACTOR = 17, 64.0, 0.25
LAST = int(sys.argv[1]) if len(sys.argv) > 1 else STEPS

complete = Complete()
model, other = torch.nn.Linear(40, 1, bias=False), torch.nn.Linear(30, 2)
model.register_buffer("own", torch.zeros(1))
torch.nn.init.zeros_(model.weight)
model.others = torch.nn.Parameter(torch.zeros(3))
inner = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
optimizer = p3kv.torch.Optimizer(model, inner)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: FACTOR)
by_adam = p3kv.torch.Optimizer(other, torch.optim.Adam(other.parameters(), lr=0.01))
rank, workers = optimizer.rank, optimizer.num_workers
model.others.requires_grad_(rank < workers - 1)


def pushes() -> List[List[int]]:
    """By slice and rank, how many pushes the weight has; a gradient counts with its part."""
    found = torch.unique((model.weight.detach() * workers / FACTOR).round()).tolist()
    return [[int(one // UNIT**rank % UNIT) for rank in range(workers)] for one in found]


begun = optimizer.resumed_steps
assert by_adam.resumed_steps == begun
# All workers begin with all that belongs to the checkpoint, and with nothing more.
assert pushes() == [[begun] * workers], pushes()
this_process.worker().barrier("to see what all begin with")
if rank == 0:
    time.sleep(0.3)
for step in range(begun + 1, LAST + 1):
    if rank == workers - 1:
        time.sleep(0.05)
    for one in (optimizer, by_adam):
        one.zero_grad()
    model.own += 1
    (UNIT**rank * model(torch.ones(1, 40))).sum().backward()
    if rank < workers - 1:
        model.others.sum().backward()
    other(torch.ones(1, 30)).square().sum().backward()
    optimizer.step()
    by_adam.step()
    scheduler.step()
    assert all(one[rank] == step for one in pushes()), pushes()
    if "bounded:staleness=3" in os.environ["P3KV_CONSISTENCY"] and step > 3:
        assert model.others[0] * workers / FACTOR >= (workers - 1) * (step - 3), model.others
    if LAST < STEPS and rank == 0 and step in (6, LAST):
        complete.wait(2 if step == LAST else 1)
this_process.worker().barrier("to see all pushes")
optimizer.synchronize()
assert pushes() == [[LAST] * workers], pushes()
print(f"all pushes count once, after {begun} steps")
