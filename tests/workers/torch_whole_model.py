"""Looks whether all workers have all of worker 0's model, and all of it after each step."""

import p3kv.torch  # noqa: I001
import copy
import os
from typing import Any, Callable, List

import torch
from p3kv.errors import NotSupportedError
from torch import nn

RANK = int(os.environ.get("DMLC_WORKER_ID", "0"))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def of_worker_0(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(100)
    return make()


def of_this_worker(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(100 + RANK)
    return make()


def check_same(model: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    for name, mine in model.state_dict().items():
        assert torch.equal(mine, theirs[name]), f"worker {RANK}: {name}"


def refused(words: str, make: Callable[[], Any]) -> None:
    try:
        make()
    except NotSupportedError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"is not refused: {words}")


def sgd(model: nn.Module, parameters: Any, **more: Any) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(model, torch.optim.SGD(parameters, lr=0.1), **more)


class Odd(nn.Module):
    """With parameters of which the optimizer has few, and has some that nothing can train."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 2)
        self.tied = nn.Linear(5, 6, bias=False)
        self.tied.weight = self.body.weight
        self.large = nn.Parameter(torch.rand(300, 300), requires_grad=False)
        for dtype in (torch.int8, torch.int16, torch.uint8, torch.bool, torch.complex64):
            value = (torch.rand(3, 2) * 5).to(dtype)
            setattr(self, str(dtype)[6:], nn.Parameter(value, requires_grad=False))
        if hasattr(torch, "float8_e4m3fn"):
            self.eighth = nn.Parameter(torch.rand(5).to(torch.float8_e4m3fn), requires_grad=False)
        self.wide = nn.Parameter(torch.rand(1).expand(4), requires_grad=False)
        self.across = nn.Parameter(torch.rand(2, 3).t(), requires_grad=False)
        self.register_buffer("same", torch.rand(1).expand(4))
        self.register_buffer("weight", self.head.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(self.body(x) + self.tied(x))
        return x * self.same.sum() * self.wide.sum()


def all_begin_with_worker_0_s() -> None:
    for rule in ("bulk_synchronous", "local:steps=2", "asynchronous", "delayed:staleness=1"):
        model, first = of_this_worker(Odd), of_worker_0(Odd)
        quantised = [one for one in model.parameters() if not one.is_floating_point()]
        with torch.no_grad():
            model.head.weight += 1  # of the alias, too
        trained = [*model.head.parameters(), *quantised]
        opt = sgd(model, trained, consistency=rule)
        with torch.no_grad():
            first.head.weight += 1
        check_same(model, first)
        for step in range(3):
            opt.zero_grad()
            model(batch(step, RANK)).square().mean().backward()
            opt.step()
        assert torch.equal(model.weight, model.head.weight)
        if rule in ("bulk_synchronous", "local:steps=2"):
            opt.load_state_dict(opt.state_dict())
        opt.wait()


def another_optimizer_takes_all_parameters_over() -> None:
    """By worker 0's values again, and of what it does not have any more, too."""
    model = of_this_worker(Odd)
    opt = sgd(model, [*model.head.parameters(), *model.body.parameters()])
    opt.zero_grad()
    model(batch(0, RANK)).square().mean().backward()
    opt.step()
    with torch.no_grad():
        model.body.bias += RANK
        model.large += RANK
        model.same[0] += RANK
    before = copy.deepcopy(model)
    opt = sgd(model, model.head.parameters())
    with torch.no_grad():
        before.body.bias -= RANK
        before.large.copy_(model.large) if RANK else None
        before.same[0] -= RANK
    torch.testing.assert_close(model.state_dict(), before.state_dict())
    rows: List[float] = [model.large.sum().item(), model.body.bias.sum().item()]
    print("after the second optimizer:", rows)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))
        self.d = nn.Linear(5, 1)


def either_of_two_optimizers_has_buffers_travel() -> None:
    model, other = of_this_worker(Gan), of_worker_0(Gan)
    d, g = sgd(model, model.d.parameters()), sgd(model, model.g.parameters())
    check_same(model, other)
    for step in range(4):
        made = model.g(batch(step, RANK))
        d.zero_grad()
        model.d(made.detach()).mean().backward()
        d.step()  # before the other backward pass, as DCGAN's training does
        other.g(batch(step, 0))
        assert torch.equal(model.g[1].running_mean, other.g[1].running_mean)
        g.zero_grad()
        with d.no_sync():
            model.d(made).mean().backward()
        if step % 2:
            model.g(batch(100 + step, RANK))
            other.g(batch(100 + step, 0))
        g.step()
        other.load_state_dict({**model.state_dict(), **dict(other.named_buffers())})
        check_same(model, other)
    refused(
        "buffers='average', and an earlier",
        lambda: sgd(model, model.d.parameters(), buffers="average"),
    )
    d = sgd(model, model.d.parameters())  # the other one still has buffers travel
    g.zero_grad()
    model.d(model.g(batch(9, RANK))).mean().backward()
    d.step()
    g.step()
    other.g(batch(9, 0))
    assert torch.equal(model.g[1].running_mean, other.g[1].running_mean)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        self.register_buffer("last", torch.zeros(6))
        self.register_buffer("weight", torch.zeros(2, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.last = h.detach().mean(0)  # not the old one's value
        self.weight = self.b.weight.detach()
        mine = self.last.clone()
        y = self.b(self.norm(h) + self.last)
        assert torch.equal(mine, self.last), "what was assigned has been overwritten"
        return y


def buffers_that_a_forward_pass_replaces_stay() -> None:
    for how in ("broadcast", "average"):
        model = of_this_worker(Replaces)
        opt = sgd(model, model.parameters(), buffers=how)
        for step in range(4):
            opt.zero_grad()
            own = copy.deepcopy(model)
            model(batch(step, RANK)).square().mean().backward()
            opt.step()
            means = [own.a(batch(step, rank)).detach().mean(0) for rank in range(opt.num_workers)]
            expected = means[0] if how == "broadcast" else torch.stack(means).mean(0)
            torch.testing.assert_close(model.last, expected)
            c = copy.deepcopy(model)  # right after a step
            assert all(type(one) is nn.Parameter for one in c.parameters())
            torch.testing.assert_close(model.weight, model.b.weight.detach())
        assert all(type(one) is nn.Parameter for one in model.parameters())


def what_can_t_be_shared_is_refused() -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.LazyLinear(2))
    refused("'1.weight' has no shape yet", lambda: sgd(model, model[0].parameters()))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data)
    refused("'0.weight' and '1.weight' share memory", lambda: sgd(model, model.parameters()))
    flat = torch.zeros(20)
    model = nn.Linear(3, 3, bias=False)
    model.weight.data = flat[:9].view(3, 3)
    model.register_buffer("flat", flat)
    refused("'flat' has memory of the parameter 'weight'", lambda: sgd(model, model.parameters()))


for check in (
    all_begin_with_worker_0_s,
    another_optimizer_takes_all_parameters_over,
    either_of_two_optimizers_has_buffers_travel,
    buffers_that_a_forward_pass_replaces_stay,
    what_can_t_be_shared_is_refused,
):
    check()
    print(f"right: {check.__name__}")
