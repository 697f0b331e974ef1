"""What scripts do to an optimizer before and after p3kv is attached to it: there is one object.

Two workers. Models train beside the same training in this process alone, by the gradients of all
workers' batches, with the same numbers bit for bit. Argument: which check; by default all.
"""

import p3kv.torch  # noqa: I001
import copy
import pickle
import sys
import warnings
from collections import defaultdict
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from p3kv.worker import this_process
from torch import nn
from torch_refusals import refused

WORKERS = 2
Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, amsgrad=True)


def dense() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def sparse() -> nn.Module:
    torch.manual_seed(3)
    return nn.Embedding(30, 3, sparse=True)


def batch(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    if isinstance(model, nn.Embedding):
        return torch.randint(30, (4,), generator=random)
    return torch.randn(3, 4, generator=random)


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(batch(model, step, rank)).square().mean()
    return loss


class Pair:
    """A model and its twin, which this process trains alone; p3kv is attached to the model's
    optimizer after some steps."""

    def __init__(
        self,
        make: Make = adamw,
        build: Callable[[], nn.Module] = dense,
        before: int = 3,
        on_all: bool = True,
    ) -> None:
        """`on_all`: the model's optimizer has trained on all workers, and not only on worker 0."""
        self.twin = build()
        self.alone = make(self.twin.parameters())
        self.steps = 0
        for _ in range(before):
            self.step_alone()
        self.model = copy.deepcopy(self.twin)
        self.optimizer: Any = make(self.model.parameters())
        if this_process.worker().rank == 0 or on_all:
            self.optimizer.load_state_dict(copy.deepcopy(self.alone.state_dict()))

    def attach(self, **options: Any) -> "Pair":
        before = self.optimizer
        self.optimizer = p3kv.torch.Optimizer(self.model, before, **options)
        assert self.optimizer is before
        return self

    def step_alone(self) -> None:
        self.alone.zero_grad()
        for rank in range(WORKERS):
            (loss_of(self.twin, self.steps, rank) / WORKERS).backward()
        self.alone.step()
        self.steps += 1

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, self.steps, self.optimizer.rank).backward()

    def step(self, count: int = 1) -> "Pair":
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.step_alone()
        return self

    def check(self) -> None:
        for one, other in zip(self.model.parameters(), self.twin.parameters()):
            assert torch.equal(one, other), (one, other)
        same(self.optimizer.state_dict(), self.alone.state_dict())
        # What worker 0 writes into its states then is not for others to read before.
        this_process.worker().barrier("to write into states")

    def state(self, of: Optional[torch.optim.Optimizer] = None) -> Dict[str, Any]:
        """That of the first parameter."""
        optimizer = of or self.optimizer
        found: Dict[str, Any] = optimizer.state[optimizer.param_groups[0]["params"][0]]
        return found


def same(mine: Dict[str, Any], theirs: Dict[str, Any]) -> None:
    assert mine["state"].keys() == theirs["state"].keys()
    for at, state in theirs["state"].items():
        assert mine["state"][at].keys() == state.keys()
        for name, value in state.items():
            found = mine["state"][at][name]
            assert type(found) is type(value), (name, found, value)
            if isinstance(value, torch.Tensor):
                assert torch.equal(found, value) and found.dtype == value.dtype, (name, found)
                assert found.shape == value.shape, (name, found.shape, value.shape)
            else:
                assert found == value, (name, found, value)


# Before it is attached.


def states_from_before_go_on() -> None:
    for make in (sgd, adamw, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adafactor):
        Pair(make).attach().step(3).check()
    Pair(adamw, on_all=False).attach().step(2).check()
    Pair(torch.optim.SparseAdam, sparse).attach().step(2).check()
    pair = Pair().attach()
    same(pair.optimizer.state_dict(), pair.alone.state_dict())
    Pair(before=0).attach().step(2).check()


def states_go_on_by_every_rule() -> None:
    by_each = Pair().attach(consistency="local:steps=2")
    by_each.backward()
    by_each.optimizer.step()
    assert by_each.state()["step"] == 4
    late = Pair().attach(consistency="delayed:staleness=1").step(2)
    late.optimizer.synchronize()
    assert late.state()["step"] == 5
    asynchronous = Pair(sgd)
    moment = asynchronous.state()["momentum_buffer"].clone()
    asynchronous.attach(consistency="bounded:staleness=2")
    before = asynchronous.twin[0].weight.detach()  # this worker may begin with the other's update
    asynchronous.optimizer.zero_grad()
    for parameter in asynchronous.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    asynchronous.optimizer.step()
    this_process.worker().barrier("to see both updates")
    asynchronous.optimizer.synchronize()
    moved = before - asynchronous.model[0].weight.detach()
    torch.testing.assert_close(moved, 0.1 * (0.9 + 0.81) * moment)


def halves_go_on_from_their_master() -> None:
    """A master that is not the weight's any more is left out."""
    weight, copied = (nn.Linear(2, 2).to(torch.bfloat16) for _ in range(2))
    optimizer = p3kv.torch.Optimizer(weight, sgd(weight.parameters()))
    for _ in range(3):
        weight(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    assert saved["state"][0]["master_param"].dtype is torch.float32
    copied.load_state_dict(weight.state_dict())
    other = p3kv.torch.Optimizer(copied, sgd(copied.parameters()))
    other.load_state_dict(saved)
    with torch.no_grad():
        weight.weight.zero_()
    optimizer = p3kv.torch.Optimizer(weight, optimizer)
    for one, its in ((weight, optimizer), (copied, other)):
        for parameter in one.parameters():
            parameter.grad = torch.zeros_like(parameter)
        its.step()
    master = saved["state"][0]["master_param"]
    moment = 0.1 * 0.9 * saved["state"][0]["momentum_buffer"]
    for its, expected in ((other, master - moment), (optimizer, -moment)):
        torch.testing.assert_close(its.state_dict()["state"][0]["master_param"], expected)


def schedulers_from_before_and_after_are_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = Pair(sgd, before=0)
        early = torch.optim.lr_scheduler.StepLR(pair.optimizer, 2, 0.5)
        pair.attach()
        late = torch.optim.lr_scheduler.ExponentialLR(pair.optimizer, 0.5)
        others = [
            torch.optim.lr_scheduler.StepLR(pair.alone, 2, 0.5),
            torch.optim.lr_scheduler.ExponentialLR(pair.alone, 0.5),
        ]
        for _ in range(4):
            pair.step()
            for scheduler in (early, late, *others):
                scheduler.step()
    pair.check()
    assert pair.optimizer.param_groups[0]["lr"] == pair.alone.param_groups[0]["lr"] != 0.1


def hooks_from_before_and_after_run_once() -> None:
    called: List[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: called.append(name)

    pair = Pair(before=0)
    inner = pair.optimizer
    inner.register_step_pre_hook(note("early pre"))
    inner.register_state_dict_post_hook(note("saved"))
    pair.attach()
    pair.optimizer.register_step_post_hook(note("late post"))
    pair.optimizer.register_load_state_dict_pre_hook(note("loads"))
    pair.optimizer.register_load_state_dict_post_hook(note("loaded"))
    pair.step()
    assert called == ["early pre", "late post"], called
    pair.optimizer.load_state_dict(pair.optimizer.state_dict())
    assert called[2:] == ["saved", "loads", "loaded"], called
    pair.step()
    pair.check()

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    only_servers = Pair().attach(updates="servers")
    only_servers.step()
    only_servers.optimizer.register_step_pre_hook(halve)
    refused("and not in a hook of opt.step()", only_servers.step)
    for one in (pair.optimizer, pair.alone):
        one.register_step_pre_hook(halve)
    pair.step()
    assert pair.optimizer.updates == "workers"
    pair.check()
    halved = Pair(sgd, before=0).attach()
    halved.optimizer.register_step_pre_hook(
        lambda *_: [one.grad.mul_(0.5) for one in halved.model.parameters()] and None
    )
    halved.alone.param_groups[0]["lr"] = 0.05
    with halved.optimizer.no_sync():  # so gradients leave in step
        halved.step(2)
    for one, other in zip(halved.model.parameters(), halved.twin.parameters()):
        torch.testing.assert_close(one, other)
    by_itself = Pair(before=0).attach(consistency="local:steps=4")
    called.clear()
    by_itself.optimizer.register_step_pre_hook(note("pre"))
    by_itself.backward()
    by_itself.optimizer.step()
    assert called == ["pre"]


# Afterwards.


def what_the_script_writes_into_states_counts() -> None:
    pair = Pair(before=1).attach().step(2)
    for optimizer in (pair.optimizer, pair.alone):
        pair.state(optimizer)["exp_avg"].mul_(0.5)
        pair.state(optimizer)["exp_avg_sq"].data.add_(1.0)  # which torch does not count
    pair.step(2).check()
    for optimizer in (pair.optimizer, pair.alone):
        optimizer.state.clear()
    pair.step(2).check()
    pair.optimizer.state["the script's"] = 7
    for optimizer in (pair.optimizer, pair.alone):
        del optimizer.state[optimizer.param_groups[0]["params"][0]]
    pair.step()
    assert pair.optimizer.state.pop("the script's") == 7
    pair.check()
    for optimizer in (pair.optimizer, pair.alone):
        optimizer.state = defaultdict(dict)
    pair.step(2).check()
    alias = pair.optimizer.state
    pair.step()
    one = pair.model[0].weight
    assert torch.equal(alias[one]["exp_avg"], pair.state(pair.alone)["exp_avg"])
    assert type(copy.deepcopy(alias)) is defaultdict
    pair.step()
    pair.backward()
    same(pair.optimizer.state_dict(), pair.alone.state_dict())  # before the step
    pair.optimizer.step()
    pair.state()
    pair.backward()
    pair.state()["exp_avg"].zero_()
    refused("state of '0.weight' was changed between backward", pair.optimizer.step)
    wrong = Pair(sgd).attach(updates="servers")
    wrong.state()["momentum_buffer"] = torch.ones(3)
    if wrong.optimizer.rank == 0:
        wrong.optimizer.zero_grad()
        refused("'momentum_buffer' in the state of '0.weight' has 3 elements", wrong.optimizer.step)


def what_is_loaded_counts() -> None:
    pair = Pair(before=0).attach().step(2)
    saved, again = pair.optimizer.state_dict(), copy.deepcopy(pair.alone.state_dict())
    pair.step(2)
    for state_dict, optimizer in ((saved, pair.optimizer), (again, pair.alone)):
        state_dict["param_groups"][0]["lr"] = 0.5
        optimizer.load_state_dict(state_dict)
        assert optimizer.param_groups[0]["lr"] == 0.5
    same(pair.optimizer.state_dict(), pair.alone.state_dict())
    pair.step(2)
    for optimizer in (pair.optimizer, pair.alone):
        optimizer.param_groups = copy.copy(optimizer.param_groups)
        optimizer.param_groups[0]["lr"] = np.float64(0.25)
        optimizer.param_groups[0]["note"] = object()  # which no optimizer reads
    pair.step()
    pair.check()
    for optimizer in (pair.optimizer, pair.alone):
        optimizer.param_groups[0]["lr"] = 0.1 * np.cos(0.5)
    pair.step(2).check()
    only_servers = Pair().attach(updates="servers").step()
    only_servers.backward()
    refused("called between backward", only_servers.optimizer.load_state_dict, {})
    only_servers.optimizer.step()


def groups_come_in_mid_training() -> None:
    """Servers update what there is then, with the states of before."""

    def of_last(every: Any) -> torch.optim.Optimizer:
        return adamw([*every][2:])

    pair = Pair(of_last, before=0)
    for model in (pair.model, pair.twin):
        model[0].requires_grad_(False)
    pair.attach().step(3)
    for at in (0, 1):
        for optimizer, model in ((pair.optimizer, pair.model), (pair.alone, pair.twin)):
            one = [*model[0].requires_grad_(True).parameters()][at]
            optimizer.add_param_group({"params": [one], "lr": 0.02})
        pair.step(2)
    pair.check()
    assert pair.optimizer.updates == "servers"
    wide = nn.Parameter(torch.ones(1).expand(3))
    refused("share memory", pair.optimizer.add_param_group, {"params": [wide]})
    pair.step(2).check()
    with pair.optimizer.join():
        refused("inside of opt.join()", pair.optimizer.add_param_group, {"params": []})
    local = dense()
    its = p3kv.torch.Optimizer(local, sgd(local[2].parameters()), consistency="local:steps=4")
    rest = {"params": [*local[0].parameters()]}
    refused("'0.weight', '0.bias' can't be added after", its.add_param_group, rest)


def groups_keep_their_parameters() -> None:
    for change, words in [
        (lambda opt, rest: opt.param_groups[0]["params"].extend(rest), "can't come into"),
        (lambda opt, rest: opt.param_groups[0].update(params=rest), "can't come into"),
    ]:
        model = dense()
        inner = sgd(model[2].parameters())
        optimizer = p3kv.torch.Optimizer(model, inner, updates="servers")

        def changed(change: Any = change, optimizer: Any = optimizer, model: Any = model) -> None:
            change(optimizer, [*model[0].parameters()])
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()

        refused(f"'0.weight', '0.bias' {words}", changed)
    for updates in ("servers", None):
        pair = Pair().attach(updates=updates).step()
        for optimizer, model in ((pair.optimizer, pair.model), (pair.alone, pair.twin)):
            optimizer.param_groups[0]["params"] = [*model[2].parameters()]
            optimizer.state.pop(model[0].weight), optimizer.state.pop(model[0].bias)
            model[0].requires_grad_(False)
        if updates is not None:
            refused("'0.weight', '0.bias' can't be taken from", pair.backward)
            pair.optimizer.zero_grad()
            pair.attach()
        pair.step(2).check()
    local = dense()
    by_itself = p3kv.torch.Optimizer(local, sgd(local[2].parameters()), consistency="local:steps=4")
    by_itself.param_groups[0]["params"].append(local[0].weight)
    refused("'0.weight' can't come into", by_itself.step)


def copies_have_its_states_and_train_when_they_are_attached() -> None:
    pair = Pair().attach().step()
    both = copy.deepcopy({"model": pair.model, "optimizer": pair.optimizer})
    pickled = pickle.loads(pickle.dumps(both))  # noqa: S301
    for one in (both, pickled):
        apart = one["optimizer"]
        assert isinstance(apart, torch.optim.AdamW) and isinstance(apart, p3kv.torch.Optimizer)
        assert apart.rank == pair.optimizer.rank
        same(apart.state_dict(), pair.alone.state_dict())
        apart.zero_grad()
        refused("attach it by optimizer = p3kv.torch.Optimizer", apart.step)
    pair.model, pair.optimizer = both["model"], both["optimizer"]
    pair.attach().step(2).check()


def it_can_be_attached_again() -> None:
    pair = Pair().attach().step()
    pair.attach().step(2).check()
    fresh = adamw(pair.model.parameters())
    replaced, pair.optimizer = pair.optimizer, fresh
    pair.attach()
    pair.alone = adamw(pair.twin.parameters())
    pair.step(2).check()
    refused("another p3kv.torch.Optimizer has been made", replaced.step)
    local = Pair().attach().step().attach(consistency="local:steps=4")
    local.backward()
    local.optimizer.step()
    assert local.state()["step"] == 5


def what_is_refused_is_as_before() -> None:
    model = dense()

    class Own(torch.optim.SGD):
        pass

    own = Own(model.parameters(), lr=0.1)
    refused(
        "can't run the optimizer Own",
        lambda: p3kv.torch.Optimizer(model, own, updates="servers"),
    )
    assert type(own) is Own
    patched: Any = sgd(model.parameters())
    patched.step = lambda: None
    refused("step was replaced by", p3kv.torch.Optimizer, model, patched)
    optimizer = p3kv.torch.Optimizer(model, sgd(model.parameters()))
    assert repr(optimizer).startswith("SGD (\nParameter Group 0\n")
    assert type(optimizer).__name__ == "SGD" and isinstance(optimizer, torch.optim.SGD)


def a_scalar_s_state_has_its_shape() -> None:
    model = nn.ParameterDict({"scale": torch.tensor(2.0)})
    optimizer = p3kv.torch.Optimizer(model, torch.optim.Adafactor(model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        model["scale"].square().backward()
        optimizer.step()
    assert {one.shape for one in optimizer.state_dict()["state"][0].values()} == {()}


CHECKS: List[Callable[[], None]] = [
    states_from_before_go_on,
    states_go_on_by_every_rule,
    halves_go_on_from_their_master,
    schedulers_from_before_and_after_are_its_own,
    hooks_from_before_and_after_run_once,
    what_the_script_writes_into_states_counts,
    what_is_loaded_counts,
    groups_come_in_mid_training,
    groups_keep_their_parameters,
    copies_have_its_states_and_train_when_they_are_attached,
    it_can_be_attached_again,
    what_is_refused_is_as_before,
    a_scalar_s_state_has_its_shape,
]


if __name__ == "__main__":
    for check in CHECKS:
        if sys.argv[1:] in ([], [check.__name__]):
            check()
            print("right:", check.__name__)
