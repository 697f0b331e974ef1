"""Epochs of different lengths: a worker without batches is absent from the steps of the others."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, List, NamedTuple, NoReturn, Optional, Protocol

from p3kv.errors import NotSupportedError, P3Error
from p3kv.frontends.torch.script_marks import waited
from p3kv.frontends.torch.values.asleep import Asleep
from p3kv.frontends.torch.values.tally import HEARD, Tally
from p3kv.worker.stores import WorkerStore
from p3kv.worker.worker import Worker


class How(NamedTuple):
    """What a script says of the workers that have no batches left."""

    counts_absent: bool = True
    """Whether the mean is by the number of all workers, and not of those that have a batch."""
    refuses: bool = False
    """Whether the job ends where a worker has fewer batches than others."""


class Joined(Protocol):
    """The steps of an optimizer in such an epoch."""

    @property
    def attendance(self) -> Attendance:
        """Who makes them."""

    @property
    def asleep(self) -> Asleep:
        """Parameters that nobody trains, which another worker may wake in each step."""

    def begin_epoch(self, how: How) -> None:
        """Has all workers say in each step that they have a batch."""

    def end_epoch(self, is_over: bool) -> None:
        """All workers are over, or else this one's script has failed."""

    def say_absent(self) -> None:
        """Says that this worker has no batch for the next step."""

    def step_absent(self) -> None:
        """Takes part in a step of the others without a gradient, and takes its values."""


class Owner(Protocol):
    """The optimizer, whose first step may show that others make its steps."""

    _steps: Joined


class Attendance:
    """Which workers have a batch for a step, or a backward pass: each says so before its gradients
    leave, by one small key, and who has none waits for what the others say. Belongs to whoever
    makes the steps."""

    def __init__(self, worker: Worker, own: WorkerStore) -> None:
        """`own`: the optimizer's store; all workers make this."""
        self._rank = worker.rank
        self._tally = Tally(
            worker, own, "who has a batch", "which workers have a batch", worker.num_workers
        )
        self.last: Optional[int] = None
        """The last one, by rank, of those that have had the newest batch of the epoch."""

    def say(self, step: int, has_batch: bool) -> None:
        """Says whether this worker has a batch for its next step; `step` is the one before. Waits
        until all have said so of that."""
        self.present()
        self._tally.said[self._rank] = has_batch
        self._tally.push(step)

    @property
    def is_there(self) -> bool:
        """Whether all workers have said it."""
        return self._tally.is_there

    def present(self) -> List[int]:
        """Ranks of the workers that have a batch for the step of which this one has spoken last, in
        ascending order. Waits until all have said so; raises the job's failure."""
        heard = self._tally.sums()
        assert heard is not None
        present = [rank for rank, has_batch in enumerate(heard.tolist()) if has_batch]
        self.last = present[-1] if present else self.last
        return present


@contextmanager
def joined(optimizer: Owner, how: How) -> Iterator[None]:
    """Has the steps inside be those of an epoch in which workers may have different numbers of
    batches. It ends when all workers are at its end.

    Where several optimizers have such epochs at once, who is at the end of all of them makes the
    absent steps of all: those of the others may wait for each other.
    """
    if is_open(optimizer):
        raise NotSupportedError("opt.join() was called inside of opt.join(): leave the inner out")
    optimizer._steps.begin_epoch(how)
    _open.append(optimizer)
    try:
        yield
    except BaseException:
        _open.remove(optimizer)
        optimizer._steps.end_epoch(False)
        raise
    if optimizer is _open[0]:
        every, _open[:] = [*_open], []
        _step_absent(every, how)


def is_open(optimizer: object) -> bool:
    """Whether an optimizer is in such an epoch."""
    return optimizer in _open


def _step_absent(every: List[Owner], how: How) -> None:
    """Makes the steps for which other workers have batches, of each optimizer as they come."""
    for one in every:
        one._steps.say_absent()
    while every:
        HEARD.clear()
        for one in every:
            if one._steps.asleep.is_heard:
                one._steps.asleep.settle()
        for one in [one for one in every if one._steps.attendance.is_there]:
            steps = one._steps
            if not steps.attendance.present():
                steps.asleep.settle()  # all have made all of its steps
                steps.end_epoch(True)
                every.remove(one)
                continue
            if how.refuses:
                _refuse(steps.attendance.present())
            steps.step_absent()
            steps.say_absent()
            HEARD.set()
        if every:
            waited(HEARD.wait)


def _refuse(present: List[int]) -> NoReturn:
    raise P3Error(
        f"this worker has no batch left, and workers {present} have: give all the same number, or "
        "leave throw_on_early_termination out of opt.join()"
    )


_open: List[Owner] = []
"""Those whose epochs have begun, and not ended."""
