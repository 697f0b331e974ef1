"""Models and optimizers that are made and dropped in turn, then two optimizers of one model after
each other. Says how much memory there is at each, and with which weights it ends."""

import p3kv.torch  # isort: skip
import gc
import os
import threading
from typing import Iterator

import torch
from torch import nn

STEPS, SIZE = 3, 2000


def servers() -> Iterator[str]:
    port = f"DMLC_PS_ROOT_PORT={os.environ['DMLC_PS_ROOT_PORT']}"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ") as environ:
                said = environ.read().split("\0")
        except OSError:
            continue
        if port in said and "DMLC_ROLE=server" in said:
            yield pid


def megabytes(pid: object) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096 // 10**6


def train(what: str, model: nn.Module, opt: p3kv.torch.Optimizer) -> None:
    for step in range(opt.resumed_steps, STEPS):
        torch.manual_seed(100 * step + opt.rank)
        opt.zero_grad()
        model(torch.randn(4, SIZE)).pow(2).mean().backward()
        opt.step()
    total = sum(weight.double().sum().item() for weight in model.parameters())
    print(f"{what} from {opt.resumed_steps} ends with {total!r}", flush=True)


def sgd(model: nn.Module, rate: float = 0.1) -> p3kv.torch.Optimizer:
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    inner = torch.optim.SGD(trained, rate, momentum=0.9)
    return p3kv.torch.Optimizer(model, inner)


def fold(number: int) -> None:
    torch.manual_seed(number)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
    model[0].outside = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
    train(f"fold {number}", model, sgd(model))


[server] = servers()
for number in range(9):
    fold(number)
    gc.collect()
    used = megabytes(os.getpid()), megabytes(server), threading.active_count()
    print("used", *used, flush=True)
torch.manual_seed(99)
model = nn.Sequential(nn.Linear(SIZE, 10), nn.BatchNorm1d(10))
opt = sgd(model)
train("first", model, opt)
older, opt = opt, sgd(model, 0.01)
older.state_dict()  # as it was when the other one was made
train("second", model, opt)
