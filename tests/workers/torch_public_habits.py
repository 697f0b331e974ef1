"""Trains as public scripts for DistributedDataParallel do, each habit with a model of its own:
subclasses and types of wrappers and optimizers, parameters of no wrapper or of several optimizers,
methods that were bound before, and what they do with a GradScaler. Prints losses.
torch_public_habits.py [HABIT ...]"""

from __future__ import annotations

import copy
import gc
import json
import math
import pickle
import sys
import time
from abc import ABC
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from typing import Any, Callable, Dict, Iterator, List

import torch
from torch import distributed, nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

STEPS = 12


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 8), nn.Linear(8, 5)
    )


class Training:
    """One habit's: its batches, and what it prints."""

    def __init__(self, number: int) -> None:
        self._number, self._told = number, 0
        self.rank = distributed.get_rank()
        self._numbers = torch.Generator().manual_seed(10 * number + self.rank)
        torch.manual_seed(number)

    def batches(self) -> Iterator[Any]:
        for _ in range(STEPS):
            data = torch.randn(8, 10, generator=self._numbers)
            yield data, data[:, :5].argmax(1)

    def tell(self, value: float) -> None:
        at = 1000 * self._number + self._told
        self._told += 1
        print(json.dumps({"rank": self.rank, "step": at, "loss": value}), flush=True)

    def tell_weights(self, *models: nn.Module) -> None:
        for model in models:
            for one in model.state_dict().values():
                self.tell(float(one.double().abs().sum()))


loss_of = nn.functional.cross_entropy


def train(
    it: Training,
    made: Any,
    loss: Callable[[Any, Any], torch.Tensor],
    *models: Any,
    before: Callable[[int], None] = lambda at: None,
) -> None:
    """As most scripts do; tells the losses, and the models' weights in the end. Calls `before` with
    each step's number."""
    for at, (data, labels) in enumerate(it.batches()):
        before(at)
        made.zero_grad()
        found = loss(data, labels)
        found.backward()
        made.step()
        it.tell(found.item())
    it.tell_weights(*models)


def step_of_the_base(it: Training) -> None:
    """As detectron2 clips, by a class that is put on the optimizer."""

    def step(self: Any, closure: Any = None) -> Any:
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], 0.05)
        return super(type(self), self).step(closure)

    model = net()
    made: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    made.__class__ = type("SGDWithGradientClip", (torch.optim.SGD,), {"step": step})
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda at: min(1.0, (at + 1) / 10))
    for data, labels in it.batches():
        loss = loss_of(wrapped(data), labels)
        made.zero_grad()
        loss.backward()
        made.step()
        scheduler.step()
        it.tell(loss.item())
    it.tell_weights(wrapped)


class StepsInModule(DistributedDataParallel):
    """As mmcv's, which calls the module in its own way and tells the reducer."""

    def train_step(self, *batch: torch.Tensor) -> torch.Tensor:
        self.reducer._rebuild_buckets()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        loss = loss_of(self.module(batch[0]), batch[1])
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer.prepare_for_backward([])
        return loss


class Unpacks(DistributedDataParallel):
    """As mmcv's later ones, which unpack what they are given."""

    def _run_ddp_forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(inputs[0]["data"], **named)


def wrappers_of_their_own(it: Training) -> None:
    for wrapped in (StepsInModule(net(), broadcast_buffers=False), Unpacks(net())):
        made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        if isinstance(wrapped, StepsInModule):
            train(it, made, wrapped.train_step, wrapped)
        else:
            train(it, made, lambda x, y, model=wrapped: loss_of(model({"data": x}), y), wrapped)


def no_wrapper(it: Training) -> None:
    model = net()
    replicate(model, bucket_cap_mb=100)
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(it, made, lambda data, labels: loss_of(model(data), labels), model)


def bound_steps(it: Training) -> None:
    """As accelerate has them, which sees by its own function whether the scaler makes a step, and
    sets rates only then; gradients overflow in the first steps."""
    for clips in (False, True):
        model = net()
        wrapped = DistributedDataParallel(model)
        made: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda at: 0.8**at)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=5)
        bound, was_called = made.step, [False]

        def patched(*given: Any, bound: Any = bound, was_called: Any = was_called) -> Any:
            was_called[0] = True
            return bound(*given)

        for data, labels in it.batches():
            with torch.autocast("cpu", dtype=torch.float16):
                loss = loss_of(wrapped(data).float(), labels)
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(made)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            made.step, was_called[0] = patched, False
            scaler.step(made)
            scaler.update()
            made.step = bound
            if was_called[0]:
                scheduler.step()
            made.zero_grad()
            it.tell(loss.item())
            it.tell(was_called[0])
        it.tell_weights(wrapped)


def scaled_steps_are_left_out(it: Training) -> None:
    """As SlowFast's first ones, whose scaler is told of them nevertheless; and rates are set
    between `backward` and `unscale_`, as in SAM 2."""
    for clips, sets in ((True, False), (False, False), (True, True)):
        model = net()
        wrapped = DistributedDataParallel(model)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for at, (data, labels) in enumerate(it.batches()):
            made.zero_grad()
            loss = loss_of(wrapped(data), labels)
            scaler.scale(loss).backward()
            if sets:
                made.param_groups[0]["lr"] = 0.1 / (at + 1)
            scaler.unscale_(made)
            if clips:
                it.tell(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            if sets or at > 3:
                scaler.step(made)
            scaler.update()
            it.tell(loss.item())
        it.tell_weights(wrapped)


class Lookahead(torch.optim.Optimizer):
    """As timm's: around another one, and without `super().__init__`."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self._base = base
        self.param_groups, self.defaults = base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._steps_made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self._base.step(closure)
        self._steps_made += 1
        if self._steps_made % 4 == 0:
            for one in (one for group in self.param_groups for one in group["params"]):
                state = self._base.state[one]
                if "slow" not in state:
                    state["slow"] = one.detach().clone()
                state["slow"].add_(one - state["slow"], alpha=0.5)
                one.copy_(state["slow"])
        return loss


def an_optimizer_around_another(it: Training) -> None:
    wrapped = DistributedDataParallel(net())
    made = Lookahead(torch.optim.AdamW(wrapped.parameters(), lr=1e-2))
    train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)


def parameters_of_each_rank(it: Training) -> None:
    """As PartialFC's and DLRM's, of other shapes, beside the wrapped model's in one optimizer."""
    model = net()
    wrapped = DistributedDataParallel(model)
    torch.manual_seed(50 + it.rank)
    own = nn.Linear(5, 5 + it.rank)
    made = torch.optim.SGD(
        [{"params": model.parameters()}, {"params": own.parameters()}], lr=0.1, momentum=0.9
    )
    train(it, made, lambda data, labels: loss_of(own(wrapped(data)), labels), wrapped, own)


def averages_that_are_wrapped(it: Training) -> None:
    """As k-diffusion's, whose buffers are rank 0's; a rate that is a tensor is written to between
    `backward` and `step`."""
    wrapped = DistributedDataParallel(net())
    average = DistributedDataParallel(copy.deepcopy(wrapped.module))
    average.module[1].running_mean += it.rank
    rate = torch.tensor(0.01)
    made = torch.optim.AdamW(wrapped.parameters(), lr=rate)
    for data, labels in it.batches():
        made.zero_grad()
        loss = loss_of(wrapped(data), labels)
        loss.backward()
        made.param_groups[0]["lr"].mul_(0.9)
        made.step()
        with torch.no_grad():
            for mean, one in zip(average.parameters(), wrapped.parameters()):
                mean.lerp_(one, 0.1)
            it.tell(loss_of(average.eval()(data), labels).item())
        it.tell(loss.item())
    it.tell_weights(wrapped, average)


class OwnArguments(torch.optim.SGD):
    """As apex's: `step` has other arguments than torch's, and `zero_grad` none."""

    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        for group in self.param_groups:
            for one in group["params"]:
                one.grad.mul_(scale)
        return super().step(closure)

    def zero_grad(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                one.grad = None


def steps_of_their_own(it: Training) -> None:
    """With other arguments; and replaced before the first forward pass, as to be counted."""
    wrapped = DistributedDataParallel(net())
    own = OwnArguments(wrapped.parameters(), lr=0.1)
    for data, labels in it.batches():
        own.zero_grad()
        loss_of(wrapped(data), labels).backward()
        own.step(scale=0.5)
    it.tell_weights(wrapped)
    wrapped = DistributedDataParallel(net())
    made: Any = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    bound, calls = made.step, []

    def counted(*given: Any) -> Any:
        calls.append(1)
        return bound(*given)

    made.step = counted
    train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)
    it.tell(len(calls))
    try:
        bound(scale=0.5)
    except TypeError:  # torch's own takes none
        it.tell(1.0)


def weights_are_broadcast(it: Training) -> None:
    """Rank 0 loads them in the middle, and gives them to the others by a collective."""
    wrapped = DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

    def before(at: int) -> None:
        if at == 7:
            if it.rank == 0:
                halved = {name: one * 0.5 for name, one in wrapped.state_dict().items()}
                wrapped.load_state_dict(halved)
            for one in wrapped.state_dict().values():
                distributed.broadcast(one, 0)

    train(it, made, lambda x, y: loss_of(wrapped(x), y), wrapped, before=before)


def weights_are_set(it: Training) -> None:
    """By `data`, as of WGAN, and in place after a read that keeps nothing of p3kv's class."""
    for how in ("set", "in place"):
        wrapped = DistributedDataParallel(net())
        made = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        for at, (data, labels) in enumerate(it.batches()):
            made.zero_grad()
            loss_of(wrapped(data), labels).backward()
            made.step()
            weight = wrapped.module[3].weight
            if at >= 6 and how == "set":
                weight.data = weight.data.clamp(-0.1, 0.1)
            elif at >= 6 and weight.norm().item() > 0:
                weight.data.mul_(0.9)
        it.tell_weights(wrapped)


def hooks_from_a_later_step_on(it: Training) -> None:
    """Of `register_post_accumulate_grad_hook`, which come before the mean."""

    def clamp(one: torch.Tensor) -> None:
        assert one.grad is not None
        one.grad.clamp_(-0.01, 0.01)

    wrapped = DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    for at, (data, labels) in enumerate(it.batches()):
        if at == 5:
            for one in wrapped.parameters():
                one.register_post_accumulate_grad_hook(clamp)
        made.zero_grad()
        loss_of(wrapped(data), labels).backward()
        made.step()
    it.tell_weights(wrapped)


def passes_without_a_call(it: Training) -> None:
    """Of the wrapper: gradients are each rank's own then. Once more through a graph that is kept,
    of the module itself, and on rank 0 alone between two steps."""
    for how, first in (("kept", 0), ("kept", 5), ("module", 5), ("alone", 5)):
        wrapped = DistributedDataParallel(net())
        made = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
        for at, (data, labels) in enumerate(it.batches()):
            made.zero_grad()
            if how == "alone" and at >= first and it.rank == 0:
                loss_of(wrapped.module.eval()(data), labels).backward()
                it.tell(sum(float(one.grad.norm()) for one in wrapped.parameters()))
                wrapped.train()
                made.zero_grad()
            loss = loss_of(wrapped(data), labels)
            loss.backward(retain_graph=True)
            if how == "kept" and at >= first:
                (loss * 0.5).backward()
            elif how == "module" and at >= first:
                loss_of(wrapped.module(data * 0.5), labels).backward()
            made.step()
        it.tell_weights(wrapped)


def clipped_twice(it: Training) -> None:
    """To log the norm, from the first step on or later, and then to clip."""
    for first in (0, 5):
        wrapped = DistributedDataParallel(net())
        made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        for at, (data, labels) in enumerate(it.batches()):
            made.zero_grad()
            loss_of(wrapped(data), labels).backward()
            if at >= first:
                norm = nn.utils.clip_grad_norm_(wrapped.parameters(), math.inf)
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            made.step()
        it.tell(float(norm))
        it.tell_weights(wrapped)


def buffers_grow(it: Training) -> None:
    """A bank that grows and buffers that are registered late are rank 0's, also where workers
    update and in the forward pass of an evaluation; not in a model that had no buffers."""
    for clips, has_buffers in ((False, True), (True, True), (False, False)):
        model = net() if has_buffers else nn.Sequential(nn.Linear(10, 5))
        if has_buffers:
            model.register_buffer("bank", torch.zeros(0, 2))
        wrapped = DistributedDataParallel(model)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for at, (data, labels) in enumerate(it.batches()):
            made.zero_grad()
            loss_of(wrapped(data), labels).backward()
            if clips:
                nn.utils.clip_grad_value_(model.parameters(), 0.05)
            made.step()
            if at == 3:
                model.register_buffer("late", torch.full((3,), float(it.rank)))
            if at > 3:
                model.late += 1 + it.rank
                if has_buffers:
                    model.bank = torch.cat([model.bank, torch.full((1, 2), 10.0 * at + it.rank)])
            if at % 3 == 2:
                with torch.no_grad():
                    it.tell(wrapped(data).square().sum().item())
            it.tell(sum(one.double().sum().item() for one in model.buffers()))
        it.tell_weights(wrapped)


def buffers_differ(it: Training) -> None:
    """Each rank registers another number of rows; not among those that all train."""
    model = net()
    wrapped = DistributedDataParallel(model)
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    for at, (data, labels) in enumerate(it.batches()):
        if at == 3:
            model.register_buffer("bank", torch.zeros(3 + it.rank))
        made.zero_grad()
        loss_of(wrapped(data), labels).backward()
        made.step()


def types_of_wrappers(it: Training) -> None:
    """As yolov7 and sd-scripts unwrap; also of copies, and of what a script's class has made."""
    model = DistributedDataParallel(net())
    copied = pickle.loads(pickle.dumps(model))  # noqa: S301
    for one in (model, copy.deepcopy(model), copied):
        it.tell(type(one) in (nn.parallel.DataParallel, nn.parallel.DistributedDataParallel))
        it.tell(type(one) is DistributedDataParallel)
    own = pickle.loads(pickle.dumps(Unpacks(net())))  # noqa: S301
    it.tell(type(own) is Unpacks and isinstance(own, nn.parallel.DistributedDataParallel))
    made = torch.optim.SGD(copied.parameters(), lr=0.1)
    train(it, made, lambda data, labels: loss_of(copied(data), labels), copied)
    made = torch.optim.SGD(own.parameters(), lr=0.1)
    train(it, made, lambda data, labels: loss_of(own({"data": data}), labels), own)


def a_step_before_the_first_pass(it: Training) -> None:
    """Which silences a scheduler; of the script's second model, and of an optimizer that follows
    another one of it."""
    for steps_before in (False, True):
        wrapped = DistributedDataParallel(nn.Linear(10, 5))
        for _ in range(2):
            made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
            if steps_before:
                made.zero_grad()
                made.step()
                scheduler.step()
            train(it, made, lambda x, y, model=wrapped: loss_of(model(x), y), wrapped)
            it.tell(scheduler.get_last_lr()[0])
            made.zero_grad()


def several_optimizers_of_a_model(it: Training) -> None:
    """By turns, the newest first in some; both in each step; one after the other."""
    for order in ("01", "10", "1101", "both", "111110"):
        wrapped = DistributedDataParallel(net())
        made = [
            torch.optim.Adam(wrapped.parameters(), lr=0.01),
            torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9),
        ]
        for at, (data, labels) in enumerate(it.batches()):
            now = made[::-1] if order == "both" else [made[int(order[at % len(order)])]]
            now[0].zero_grad()
            loss = loss_of(wrapped(data), labels)
            loss.backward()
            for one in now:
                one.step()
            it.tell(loss.item())
        it.tell_weights(wrapped)


def optimizers_of_several_models(it: Training) -> None:
    """As InfoGAN's third, which has both models, and an adversarial autoencoder's second, which has
    its encoder."""
    for shared in ("both", "first"):
        first, second = (DistributedDataParallel(nn.Linear(one, 5)) for one in (10, 5))
        every = [*first.parameters(), *second.parameters()]
        alone = torch.optim.Adam(first.parameters(), lr=0.01)
        joint = torch.optim.Adam(every, lr=0.01)
        if shared == "first":
            alone = torch.optim.Adam(first.parameters(), lr=0.01)
        for data, labels in it.batches():
            for made in (alone, joint):
                first.zero_grad()
                second.zero_grad()
                given = first(data)
                loss = loss_of(second(given) if made is joint else given, labels)
                loss.backward()
                made.step()
                it.tell(loss.item())
        it.tell_weights(first, second)


def groups_are_taken_away(it: Training) -> None:
    """As they freeze what is trained; where another class of optimizers has workers update."""
    wrapped = DistributedDataParallel(net())
    groups = [{"params": [*one.parameters()]} for one in wrapped.module if [*one.parameters()]]
    made = OwnArguments(groups, lr=0.1)
    for _ in range(2):
        train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)
        made.param_groups.pop(0)


def buffers_of_two_models(it: Training) -> None:
    """One optimizer has both: the second model's call leaves the first one's buffers alone."""
    first, second = DistributedDataParallel(net()), DistributedDataParallel(nn.Linear(5, 5))
    made = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    for data, labels in it.batches():
        made.zero_grad()
        loss_of(second(first(data)), labels).backward()
        made.step()
        it.tell(float(first.module[1].running_mean.abs().sum()))
    it.tell_weights(first, second)


def an_optimizer_goes_late(it: Training) -> None:
    """Its successor has its model; it is in a cycle with its scheduler, which one rank alone has
    collected by then."""
    wrapped = DistributedDataParallel(net())
    gc.disable()
    for collects in (1, 0, 0, 1):
        made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 2, 0.5)
        if it.rank == collects:
            gc.collect()
        train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)
        scheduler.step()
    gc.enable()


class OfOtherBases(ABC, torch.optim.SGD):
    """As pytorch_optimizer's, of which no object can be of a class of p3kv's."""


def an_optimizer_of_other_bases(it: Training) -> None:
    wrapped = DistributedDataParallel(net())
    made = OfOtherBases(wrapped.parameters(), lr=0.1, momentum=0.9)
    train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)


def weights_are_pruned(it: Training) -> None:
    """As in iterative pruning: masks are buffers that autograd keeps, they come late, and a weight
    is written when one is made permanent."""
    wrapped = DistributedDataParallel(nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5)))
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)

    def before(at: int) -> None:
        if at in (3, 6):
            prune.l1_unstructured(wrapped.module[0 if at == 3 else 2], "weight", 0.3)
        if at == 9:
            prune.remove(wrapped.module[2], "weight")

    train(it, made, lambda x, y: loss_of(wrapped(x), y), wrapped, before=before)


def models_are_traced(it: Training) -> None:
    """As for an export at each checkpoint, before anything else has read the weights."""
    wrapped = DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for data, labels in it.batches():
        made.zero_grad()
        loss_of(wrapped(data), labels).backward()
        made.step()
        wrapped.module.eval()
        traced = torch.jit.trace(wrapped.module, data)
        wrapped.module.train()
        if it.rank == 0:  # its own buffers are all the others' in the next pass
            it.tell(float(traced(data).detach().abs().sum()))
    it.tell_weights(wrapped)


def what_wrappers_leave_alone(it: Training) -> None:
    """A parameter and a buffer of each rank's own, as torchrec's tables."""
    model = net()
    left_alone = ["3.weight", "1.running_mean"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_alone)
    with torch.no_grad():
        model[3].weight.add_(it.rank)
        model[1].running_mean.add_(it.rank)
    wrapped = DistributedDataParallel(model)
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)


def gradients_without_a_pass(it: Training) -> None:
    """As in second-order methods, in all steps or from a later one on, by each rank for itself."""
    for first in (0, 3):
        wrapped = DistributedDataParallel(net())
        made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
        weights = [*wrapped.parameters()]
        for at, (data, labels) in enumerate(it.batches()):
            loss = loss_of(wrapped(data), labels)
            if at < first:
                made.zero_grad()
                loss.backward()
            else:
                for one, gradient in zip(weights, torch.autograd.grad(loss, weights)):
                    one.grad = gradient
            made.step()
            it.tell(loss.item())
        it.tell_weights(wrapped)


def thawed_for_no_optimizer(it: Training) -> None:
    """Some weights sleep until a later step, and the script trains them by hand then; the norm that
    it clips by is the whole model's."""
    for first in (0, 5):
        wrapped = DistributedDataParallel(net(), find_unused_parameters=True)
        body = [*wrapped.module[:2].parameters()]
        made = torch.optim.Adam(wrapped.module[2:].parameters(), lr=1e-2)
        for at, (data, labels) in enumerate(it.batches()):
            for one in body:
                one.requires_grad_(at >= first)
            wrapped.zero_grad()
            loss = loss_of(wrapped(data), labels)
            loss.backward()
            it.tell(float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)))
            made.step()
            with torch.no_grad():
                for one in body:
                    if one.grad is not None:
                        one -= 0.1 * one.grad
            it.tell(loss.item())
        it.tell_weights(wrapped)


def layers_sleep_late(it: Training) -> None:
    """The first one is frozen, its output is detached, or it is left out, by all or by one rank,
    after steps that were alike; it is the one whose gradient comes last."""
    for how in ("frozen", "detached", "left out", "left out by one"):
        model = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 5)])
        wrapped = DistributedDataParallel(Residual(model), find_unused_parameters=True)
        made = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

        def sleep(at: int, how: str = how, wrapped: Any = wrapped) -> None:
            sleeps = 5 <= at < 9 and (how != "left out by one" or it.rank == 1)
            wrapped.module.how = how if sleeps else ""
            if how == "frozen":
                wrapped.module.layers[0].requires_grad_(not sleeps)

        train(it, made, lambda x, y, model=wrapped: loss_of(model(x), y), wrapped, before=sleep)


class Residual(nn.Module):
    how = ""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        if "left out" in self.how:
            return last(data)
        between = data + first(data)
        return last(between.detach() if self.how == "detached" else between)


def frozen_beside_written(it: Training) -> None:
    """A frozen layer between others is part of the pass in which workers take over."""
    model = net()
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)
    wrapped = DistributedDataParallel(model)
    trained = [one for one in wrapped.parameters() if one.requires_grad]
    made = torch.optim.Adam(trained, lr=1e-2)

    def clamp(at: int) -> None:
        if at == 4:
            with torch.no_grad():
                trained[0].clamp_(-0.2, 0.2)

    train(it, made, lambda x, y: loss_of(wrapped(x), y), wrapped, before=clamp)


def calls_without_a_pass(it: Training) -> None:
    """An evaluation with gradients, and then another optimizer; and that of a second model, and
    then a second pass through the first one's graph."""
    wrapped, other = DistributedDataParallel(net()), DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    its = torch.optim.SGD(other.parameters(), lr=0.1)
    for at, (data, labels) in enumerate(it.batches()):
        if at == 3:
            it.tell(loss_of(wrapped(data), labels).item())
            made = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
        if at < 6:
            its.zero_grad()
            loss_of(other(data), labels).backward()
            its.step()
        if at == 6:
            other(data)
        made.zero_grad()
        loss = loss_of(wrapped(data), labels)
        loss.backward(retain_graph=True)
        if at >= 8:
            (0.5 * loss).backward()
        made.step()
        it.tell(loss.item())
    it.tell_weights(wrapped, other)


def groups_of_what_none_had(it: Training) -> None:
    """One of two optimizers gets a layer that none had; and one loses a layer."""
    for loses in (False, True):
        wrapped = DistributedDataParallel(net())
        first, last = (wrapped.module[at].parameters() for at in (0, 3))
        made = torch.optim.Adam(last, lr=1e-2)
        other = torch.optim.SGD([{"params": wrapped.module[4].parameters()}], lr=0.05)
        if loses:
            other.add_param_group({"params": [*first, *wrapped.module[1].parameters()]})

        def change(at: int, other: Any = other, loses: bool = loses, first: Any = first) -> None:
            if at == 5 and loses:
                other.param_groups.pop()
            elif at == 5:
                other.add_param_group({"params": first, "lr": 0.01})

        for at, (data, labels) in enumerate(it.batches()):
            change(at)
            wrapped.zero_grad()
            loss = loss_of(wrapped(data), labels)
            loss.backward()
            it.tell(float(torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)))
            made.step()
            other.step()
            it.tell(loss.item())
        it.tell_weights(wrapped)


def sparse_beside_what_none_has(it: Training) -> None:
    """SparseAdam has a table, and no optimizer has a layer; a parameter has no elements, weights
    have double precision, and gradients are read in a later step, as their norm is."""
    table, empty = nn.Embedding(10, 4, sparse=True), nn.Parameter(torch.empty(0, 3))
    model = nn.ModuleDict({"table": table, "own": nn.Linear(4, 6), "last": nn.Linear(6, 5)})
    model.register_parameter("empty", empty)
    wrapped = DistributedDataParallel(Tables(model))
    made = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    other = torch.optim.Adam([*model["last"].parameters(), empty], lr=1e-2)
    double = DistributedDataParallel(net().double())
    third = torch.optim.SGD([*double.parameters()], lr=0.1)
    for at, (data, labels) in enumerate(it.batches()):
        wrapped.zero_grad()
        double.zero_grad()
        loss = loss_of(wrapped(data[:, :3].abs().mul(3).long().clamp(max=9)), labels)
        loss.backward()
        own = loss_of(double(data.double()), labels)
        own.backward()
        if at > 4:
            it.tell(sum(float(one.grad.norm()) for one in model["last"].parameters()))
            it.tell(empty.grad.numel())
        it.tell(1e6 * float(torch.nn.utils.clip_grad_norm_(double.parameters(), 0.5)) % 1)
        for one in (made, other, third):
            one.step()
        it.tell(loss.item())
    it.tell(len(third.state_dict()["state"]))
    it.tell_weights(wrapped, double)


class Tables(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        between = self.parts["own"](self.parts["table"](at).mean(1))
        return self.parts["last"](between.tanh()) + self.parts.empty.sum()


def gradients_of_one_tensor(it: Training) -> None:
    """Each is a part of it, and the script clips by the whole."""
    wrapped = DistributedDataParallel(net(), broadcast_buffers=False)
    made = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    sizes = [one.numel() for one in wrapped.parameters()]
    flat = torch.zeros(sum(sizes))
    for one, part in zip(wrapped.parameters(), flat.split(sizes)):
        one.grad = part.view_as(one)
    for data, labels in it.batches():
        flat.zero_()
        loss = loss_of(wrapped(data), labels)
        loss.backward()
        it.tell(float(flat.norm()))
        flat.mul_(min(1.0, 0.1 / float(flat.norm())))
        made.step()
        it.tell(loss.item())
    it.tell_weights(wrapped)


def steps_without_a_pass(it: Training) -> None:
    """As Lightning's averages of weights, which are copied into the model; then a forward pass for
    the statistics of each batch, and a step that changes nothing."""
    wrapped = DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    average = [one.detach().clone() for one in wrapped.parameters()]
    for at, (data, labels) in enumerate(it.batches()):
        made.zero_grad()
        loss = loss_of(wrapped(data), labels)
        if at == 5:
            with torch.no_grad():
                for one, value in zip(wrapped.parameters(), average):
                    one.copy_(value)
        if at not in (5, 6):
            loss.backward()
        made.step()
        it.tell(loss.item())
        for one, value in zip(wrapped.parameters(), average):
            value.mul_(0.5).add_(one.detach(), alpha=0.5)
    it.tell_weights(wrapped)


class PassesInside(nn.Module):
    """As Lightning's manual optimization: the passes and steps of two models are in the forward
    pass, at whose end the wrapper is told that no pass follows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5))
        self.wrapped: List[Any] = []
        self.made = [torch.optim.SGD(one.parameters(), 0.05) for one in (self.first, self.second)]

    def forward(self, data: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        (wrapped,) = self.wrapped
        for made in self.made:
            made.zero_grad()
            found = self.first(data)
            if made is self.made[1]:
                found = self.second(found.detach())
            loss = loss_of(found, labels)
            wrapped.require_forward_param_sync = True
            wrapped.reducer._rebuild_buckets()
            wrapped.reducer.prepare_for_backward([loss])
            loss.backward()
            made.step()
        wrapped.require_backward_grad_sync = False
        return loss.detach()


def passes_inside_the_forward_pass(it: Training) -> None:
    """Each rank's statistics are its own then."""
    wrapped = DistributedDataParallel(PassesInside(), find_unused_parameters=True)
    wrapped.module.wrapped.append(wrapped)
    for data, labels in it.batches():
        it.tell(wrapped(data + it.rank, labels).item())
        wrapped.require_backward_grad_sync = True
        it.tell(float(wrapped.module.first[1].running_mean.sum()))
    it.tell_weights(wrapped)


def hooks_of_dropped_steps(it: Training) -> None:
    """What follows a step by a hook does not follow one that a scaler leaves out."""
    wrapped, calls = DistributedDataParallel(net()), []
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    made.register_step_post_hook(lambda *_: calls.append(1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    for data, labels in it.batches():
        made.zero_grad()
        loss = 4 * loss_of(wrapped(data), labels)
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()
        it.tell(loss.item())
        it.tell(len(calls))
    it.tell_weights(wrapped)


class Raises(nn.Module):
    """After its statistics have changed, where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.raises = net(), False

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found = self.inner(data)
        if self.raises:
            raise RuntimeError("out of memory")
        return found


def forward_passes_raise(it: Training) -> None:
    """On all ranks, which catch it: in `no_sync`, outside, and without gradients; before passes of
    either kind."""
    model = Raises()
    wrapped = DistributedDataParallel(model)
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(it.rank)
    for how in [
        "s",
        "s",
        "n!",
        "n",
        "s",
        "s",
        "n",
        "s!",
        "n",
        "s",
        "s!",
        "n",
        "e!",
        "s",
        "e!",
        "n",
        "s",
    ]:
        data = torch.randn(8, 10, generator=numbers) + it.rank
        model.raises = "!" in how
        try:
            with wrapped.no_sync() if "n" in how else nullcontext():
                if "e" in how:
                    torch.no_grad()(wrapped)(data)
                wrapped(data).square().mean().backward()
        except RuntimeError as error:
            assert "out of memory" in str(error)
        it.tell_weights(wrapped)
        if how == "n":
            it.tell(sum(float(one.grad.abs().sum()) for one in wrapped.parameters()))
        if how == "s":
            made.step()
            made.zero_grad()
    it.tell_weights(wrapped)


def scaler_in_double_precision(it: Training) -> None:
    torch.set_default_dtype(torch.float64)
    wrapped = DistributedDataParallel(net().float())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=2)
    for data, labels in it.batches():
        made.zero_grad()
        loss = loss_of(wrapped(data.float()), labels)
        scaler.scale(loss).backward()
        scaler.step(made)
        scaler.update()
        it.tell(loss.item())
    it.tell_weights(wrapped)
    torch.set_default_dtype(torch.float32)


def epochs_after_local_steps(it: Training) -> None:
    """Each rank's weights are its own when an epoch begins in which one rank has fewer batches."""
    wrapped = DistributedDataParallel(nn.Linear(10, 5))
    made = torch.optim.SGD(wrapped.parameters(), lr=0.05, momentum=0.9)
    batches = it.batches()

    def step() -> None:
        data, labels = next(batches)
        made.zero_grad()
        loss = loss_of(wrapped(data), labels)
        loss.backward()
        made.step()
        it.tell(loss.item())

    step()
    with wrapped.no_sync():
        for _ in range(3):
            step()
    with wrapped.join():
        for _ in range(5 - it.rank):
            step()
    it.tell_weights(wrapped)


def groups_after_local_steps(it: Training) -> None:
    """Each rank's weights are its own by then, and stay so."""
    wrapped = DistributedDataParallel(net(), find_unused_parameters=True)
    first, last = (wrapped.module[at].parameters() for at in (0, 4))
    made = torch.optim.SGD(last, lr=0.05, momentum=0.9)
    for at, (data, labels) in enumerate(it.batches()):
        if at == 8:
            made.add_param_group({"params": first, "lr": 0.02})
        wrapped.zero_grad()
        with wrapped.no_sync() if 3 <= at < 7 else nullcontext():
            loss = loss_of(wrapped(data), labels)
            loss.backward()
        made.step()
        it.tell(loss.item())
    it.tell_weights(wrapped)


def passes_after_the_last_step(it: Training) -> None:
    """As to see the loss once more; one rank comes late. The last habit: then the process ends."""
    wrapped = DistributedDataParallel(net())
    made = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    train(it, made, lambda data, labels: loss_of(wrapped(data), labels), wrapped)
    time.sleep(it.rank)
    for data, labels in it.batches():
        it.tell(loss_of(wrapped(data), labels).item())


HABITS: List[Callable[[Training], None]] = [
    step_of_the_base,
    wrappers_of_their_own,
    no_wrapper,
    bound_steps,
    scaled_steps_are_left_out,
    an_optimizer_around_another,
    parameters_of_each_rank,
    averages_that_are_wrapped,
    steps_of_their_own,
    weights_are_broadcast,
    weights_are_set,
    hooks_from_a_later_step_on,
    passes_without_a_call,
    clipped_twice,
    buffers_grow,
    types_of_wrappers,
    a_step_before_the_first_pass,
    several_optimizers_of_a_model,
    optimizers_of_several_models,
    groups_are_taken_away,
    buffers_of_two_models,
    an_optimizer_goes_late,
    an_optimizer_of_other_bases,
    weights_are_pruned,
    models_are_traced,
    what_wrappers_leave_alone,
    gradients_without_a_pass,
    thawed_for_no_optimizer,
    layers_sleep_late,
    frozen_beside_written,
    calls_without_a_pass,
    groups_of_what_none_had,
    sparse_beside_what_none_has,
    gradients_of_one_tensor,
    steps_without_a_pass,
    passes_inside_the_forward_pass,
    hooks_of_dropped_steps,
    epochs_after_local_steps,
    groups_after_local_steps,
    passes_after_the_last_step,
    forward_passes_raise,
    scaler_in_double_precision,
]
CHOSEN: Dict[str, Callable[[Training], None]] = {
    one.__name__: one for one in [*HABITS, buffers_differ]
}

distributed.init_process_group("gloo")
torch.set_num_threads(1)
for name in sys.argv[1:] or [one.__name__ for one in HABITS]:
    CHOSEN[name](Training([*CHOSEN].index(name)))
distributed.destroy_process_group()
