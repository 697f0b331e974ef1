"""Calls that all workers must make: who is told of those that wait, and what ends a job whose
workers would wait for ever."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, List

import pytest

from p3kv.errors import ConfigError, KeyMismatchError, P3Error
from p3kv.scheduler.job import Job
from p3kv.wire.messages import (
    AskWhereabouts,
    BarrierPassed,
    BarrierReached,
    Bye,
    CallAwaited,
    DeclareKey,
    JobSettings,
    Ready,
    StoreMade,
    Whereabouts,
)
from tests.jobs import SCRIPTS, JobResult, environment, run, run_job
from tests.scheduled import SLICE_SIZE, aborted, assembled, of, running, to, worker
from tests.torch_environment import NEEDS_TORCH, PYTHON

FIRST_S = 10.0


class Clock:
    """Looks at a job each second."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._now = 1000.0

    def look(self, **answers: Whereabouts) -> List[Any]:
        """What is sent at the next look at which anything is, with these answers to questions."""
        for _ in range(100):
            self._now += 1
            replies = self._job.look(self._now, FIRST_S)
            asked = of(replies, AskWhereabouts)
            for identity, ask in asked.items():
                answer = answers.get(identity.decode().replace(" ", ""))
                if answer is not None:
                    assert isinstance(ask, AskWhereabouts)
                    self._job.handle(identity, answer)
            if replies and not asked:
                return replies
        return []


def test_after_some_time_all_are_told_who_has_not_made_a_call_and_what_they_do() -> None:
    job = running(workers=3)
    job.handle(worker(0), BarrierReached("to load states", "a.py, line 3: load()"))
    job.handle(worker(2), BarrierReached("to load states", "a.py, line 3: load()"))
    replies = Clock(job).look(
        worker0=Whereabouts("a.py, line 3: load()"),
        worker1=Whereabouts("a.py, line 9: sleep(1)"),
        worker2=Whereabouts("a.py, line 3: load()"),
    )
    told = of(replies, CallAwaited)
    assert set(told) == {worker(0), worker(1), worker(2)}
    words = told[worker(1)].words
    assert re.match(r"workers 0, 2 have waited 1\d s to load states \(a.py, line 3: load", words)
    assert "worker 1 has not made this call: worker 1 is at a.py, line 9: sleep(1)" in words


def test_who_does_not_answer_is_named_all_the_same_and_again_when_the_time_has_doubled() -> None:
    job = running()
    job.handle(worker(0), BarrierReached())
    clock = Clock(job)
    for seconds in (11, 22):
        (told,) = {message.words for message in of(clock.look(), CallAwaited).values()}
        assert "worker 0 has waited" in told
        assert int(re.findall(r"waited (\d+) s at a barrier", told)[0]) >= seconds
        assert "worker 1 does not say where it is" in told
    passed = of(job.handle(worker(1), BarrierReached()), BarrierPassed)
    assert len(passed) == 2
    assert clock.look() == []


def test_a_job_whose_workers_wait_for_each_other_ends_and_says_where() -> None:
    job = running()
    job.handle(worker(0), BarrierReached("to load states", "a.py, line 3: load()"))
    clock = Clock(job)
    inside = Whereabouts("a.py, line 3: load()", lacks=((7, 2),))
    waits = Whereabouts("a.py, line 5: print(w)", 4, 12.0, ((7, 2),), "parameter 'w' in round 2")
    clock.look(worker0=inside, worker1=waits)  # all are told
    failure = aborted(clock.look(worker0=inside, worker1=waits), "each waits for", P3Error)
    assert (failure.role, failure.rank) == ("worker", 1)
    assert "it waits for parameter 'w' in round 2 (a.py, line 5: print(w))" in failure.reason
    assert "worker 0 waits to load states (a.py, line 3: load())" in failure.reason


@pytest.mark.parametrize(
    "answers",
    [
        [Whereabouts("x", 4, 12.0, ((7, 2),))],  # what worker 0 has pushed
        [Whereabouts("x", 4, 12.0, ((7, 2), (8, 2)))],  # some of it
        [Whereabouts("x", wait, 12.0, ((6, 2),)) for wait in (1, 2)],  # another wait each time
        [Whereabouts("x", 4, 2.0, ((6, 2),))],  # not for long
        [Whereabouts("x")],
    ],
    ids=["pushed", "partly", "goes on", "short", "computes"],
)
def test_a_job_of_which_one_worker_may_go_on_does_not_end(answers: List[Whereabouts]) -> None:
    job = running()
    job.handle(worker(0), BarrierReached())
    asked = 0
    for second in range(60):
        if of(job.look(1000.0 + second, FIRST_S), AskWhereabouts):
            job.handle(worker(0), Whereabouts("y", lacks=((8, 2), (6, 2))))
            job.handle(worker(1), answers[asked % len(answers)])
            asked += 1
    assert asked > 10
    assert job.failure is None


def test_workers_that_wait_for_each_other_s_values_end_the_job_too() -> None:
    """As where two optimizers are stepped in different orders: no call is open."""
    job = running()
    clock = Clock(job)
    assert clock.look() == []
    stuck = {
        f"worker{rank}": Whereabouts("x", 3, 11.0, ((rank, 5),), "", ((1 - rank, 5),))
        for rank in range(2)
    }
    for name, answer in stuck.items():
        job.handle(name.replace("worker", "worker ").encode(), answer)
    aborted(clock.look(**stuck), "each waits for what another", P3Error)


def test_a_worker_that_has_come_to_its_end_makes_no_call_any_more() -> None:
    job = running()
    job.handle(worker(1), BarrierReached("to clip"))
    clock = Clock(job)
    answers = {"worker0": Whereabouts(""), "worker1": Whereabouts("y")}
    clock.look(**answers)
    failure = aborted(clock.look(**answers), "has come to the end of its script", P3Error)
    assert failure.rank == 0


def test_where_workers_may_leave_one_at_its_end_is_about_to() -> None:
    job = assembled()
    for rank in range(2):
        job.handle(worker(rank), Ready(JobSettings(SLICE_SIZE, let_workers_leave=True)))
    job.handle(worker(1), BarrierReached())
    clock = Clock(job)
    answers = {"worker0": Whereabouts(""), "worker1": Whereabouts("y")}
    for _ in range(3):
        assert of(clock.look(**answers), CallAwaited)
    assert job.failure is None
    assert worker(1) in of(job.handle(worker(0), Bye()), BarrierPassed)


# What the optimizers of workers must have in common.


def test_optimizers_of_as_many_parameters_with_the_same_choices_agree() -> None:
    job = running()
    for rank in range(2):
        for at in range(2):
            job.handle(worker(rank), DeclareKey(at, (4,), "float32", f"{at}.weight"))
        made = StoreMade(0, 2, {"the optimizer": "Adam"}, same_names=True)
        assert job.handle(worker(rank), made) == []
    assert job.failure is None


@pytest.mark.parametrize(
    ("names", "uses", "words", "error"),
    [
        (
            ["a", "b", "c"],
            "Adam",
            "worker 0's optimizer has 2 parameters, worker 1's has 3, and worker 0 has no 'c' of "
            "shape (4,) (key 2)",
            KeyMismatchError,
        ),
        (
            ["a"],
            "Adam",
            "worker 1's has 1, and worker 1 has no 'b' of shape (4,)",
            KeyMismatchError,
        ),
        (["a", "z"], "Adam", "key 1 is 'b' on worker 0, and 'z' on worker 1", KeyMismatchError),
        (["a", "b"], "SGD", "on the optimizer: worker 0 has Adam, worker 1 has SGD", ConfigError),
    ],
    ids=["more", "fewer", "renamed", "other"],
)
def test_optimizers_that_differ_end_the_job_at_once(
    names: List[str], uses: str, words: str, error: type
) -> None:
    job = running()
    replies: List[Any] = []
    for rank, its, kind in ((0, ["a", "b"], "Adam"), (1, names, uses)):
        for at, name in enumerate(its):
            job.handle(worker(rank), DeclareKey(at, (4,), "float32", name, same_name=True))
        made = StoreMade(0, len(its), {"the optimizer": kind}, same_names=True)
        replies = job.handle(worker(rank), made)
    aborted(replies, words, error)
    assert to(replies, worker(0))


# In real jobs.


def torch_job(case: str) -> JobResult:
    command = [
        str(PYTHON), "-m", "p3kv", "launch", "-n", "2", "-s", "1", "--",
        str(PYTHON), str(SCRIPTS / "torch_collective.py"), case,
    ]  # fmt: skip
    return run(command, environment(P3KV_WARN_AFTER_S=2), 120)


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("case", "call", "meanwhile"),
    [
        pytest.param("load", "to load optimizer states", "opt.wait()", marks=pytest.mark.long),
        pytest.param("sum", "to sum a number", "opt.wait()", marks=pytest.mark.long),
        pytest.param(
            "clip",
            "to hold steps for a norm or votes",
            "net(torch.ones(1, 4)).sum().backward()",
            marks=pytest.mark.long,
        ),
        ("second", "to share the model", "opt.step()"),
    ],
)
def test_a_call_that_one_worker_alone_makes_ends_the_job(
    case: str, call: str, meanwhile: str
) -> None:
    result = torch_job(case)
    assert result.code != 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        told = re.findall(rf"worker 0 has waited \d+ s {call} \(.*\), and worker 1 has not", said)
        assert told, result.output
        assert "torch_collective.py, line" in told[0] and "# alone" in told[0], result.output
        assert "each waits for what another would have to do first" in said, result.output
    assert meanwhile in result.output.splitlines()[-1], result.output
    assert "trained" not in result.said_by("worker 0"), result.output


@NEEDS_TORCH
@pytest.mark.parametrize(
    ("case", "words"),
    [
        pytest.param(
            "deeper", r"worker 0 has no '2\.weight' of shape \(3, 4\)", marks=pytest.mark.long
        ),
        ("buffers", "workers disagree on buffers=: worker . has (own|broadcast), worker"),
    ],
)
def test_workers_that_make_their_optimizers_otherwise_all_learn_it(case: str, words: str) -> None:
    result = torch_job(case)
    assert result.code != 0, result.output
    for rank in range(2):
        assert re.search(words, result.said_by(f"worker {rank}")), result.output
    assert "has waited" not in result.output, result.output


@NEEDS_TORCH
def test_a_worker_that_makes_its_optimizer_late_is_named_and_the_job_goes_on() -> None:
    result = torch_job("late")
    assert result.code == 0, result.output
    said = result.said_by("worker 1")
    assert re.search("worker 0 is at torch_collective.py, line .*time.sleep.*# late", said), said
    assert result.output.count("trained") == 2, result.output


@pytest.mark.parametrize("case", ["load", "end"])
def test_states_that_one_worker_alone_loads_end_the_job(tmp_path: Path, case: str) -> None:
    """The other one waits for values, or has come to the end of its script."""
    result = run_job("collective.py", [case, tmp_path], 2, 1, P3KV_WARN_AFTER_S=2)
    assert result.code != 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert re.search(r"worker 0 has waited .*line \d+: trainer.load_states\(", said), said
    if case == "end":
        assert "it has come to the end of its script" in result.output, result.output
    else:
        assert re.search(r"it waits for .*asscalar\(\)\)  # waits", result.output), result.output


def test_trainers_that_differ_end_the_job(tmp_path: Path) -> None:
    result = run_job("collective.py", ["deeper", tmp_path], 2, 1)
    assert result.code != 0, result.output
    for rank in range(2):
        assert re.search("optimizer has [24] parameters", result.said_by(f"worker {rank}"))
