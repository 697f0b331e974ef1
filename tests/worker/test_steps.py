"""Which optimizer settings the servers need, and when they get them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Callable, List, Tuple, cast

import pytest

from p3kv.worker.saving.checkpoints import Checkpoints
from p3kv.worker.steps import WorkerSteps
from p3kv.worker.tuning import Tuning


def _steps(send: Callable[..., None]) -> WorkerSteps:
    """`send` is told what is sent: from which step on, the oldest that needs any, and of which
    store."""
    nothing = SimpleNamespace(begin_step=lambda step: None)
    steps = WorkerSteps(0, {}, cast(Checkpoints, nothing), cast(Tuning, nothing))
    steps._send = send  # type: ignore[method-assign]
    return steps


class Sent:
    """The settings that a worker has sent: from which step on, and the oldest that needs any."""

    def __init__(self, own: bool = False) -> None:
        """`own`: rounds are each worker's own."""
        self.sent: List[Tuple[int, int]] = []
        self.steps = _steps(lambda from_step, oldest, *_: self.sent.append((from_step, oldest)))
        self._own = own
        if own:
            self.steps.make_own(0)

    def push(self, step: int, keys: int = 2) -> None:
        """As a store whose rate changes in each step does."""
        self.steps.send_settings(step, b"")
        for _ in range(keys):
            self.steps.of_store(0).count_push(step)

    def begin(self, step: int) -> None:
        self.steps.begin(step, self._own)

    def end(self, step: int, keys: int = 2) -> None:
        for _ in range(keys):
            self.steps.count_ended(step)


@pytest.mark.parametrize("own", [False, True])
def test_a_step_needs_settings_until_the_last_of_its_rounds_has_ended(own: bool) -> None:
    job = Sent(own)
    for step in range(1, 6):
        job.push(step)
        job.begin(step)
        job.end(step, keys=1 if step == 3 else 2)
    assert job.sent == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 3)]
    job.end(3, keys=1)
    job.push(6)
    assert job.sent[-1] == (6, 5)


def test_a_step_that_may_get_more_pushes_is_not_over() -> None:
    job = Sent()
    job.push(1)
    job.steps.begin(1)
    job.end(1)
    job.steps.send_settings(1, b"another")
    assert job.sent == [(1, 0), (1, 1)]
    job.push(1)
    job.push(2)
    assert job.sent[-1] == (2, 1)


@pytest.mark.parametrize("own", [False, True])
def test_settings_of_steps_far_ahead_wait_on_the_worker(own: bool) -> None:
    job = Sent(own)
    for step in range(1, 100):
        job.push(step)
    assert [step for step, _ in job.sent] == [1]
    for step in range(1, 100):
        job.begin(step)
        assert job.sent[-1][0] == min(step + 1, 99)
        job.end(step)
    assert job.sent[-1] == (99, 98)


def test_stores_forget_their_own_steps_only() -> None:
    sent: List[Tuple[int, int, int]] = []
    steps = _steps(lambda from_step, oldest, _, store: sent.append((store, from_step, oldest)))
    steps.new_store()

    def push(store: int, step: int) -> None:
        steps.send_settings(step, b"", store)
        steps.of_store(store).count_push(step)
        steps.begin(step)

    assert [steps.new_step() for _ in range(3)] == [1, 2, 3]
    push(0, 1)
    push(1, 2)
    # Another key of the first store's step, which is not over, although step 2 has begun.
    steps.of_store(0).count_push(1)
    steps.count_ended(1, 0)
    push(0, 3)
    push(0, 4)
    steps.count_ended(1, 0)
    steps.count_ended(3, 0)
    push(0, 5)
    push(1, 6)
    steps.count_ended(2, 1)
    push(1, 7)
    assert sent == [(0, 1, 0), (1, 2, 0), (0, 3, 1), (0, 4, 1), (0, 5, 4), (1, 6, 2), (1, 7, 6)]


def test_settings_of_a_store_wait_for_steps_of_all_stores() -> None:
    sent: List[Tuple[int, int]] = []
    steps = _steps(lambda from_step, _, __, store: sent.append((store, from_step)))
    steps.new_store()
    steps.send_settings(2, b"", 1)
    assert not sent
    steps.begin(1)
    assert sent == [(1, 2)]
