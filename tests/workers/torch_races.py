"""Threads meet where they rarely do: each is let run at the moment at which it does most harm."""

import p3kv.torch  # noqa: I001
import threading
from typing import Any, Callable, List

import torch
from p3kv.frontends.torch import clipping
from p3kv.frontends.torch.values import late as late_values
from p3kv.frontends.torch.values import watched
from torch import nn

DEADLINE_S, MEANWHILE_S = 60.0, 0.2
ONES = torch.ones(1, 4)


def meanwhile(call: Callable[[], Any]) -> threading.Thread:
    """Calls in another thread, for as long as that takes, unless it waits for this one."""
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(MEANWHILE_S)
    return thread


def trained(model: nn.Module) -> p3kv.torch.Optimizer:
    return p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))


def a_value_is_written_while_its_parameter_becomes_late() -> None:
    model = nn.Linear(4, 3, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = trained(model)
    have_wait = late_values.have_wait
    threads: List[threading.Thread] = []

    def write_and_have_wait(tensor: torch.Tensor, what: Any) -> None:
        if tensor is model.weight:
            assert what._there.wait(DEADLINE_S)
            threads.append(meanwhile(what.take_if_there))
        have_wait(tensor, what)

    late_values.have_wait = write_and_have_wait
    for number in range(1, 4):
        model(ONES).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        threads.pop().join(DEADLINE_S)
        assert torch.equal(model.weight.detach(), torch.full((3, 4), -float(number)))
        optimizer.wait()
        assert type(model.weight) is nn.Parameter, type(model.weight)
    late_values.have_wait = have_wait


def hooks_of_two_threads_begin_one_step() -> None:
    """As of a model on two devices, each of which torch gives a thread of backward's."""
    first, second = (nn.Linear(4, 20_000, bias=False) for _ in range(2))  # not in a bucket
    model = nn.ModuleList([first, second])
    optimizer = trained(model)
    pushes = optimizer._steps._shared.pushes
    one_step, next_push = pushes.one_step, pushes.next
    seen: List[str] = []

    def begin_slowly() -> Any:
        seen.append("begins")
        threads.append(meanwhile(loss.backward))
        seen.append("has begun")
        return one_step()

    def noted_next(*arguments: Any) -> Any:
        seen.append("pushes")
        return next_push(*arguments)

    for step in range(3):
        threads: List[threading.Thread] = []
        loss = second(ONES).sum()
        if step:  # in the first one no gradient leaves during backward
            pushes.one_step, pushes.next = begin_slowly, noted_next
        else:
            loss.backward()
        first(ONES).sum().backward()
        for thread in threads:
            thread.join(DEADLINE_S)
        optimizer.step()
        optimizer.zero_grad()
        if step:
            assert seen == ["begins", "has begun", "pushes", "pushes"], seen
        seen.clear()
    assert [late.key.round for late in optimizer._steps._shared.every] == [3, 3]


def two_threads_read_a_norm() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = trained(model)
    have_back = watched.have_back
    read: List[float] = []
    for _ in range(3):
        model(ONES).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)

        def read_and_have_back(tensor: torch.Tensor, what: Any, norm: torch.Tensor = norm) -> None:
            have_back(tensor, what)
            if tensor is norm:
                meanwhile(lambda: read.append(float(norm)))

        clipping.have_back = read_and_have_back
        float(norm)
        assert type(norm) is torch.Tensor
        optimizer.step()
        optimizer.zero_grad()
    clipping.have_back = have_back
    assert len(read) == 3 and all(abs(one - 12**0.5) < 1e-3 for one in read), read


a_value_is_written_while_its_parameter_becomes_late()
hooks_of_two_threads_begin_one_step()
two_threads_read_a_norm()
print("threads meet and nothing is lost")
