"""Trains as scripts for DistributedDataParallel do that do something between `backward` and `step`
for the first time in a later step, when gradients have left and servers have updated: each habit
with a model of its own. Prints losses, and what weights and the optimizer's states come to.
torch_late_changes.py [plain] [HABIT ...]; plain: by p3kv.torch.Optimizer, with no wrapper"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable, Dict

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

IS_PLAIN = sys.argv[1:2] == ["plain"]
if IS_PLAIN:
    import p3kv.torch
STEPS, FIRST = 14, 6
Parameters = Dict[str, torch.nn.Parameter]


class Net(torch.nn.Module):
    """Has a parameter of several slices, small ones, statistics, and one that some steps leave
    unused."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(8, 1200, bias=False), torch.nn.BatchNorm1d(1200), torch.nn.Tanh(),
            torch.nn.Linear(1200, 40), torch.nn.Tanh(), torch.nn.Linear(40, 1),
        )  # fmt: skip
        self.spare = torch.nn.Linear(8, 1)

    def forward(self, data: torch.Tensor, uses_spare: bool = True) -> torch.Tensor:
        made: torch.Tensor = self.body(data)
        return made + self.spare(data) if uses_spare else made


def scaled(named: Parameters) -> None:
    for name, one in named.items():
        if "body.3" in name and one.grad is not None:
            one.grad.mul_(0.5)


def masked(named: Parameters) -> None:
    one = named["body.0.weight"]
    assert one.grad is not None
    one.grad.data[::2] = 0


def cancelled(named: Parameters) -> None:
    named["body.5.weight"].grad = None


def replaced(named: Parameters) -> None:
    for one in named.values():
        one.grad = None if one.grad is None else one.grad.sign() * 0.1


def set_where_none(named: Parameters) -> None:
    one = named["spare.weight"]
    one.grad = torch.full_like(one, 0.25)


@torch.no_grad()
def written(named: Parameters) -> None:
    for one in named.values():
        one.mul_(0.99)


def written_by_data(named: Parameters) -> None:
    for one in named.values():
        one.data.clamp_(-0.2, 0.2)


CHANGES: Dict[str, Callable[[Parameters], object]] = {
    "scaled": scaled,
    "masked": masked,
    "cancelled": cancelled,
    "replaced": replaced,
    "set_where_none": set_where_none,
    "written": written,
    "written_by_data": written_by_data,
    "clipped": lambda named: clip_grad_norm_(named.values(), 0.05),
    "clipped_by_value": lambda named: clip_grad_value_(named.values(), 0.01),
}
HABITS = [*CHANGES, "rate", "left_out", "left_out_adds", "left_out_read", "second_loss", "states"]
HABITS += ["left_out_whole", "scaled_after_no_sync", "cancelled_after_clipping", "written_unused"]
HABITS += ["written_unused_by_two"]


def made(which: int, model: Net) -> torch.optim.Optimizer:
    groups = [{"params": [*part.parameters()]} for part in (model.body, model.spare)]
    if HABITS[which] == "left_out_whole":  # servers update whole tensors
        return torch.optim.Adafactor(groups, lr=0.01)
    if which % 3 == 0:
        return torch.optim.AdamW(groups, lr=0.01)
    if which % 3 == 1:
        return torch.optim.SGD(groups, lr=0.002, momentum=0.9, nesterov=True)
    return torch.optim.Adam(groups, lr=0.01, amsgrad=True)


def momenta(optimizer: torch.optim.Optimizer) -> float:
    states: Any = optimizer.state_dict()["state"].values()
    return sum(
        float(one.double().abs().sum())
        for state in states
        for one in state.values()
        if isinstance(one, torch.Tensor)
    )


def train(habit: str) -> None:
    number = HABITS.index(habit)
    torch.manual_seed(number)
    net: Any = Net()
    optimizer: Any = made(number, net)
    if IS_PLAIN:
        optimizer = p3kv.torch.Optimizer(net, optimizer, buffers="own")
        rank, model, no_sync = optimizer.rank, net, optimizer.no_sync
    else:
        model = DistributedDataParallel(net, find_unused_parameters=True)
        rank, no_sync = distributed.get_rank(), model.no_sync
    named = dict(net.named_parameters())
    numbers = torch.Generator().manual_seed(7 * number + rank)

    def tell(at: int, value: float) -> None:
        print(json.dumps({"rank": rank, "step": 100 * number + at, "loss": value}), flush=True)

    def computed(step: int) -> torch.Tensor:
        data = torch.randn(16, 8, generator=numbers)
        lacks = habit.startswith("written_unused") or (habit == "set_where_none" and step >= FIRST)
        made = model(data, not lacks)
        return (made - data.sum(1, keepdim=True)).square().mean()

    for step in range(STEPS):
        is_late = step >= FIRST and step % 3 != 2
        if habit != "left_out_adds" or step < FIRST or step % 3 == 0:
            optimizer.zero_grad()
        change, _, after = habit.replace("_unused", "").replace("_by_two", "").partition("_after_")
        if after:
            with no_sync():
                computed(step).backward()
        loss = computed(step)
        if is_late and habit.endswith("by_two"):  # a kind of passes that may not be the last
            loss = loss + computed(step)
        loss.backward()
        tell(step, loss.item())
        if after == "clipping":
            tell(30 + step, float(clip_grad_norm_(named.values(), 0.5)))
        if is_late and change in CHANGES:
            CHANGES[change](named)
        if is_late and habit == "rate":
            optimizer.param_groups[0]["lr"] = 0.02 / step
        if is_late and habit == "left_out_read":
            norm = sum(float(one.grad.square().sum()) for one in named.values())
            tell(50 + step, norm)
            continue
        if is_late and habit.startswith("left_out"):
            continue
        if is_late and habit == "second_loss":
            second = computed(step) * 0.1
            second.backward()
            tell(50 + step, second.item())
        if is_late and habit == "states":
            tell(50 + step, momenta(optimizer))
        optimizer.step()
    tell(90, sum(float(one.detach().double().abs().sum()) for one in model.parameters()))
    tell(91, momenta(optimizer))
    if not IS_PLAIN:
        tell(92, sum(float(one.double().abs().sum()) for one in model.buffers()))


torch.set_num_threads(1)
if not IS_PLAIN:
    distributed.init_process_group("gloo")
for habit in sys.argv[1 + IS_PLAIN :] or HABITS:
    train(habit)
if not IS_PLAIN:
    distributed.destroy_process_group()
