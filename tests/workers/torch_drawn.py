"""Trains by loops that are drawn at random: in some steps, from one that is drawn, too, each does
what scripts do to gradients, weights, rates and steps. Prints, in double precision, what it sees.
torch_drawn.py wrapped|plain SEED ...; plain: by p3kv.torch.Optimizer, with no wrapper"""

from __future__ import annotations

import copy
import json
import random
import sys
from typing import Any, Callable, Dict, List, Optional

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

IS_PLAIN = sys.argv[1] == "plain"
if IS_PLAIN:
    import p3kv.torch
STEPS, THAWED_AT = 10, 4
OPTIMIZERS: List[Callable[[Any, float], torch.optim.Optimizer]] = [
    lambda every, lr: torch.optim.SGD(every, lr=lr, momentum=0.9),
    lambda every, lr: torch.optim.AdamW(every, lr=lr * 0.2),
    lambda every, lr: torch.optim.Adam(every, lr=lr * 0.2, amsgrad=True),
    lambda every, lr: torch.optim.RMSprop(every, lr=lr * 0.05),
    lambda every, lr: torch.optim.Adagrad(every, lr=lr),
]
HABITS = [
    "reads", "rank_0_reads", "scales", "clips_values", "cancels_one", "clips", "clips_some",
    "second_loss", "no_sync", "leaves_out", "rate", "writes", "writes_late", "states",
    "zeroes_in_place", "zeroes_not", "spare", "freezes", "loads_states", "loads_weights",
    "evaluates", "calls_twice", "hook", "evaluates_others", "writes_by_data", "reads_after_step",
]  # fmt: skip


class Net(nn.Module):
    """`spare` is for some steps; `late` may come into the optimizer in mid-training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.late = nn.Linear(6, width), nn.Linear(width, 12)
        self.last, self.spare = nn.Linear(12, 3), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, uses_spare: bool) -> torch.Tensor:
        made = self.last(torch.tanh(self.late(torch.tanh(self.first(x))))) * self.gain
        return made + self.spare(x) if uses_spare else made


def norm_of(parameters: Any) -> float:
    every = [one.grad for one in parameters if one.requires_grad]
    return sum(float(one.norm()) for one in every if one is not None)


class Loop:
    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.net = Net(self.draw.choice([8, 40, 300]))
        self.comes_late = self.draw.random() < 0.25
        named = self.net.named_parameters()
        every = [one for name, one in named if not (self.comes_late and name.startswith("late"))]
        groups = [{"params": every[:2]}, {"params": every[2:]}]
        self.lr = self.draw.choice([0.02, 0.1])
        make = self.draw.choice(OPTIMIZERS)
        self.optimizer: Any = make(groups if self.draw.random() < 0.3 else every, self.lr)
        self.clips = self.draw.random() < 0.25
        self.model: Any = self.net
        if IS_PLAIN:
            self.optimizer = p3kv.torch.Optimizer(self.net, self.optimizer)
            self.rank, self.no_sync = self.optimizer.rank, self.optimizer.no_sync
        else:
            self.model = DistributedDataParallel(self.net, find_unused_parameters=True)
            self.rank, self.no_sync = distributed.get_rank(), self.model.no_sync
        self.net.late.requires_grad_(not self.comes_late)
        self.numbers = torch.Generator().manual_seed(99 * seed + self.rank)
        self.schedule: Any = None
        if self.draw.random() < 0.3:
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.7)
        drawn = self.draw.sample(HABITS, self.draw.randint(1, 3))
        if self.clips or "clips" in drawn:  # states can't be read once a step is clipped
            drawn = [one for one in drawn if one != "states"]
        self.since = {one: self.draw.choice([0, 2, 3, 4, 5, 6]) for one in drawn}
        self.does: Dict[str, bool] = {}
        self.told: List[float] = []
        self.seed = seed

    def tell(self, value: Any) -> None:
        at = 1000 * self.seed + len(self.told)
        self.told.append(float(value))
        print(json.dumps({"rank": self.rank, "step": at, "loss": self.told[-1]}), flush=True)

    def loss(self) -> torch.Tensor:
        x = torch.randn(5, 6, generator=self.numbers)
        made = self.model(x, self.does.get("spare", False))
        loss: torch.Tensor = (made - x[:, :3]).square().mean()
        return loss

    def run(self) -> None:
        for step in range(STEPS):
            self.does = {
                one: step >= since and self.draw.random() < 0.6 for one, since in self.since.items()
            }
            self.before(step)
            self.passes()
            self.between(step)
            if not self.does.get("leaves_out"):
                self.optimizer.step()
                self.after()
        self.tell(sum(one.detach().abs().sum() for one in self.net.parameters()))

    def before(self, step: int) -> None:
        net, does = self.net, self.does
        if does.get("freezes"):
            net.last.requires_grad_(not net.last.weight.requires_grad)
        if self.comes_late and step == THAWED_AT:
            net.late.requires_grad_(True)
            group = {"params": [*net.late.parameters()], "lr": self.lr / 2}
            self.optimizer.add_param_group(group)
        if does.get("loads_states"):
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        if does.get("loads_weights"):
            net.load_state_dict({name: one * 0.9 for name, one in net.state_dict().items()})
        with torch.no_grad():
            if does.get("writes"):
                net.first.weight.mul_(0.99)
            if does.get("writes_by_data"):
                net.late.weight.data.clamp_(-0.3, 0.3)
        if not does.get("zeroes_not"):
            self.optimizer.zero_grad(set_to_none=not does.get("zeroes_in_place"))

    def passes(self) -> None:
        does, late = self.does, self.net.late.weight
        if does.get("no_sync"):
            with self.no_sync():
                self.loss().backward()
        if does.get("calls_twice"):
            self.loss()
        hook: Optional[Any] = None
        if does.get("hook") and late.requires_grad:
            hook = late.register_hook(lambda gradient: gradient * 0.5)
        loss = self.loss()
        loss.backward()
        if hook is not None:
            hook.remove()
        self.tell(loss)

    def between(self, step: int) -> None:
        net, does = self.net, self.does
        if self.clips:
            self.tell(clip_grad_norm_(net.parameters(), 0.3))
        if does.get("reads"):
            self.tell(norm_of(net.parameters()))
        if does.get("rank_0_reads") and self.rank == 0:
            norm_of(net.first.parameters())
        if does.get("second_loss"):
            second = 0.3 * self.loss()
            second.backward()
            self.tell(second)
        if does.get("scales") and net.late.weight.grad is not None:
            net.late.weight.grad.mul_(0.5)
        if does.get("clips_values"):
            clip_grad_value_(net.parameters(), 0.01)
        if does.get("cancels_one"):
            net.first.bias.grad = None
        if does.get("clips"):
            self.tell(clip_grad_norm_(net.parameters(), 0.2))
        if does.get("clips_some"):
            self.tell(clip_grad_norm_(net.first.parameters(), 0.2))
        if does.get("rate"):
            self.optimizer.param_groups[0]["lr"] = self.lr * (0.5 + 0.1 * step)
        if does.get("states"):
            states: Any = self.optimizer.state_dict()["state"].values()
            every = [one for state in states for one in state.values()]
            self.tell(sum(one.abs().sum() for one in every if isinstance(one, torch.Tensor)))
        if does.get("writes_late"):
            with torch.no_grad():
                net.last.weight.mul_(0.98)

    def after(self) -> None:
        net, does = self.net, self.does
        if does.get("reads_after_step"):
            self.tell(norm_of(net.parameters()))
        if self.schedule is not None:
            self.schedule.step()
        with torch.no_grad():
            if does.get("evaluates_others"):
                kept = {name: one.clone() for name, one in net.state_dict().items()}
                net.load_state_dict({name: one * 0.5 for name, one in kept.items()})
                self.tell(net(torch.ones(2, 6), False).sum())
                net.load_state_dict(kept)
            if does.get("evaluates"):
                self.tell(net(torch.ones(2, 6), False).sum())


torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
if not IS_PLAIN:
    distributed.init_process_group("gloo")
for seed in sys.argv[2:]:
    Loop(int(seed)).run()
if not IS_PLAIN:
    distributed.destroy_process_group()
