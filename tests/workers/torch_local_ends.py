"""Trains by the rule `local` until worker 1 kills itself; the other one is told."""

import p3kv.torch  # noqa: I001
import os
import signal

import torch
from p3kv.errors import P3Error

net = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 1))
optimizer = p3kv.torch.Optimizer(net, torch.optim.SGD(net.parameters(), lr=0.01))
try:
    for step in range(1000):
        optimizer.zero_grad()
        net(torch.ones(4, 20)).sum().backward()
        optimizer.step()
        if step == 10 and optimizer.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
except P3Error as error:
    assert "worker 1" in str(error), error
    print("right until the end")
    raise
