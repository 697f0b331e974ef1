"""What an optimizer of each rule can do, beside what the table of combinations says."""

from __future__ import annotations

from typing import Any, Callable

import p3kv.torch  # isort: skip
import torch
from torch import nn
from torch_refusals import refused

from p3kv.common.combinations import Feature, among
from p3kv.consistency import make_consistency
from p3kv.errors import StatesError

RULES = (
    "bulk_synchronous", "delayed:staleness=1", "delayed:staleness=1,predict=damped",
    "bounded:staleness=1", "bounded:staleness=1,lazy=1", "asynchronous", "local:steps=2",
)  # fmt: skip


def made(model: nn.Module, rule: str, momentum: float = 0.9) -> Any:
    torch.manual_seed(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    return p3kv.torch.Optimizer(model, inner, consistency=rule)


def expected(feature: Feature, rule: str, call: Callable[[], Any]) -> Any:
    """Calls, and checks that it is refused where the table says so, in its words."""
    found = among({feature, *make_consistency(rule, 2).features})
    no = next((entry for entry in found if entry.error is not None), None)
    if no is None:
        return call()
    print(f"{rule}: {no.in_words}")
    return refused(no.reason, call, kind=no.error or StatesError)


def clipped(rule: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = made(model, rule)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 2), 3.0)).sum().backward()  # a norm of 19 ** 0.5
        before = model.weight.detach().clone()
        if make_consistency(rule, 2).local is not None:  # the worker's own gradients
            assert abs(float(optimizer.clip_grad_norm_(1.0)) - 19**0.5) < 1e-5
        elif expected(Feature.CLIPPING, rule, lambda: optimizer.clip_grad_norm_(1.0)) is None:
            return
        optimizer.step()
    optimizer.wait()
    moved = float((before - model.weight.detach())[0, 0])
    assert 0 < moved < 0.6, (rule, moved)  # 0.24 by the momentum of clipped steps, 1.0 of others


def saved(rule: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = made(model, rule)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    state = expected(Feature.STATES, rule, optimizer.state_dict)
    if state is not None:
        optimizer.load_state_dict(state)


def weighed(rule: str) -> None:
    """The mean of the gradients -2 and 1 with weights 1 and 3 is 0.25, and without -0.5."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = made(model, rule, 0.9 if "predict" in rule else 0.0)
    before = float(model.weight)

    def weigh() -> bool:
        optimizer.weigh(3 if optimizer.rank else 1)
        return True

    for _ in range(3):
        optimizer.zero_grad()
        if not expected(Feature.WEIGHTS, rule, weigh):
            return
        (model(torch.ones(1, 1)).sum() * (1 if optimizer.rank else -2)).backward()
        optimizer.step()
    optimizer.synchronize()
    assert float(model.weight) < before, rule


def dropped(rule: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = made(model, rule)
    if make_consistency(rule, 2).local is not None:  # which refuses it by itself
        return
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        bad = step == 1 and optimizer.rank == 1
        if expected(Feature.DROPPING, rule, lambda bad=bad: optimizer.skip_step(bad)) is None:
            return
        optimizer.step()
    optimizer.wait()


def by_rows(rule: str) -> None:
    model = nn.Embedding(4, 2, sparse=True)
    if make_consistency(rule, 2).local is not None:  # such weights travel whole
        optimizer = made(model, rule, 0.0)
    else:
        optimizer = expected(Feature.ROWS, rule, lambda: made(model, rule, 0.0))
    if optimizer is not None:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([optimizer.rank])).sum().backward()
            optimizer.step()


for chosen in RULES:
    # No optimizer of rows predicts values.
    for use in (clipped, saved, weighed, dropped, *(() if "predict" in chosen else (by_rows,))):
        use(chosen)
        print(f"as the table says: {chosen}, {use.__name__}", flush=True)
print("all is as the table says")
