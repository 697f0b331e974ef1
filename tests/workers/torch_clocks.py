"""Trains by a rule that bounds by how much workers lead, with p3kv.torch.

The last worker is slow. Each gradient is a number that says whose it is, so the weight tells how
many pushes of each worker it has. Argument: the staleness.
"""

import p3kv.torch  # noqa: I001
import sys
import time
from typing import List

import torch
from p3kv.worker import this_process

STEPS, UNIT = 12, 64.0
STALENESS = int(sys.argv[1])

model = torch.nn.Linear(40, 1, bias=False)
model.register_buffer("own", torch.zeros(1))
torch.nn.init.zeros_(model.weight)
inner = torch.optim.SGD(model.parameters(), lr=1.0, maximize=True)
optimizer = p3kv.torch.Optimizer(model, inner)
rank, workers = optimizer.rank, optimizer.num_workers


def pushes() -> List[int]:
    """By rank, how many pushes the weight has at least; a gradient counts with its part. Slices may
    have different ones of others."""
    found = torch.unique((model.weight.detach() * workers).round()).tolist()
    return [min(int(one // UNIT**rank % UNIT) for one in found) for rank in range(workers)]


lead = 0
for step in range(1, STEPS + 1):
    if rank == workers - 1:
        time.sleep(0.1)
    optimizer.zero_grad()
    model.own += 1  # each worker's own, or the others would wait for it
    (UNIT**rank * model(torch.ones(1, 40))).sum().backward()
    optimizer.step()
    has = pushes()
    assert has[rank] == step, has
    lead = max(lead, step - min(has))
assert lead <= STALENESS, lead
assert model.own.item() == STEPS
seen = this_process.worker().stats()
assert (seen["stale_values"], seen["most_stale_rounds"]) == (STEPS, lead), seen
this_process.worker().barrier("to see all pushes")
optimizer.synchronize()
assert pushes() == [STEPS] * workers, pushes()
print(f"led by {lead}")
