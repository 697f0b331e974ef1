"""Trains two dense layers with PyTorch, without an end; argument: seconds to compute in a step."""

import sys
import time

import torch

import p3kv.torch

COMPUTE_S = float(sys.argv[1])

model = torch.nn.Sequential(torch.nn.Linear(100, 200), torch.nn.Linear(200, 100))
optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=0.01))
while True:
    model(torch.ones(1, 100)).square().mean().backward()
    time.sleep(COMPUTE_S)
    optimizer.step()
    optimizer.zero_grad()
