"""Trains by P3KV_CONSISTENCY=delayed with p3kv.torch, and computes in this process which weights
each step must have.

Arguments: the optimizer's name, the staleness, and how weights are predicted, if they are.
"""

import p3kv.torch  # noqa: I001
import copy
import sys
from typing import List

import torch
from p3kv.worker import this_process

NAME, STALENESS, PREDICT = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
STEPS = 9
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}


class Net(torch.nn.Module):
    """A weight is frozen, and the script writes into it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 8, bias=False)  # which BatchNorm would make useless
        self.norm = torch.nn.BatchNorm1d(8)
        self.frozen = torch.nn.Parameter(torch.zeros(8), requires_grad=False)
        self.last = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x)) + self.frozen))


def backward(net: Net, step: int, rank: int, share: float = 1.0) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(100 * step + rank))
    (net(x).square().mean() * share).backward()


def made(net: Net) -> torch.optim.Optimizer:
    kind = getattr(torch.optim, "SGD" if NAME == "Nesterov" else NAME)
    return kind(net.parameters(), **OPTIMIZERS[NAME])


def values(net: Net) -> List[torch.Tensor]:
    return [one.detach().clone() for one in net.parameters()]


def predicted(net: Net, optimizer: torch.optim.Optimizer) -> List[torch.Tensor]:
    """The weights that torch's own optimizer would make of these in further steps."""
    if not PREDICT:
        return values(net)
    net = copy.deepcopy(net)
    ahead = made(net)
    ahead.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(STALENESS):
        for weight in net.parameters():
            if not weight.requires_grad:
                continue
            weight.grad = torch.zeros_like(weight)
            if PREDICT == ["true"]:
                # The mean gradient that leaves momentum as it is.
                weight.grad = 0.1 * ahead.state[weight]["momentum_buffer"]
        ahead.step()
    return values(net)


torch.manual_seed(3)
net = Net()
truth = copy.deepcopy(net)
optimizer = p3kv.torch.Optimizer(net, made(net))
rank, workers = optimizer.rank, optimizer.num_workers
alone = made(truth)
history = [values(truth)]
computes = copy.deepcopy(truth)
"""Has the weights with which gradients of a step are computed."""
if rank == 1:  # worker 0 goes on without it, though a weight has no gradient
    this_process.worker().barrier("to see that worker 0 goes on")
for step in range(STEPS):
    optimizer.zero_grad()
    net.frozen += 1.0
    backward(net, step, rank)
    optimizer.step()
    if rank == 0 and step == STALENESS:
        this_process.worker().barrier("to see that worker 0 goes on")

    for weight, value in zip(computes.parameters(), history[max(0, step - STALENESS)]):
        weight.data.copy_(value)
    computes.frozen.fill_(step + 1.0)
    computes.zero_grad()
    for one in range(workers):
        backward(computes, step, one, 1 / workers)
    for weight, other in zip(truth.parameters(), computes.parameters()):
        weight.grad = other.grad
    alone.step()
    history.append(predicted(truth, alone))
    for mine, its in zip(net.named_parameters(), history[max(0, step + 1 - STALENESS)]):
        name, weight = mine
        its = torch.full_like(weight, step + 1.0) if name == "frozen" else its
        torch.testing.assert_close(weight.detach(), its, rtol=1e-4, atol=1e-5, msg=f"{name} {step}")
optimizer.synchronize()
for (name, weight), its in zip(net.named_parameters(), truth.parameters()):
    if name != "frozen":
        torch.testing.assert_close(weight.detach(), its.detach(), rtol=1e-4, atol=1e-5)
print("every weight is the one that the rule names")
