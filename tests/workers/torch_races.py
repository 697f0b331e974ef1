"""Threads meet where they rarely do: each is let run at the moment at which it does most harm."""

import p3kv.torch  # noqa: I001
import threading
from typing import Any, Callable, List, Tuple

import torch
from p3kv.frontends.torch import clipping
from p3kv.frontends.torch.values import bucket as buckets
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
    watch = buckets.watch
    threads: List[threading.Thread] = []

    def write_and_watch(watcher: Any, tensors: List[torch.Tensor]) -> None:
        if any(tensor is model.weight for tensor in tensors):
            assert watcher._there.wait(DEADLINE_S)
            threads.append(meanwhile(watcher.take_if_there))
        watch(watcher, tensors)

    buckets.watch = write_and_watch
    for number in range(1, 4):
        model(ONES).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        threads.pop().join(DEADLINE_S)
        assert torch.equal(model.weight.detach(), torch.full((3, 4), -float(number)))
        optimizer.wait()
        assert type(model.weight) is nn.Parameter, type(model.weight)
    buckets.watch = watch


def hooks_of_two_threads_begin_one_step() -> None:
    """As of a model on two devices, each of which torch gives a thread of backward's."""
    first, second = (nn.Linear(4, 100_000, bias=False) for _ in range(2))  # not in a bucket
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
    assert [one.key.round for one in optimizer._steps._shared.buckets] == [3, 3]


def two_threads_read_a_norm() -> None:
    model = nn.Linear(4, 3, bias=False)
    optimizer = trained(model)
    unwatch = watched.unwatch
    read: List[float] = []
    for _ in range(3):
        model(ONES).sum().backward()
        norm = optimizer.clip_grad_norm_(1.0)

        def read_and_unwatch(
            watcher: Any, tensors: Tuple[torch.Tensor], norm: torch.Tensor = norm
        ) -> None:
            unwatch(watcher, tensors)
            if tensors[0] is norm:
                meanwhile(lambda: read.append(float(norm)))

        clipping.unwatch = read_and_unwatch
        float(norm)
        assert type(norm) is torch.Tensor
        optimizer.step()
        optimizer.zero_grad()
    clipping.unwatch = unwatch
    assert len(read) == 3 and all(abs(one - 12**0.5) < 1e-3 for one in read), read


a_value_is_written_while_its_parameter_becomes_late()
hooks_of_two_threads_begin_one_step()
two_threads_read_a_norm()
print("threads meet and nothing is lost")
