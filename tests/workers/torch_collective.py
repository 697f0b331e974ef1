"""What all workers must call, and one calls alone, or otherwise. Argument: which of these."""

import p3kv.torch  # isort: skip
import os
import sys
import time

import torch
from torch import nn

CASE = sys.argv[1]
MINE = os.environ["DMLC_WORKER_ID"] == "0"


def model(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *more)


def optimizer(of: nn.Module, **how: str) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(of, torch.optim.Adam(of.parameters(), lr=0.01), **how)


def step() -> None:
    opt.zero_grad()
    net(torch.ones(1, 4)).sum().backward()
    if CASE == "clip" and MINE:
        opt.clip_grad_norm_(1.0)  # alone
    opt.step()


net = model(nn.ReLU(), nn.Linear(4, 3)) if CASE == "deeper" and not MINE else model()
if CASE == "late" and MINE:
    time.sleep(12)  # late
opt = optimizer(net)
if CASE == "buffers":
    opt = optimizer(net, buffers="own" if MINE else "broadcast")
if CASE == "second" and MINE:
    of = model()
    second = p3kv.torch.Optimizer(of, torch.optim.SGD(of.parameters()))  # alone
step()
if CASE == "sum" and MINE:
    opt.sum(1)  # alone
if CASE == "load" and MINE:
    opt.load_state_dict(opt.state_dict())  # alone
step()
opt.wait()
print("trained")
