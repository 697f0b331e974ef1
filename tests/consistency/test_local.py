"""Workers that train by themselves: which key is exchanged when, and what comes of it."""

from __future__ import annotations

import re
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import List

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p3kv.consistency import LocalTraining, make_consistency
from p3kv.errors import ConfigError, ProtocolError
from p3kv.server.optimizer import State
from p3kv.server.outer import OuterOptimizer, OuterSettings
from p3kv.store.turns import Progress, turns
from p3kv.wire.messages import DeclaredKey, encode
from tests.frontends.test_torch import job as torch_job
from tests.jobs import JOB_S, SCRIPTS, JobResult, held_port, results, run_job, start_role
from tests.torch_environment import NEEDS_TORCH, PYTHON
from tests.whole_jobs.test_host_sums import run_on_hosts

DILOCO, STREAMING = "local:steps=3,streaming=false", "local:steps=5,delay=1"
LAZY, MEAN = "bounded:staleness=3,lazy=1", "local:steps=1,rate=1,momentum=0"
"""Lazy workers' changes add up; the mean is that of all workers' weights after each step."""
LOCAL = {"P3KV_CONSISTENCY": "local:steps=4"}
LAG_S = 3
"""As in the scripts."""


def rules(*seldom: str) -> list:
    """All; these as long tests: workers of the other front end show them, and the mean is one more
    number of steps."""
    marked = [pytest.param(rule, marks=pytest.mark.long) for rule in seldom]
    return [rule for rule in (DILOCO, STREAMING, LAZY, MEAN) if rule not in seldom] + marked


sizes = st.lists(st.integers(0, 10_000), min_size=1, max_size=40)
steps = st.integers(1, 60)


def streaming(steps: int, delay: int = 0) -> LocalTraining:
    return LocalTraining(steps, 0.7, 0.9, True, delay)


# What a setting chooses.


def test_a_setting_chooses_steps_and_the_outer_optimizer() -> None:
    rule = make_consistency("local", 3)
    assert rule.local == LocalTraining(50, 0.7, 0.9, True, 5)
    assert not rule.lets_go_ahead and rule.exchanges_all and not rule.own_rounds
    chosen = make_consistency("local:steps=7,rate=1,momentum=0,streaming=false", 3)
    assert chosen.local is not None and chosen.local[:4] == (7, 1.0, 0.0, False)
    at_once = make_consistency("local:steps=1", 3).local
    assert at_once is not None and not at_once.streaming


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("steps=0", "steps=0; it must be a whole number from 1"),
        ("steps=2.5", "steps=2.5"),
        ("steps=true", "steps=True"),
        ("rate=0", "rate=0; it must be a number above 0"),
        ("rate=nan", "rate=nan"),
        ("rate=inf", "rate=inf"),
        ("rate=fast", "rate='fast'"),
        ("momentum=1", "momentum=1; it must be a number from 0 to less than 1"),
        ("momentum=-0.1", "momentum=-0.1"),
        ("streaming=2", "streaming=2; it must be true or false"),
        (
            "steps=5,delay=5",
            "delay=5; it must be a whole number from 0 to less than steps, 5",
        ),
        ("delay=1.5", "delay=1.5"),
        ("delay=2,streaming=false", "delay=2 with streaming=false"),
        ("every=3", "it takes steps, rate, momentum, streaming, delay"),
    ],
)
def test_wrong_parameters_are_named(wrong: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_consistency(f"local:{wrong}", 2)
    assert says in str(caught.value)


# Turns.


@given(sizes, steps)
@example([0, 0], 3)
@example([3, 1_000], 50)
def test_turns_keep_a_link_busy_that_carries_all_in_the_steps_and_it_is_never_late(
    sizes: List[int], steps: int
) -> None:
    """The link begins after the first step, and carries a part of one by `steps` in each."""
    found = turns(sizes, streaming(steps))
    total = sum(sizes)
    ends = list(accumulate(sizes))
    for size, end, turn in zip(sizes, ends, found):
        assert 1 <= turn.first <= steps and 1 <= turn.lag <= steps
        # It is not idle: when what was before the key has been carried, the key has left.
        assert (turn.first - 1) * total <= (end - size) * steps
        # And no earlier than a step before that: no step sends more than its part and one key.
        assert not total or turn.first == steps or (end - size) * steps < turn.first * total
        # When the value is taken, the link has carried it.
        assert (turn.first + turn.lag - 1) * total >= end * steps


@given(sizes, steps, st.integers(0, 59))
def test_a_delay_leaves_links_so_many_steps_more_as_far_as_the_next_turn(
    sizes: List[int], steps: int, delay: int
) -> None:
    exactly, later = turns(sizes, streaming(steps)), turns(sizes, streaming(steps, delay))
    for one, other in zip(exactly, later):
        assert other == (one.first, min(steps, one.lag + delay))


def test_without_streaming_all_keys_are_exchanged_after_the_same_step() -> None:
    assert turns([1, 2, 3], LocalTraining(7, 0.7, 0.9, False, 0)) == [(7, 0)] * 3


@given(steps, st.data())
def test_a_key_takes_each_value_once_and_before_its_next_difference_leaves(
    steps: int, data: st.DataObject
) -> None:
    [turn] = turns([1], streaming(steps, data.draw(st.integers(0, steps - 1))))
    progress, sent_at = Progress(turn, steps), None
    for step in range(1, 4 * steps + 1):
        due = progress.step()
        if due.takes_before:
            assert sent_at is not None and step == sent_at + turn.lag
            sent_at = None
        if due.sends:
            assert sent_at is None and step % steps == turn.first % steps
            sent_at = step
        assert not due.takes_now and progress.awaits == (sent_at is not None)


# The outer optimizer.


def key(dtype: str) -> DeclaredKey:
    return DeclaredKey(0, "w", (6,), dtype, [(0, 6)])


class Slices:
    """A key on a server, with an outer optimizer."""

    def __init__(self, weight: np.ndarray, momentum: float) -> None:
        self.parts = [weight]
        self.key = key(weight.dtype.name)
        self.optimizer = OuterOptimizer()
        self.optimizer.weight = 4.0
        self.optimizer.configure(1, encode(OuterSettings(0.5, momentum, 4)), 0)

    def cut(self, lengths: List[int]) -> None:
        """Cuts the key anew, as a server does."""
        exported = [self.optimizer.export(self.key, index) for index in range(len(self.parts))]
        states = [state for state in exported if state is not None]
        self.parts = [part.copy() for part in np.split(self.weight, np.cumsum(lengths)[:-1])]
        for index, state in enumerate(State.joined(states).cut(lengths) if states else []):
            self.optimizer.load(self.key, index, state)

    def update(self, total: np.ndarray, step: int) -> None:
        at = 0
        for index, part in enumerate(self.parts):
            self.optimizer.update(self.key, index, part, total[at : at + len(part)].copy(), step)
            at += len(part)

    @property
    def weight(self) -> np.ndarray:
        return np.concatenate(self.parts)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_optimizer_is_sgd_with_nesterov_s_momentum_whatever_the_slices(
    dtype: str, momentum: float
) -> None:
    """Of half precision it keeps the value in single precision, by which small changes add up."""
    random = np.random.RandomState(0)
    wide = np.dtype("float64" if dtype == "float64" else "float32")
    first = random.standard_normal(6).astype(dtype)
    whole, cut = Slices(first.copy(), momentum), Slices(first.copy(), momentum)
    master, velocity = first.astype(wide), np.zeros(6, wide)
    for step in range(1, 9):
        cut.cut([[2, 4], [6], [1, 2, 3]][step % 3])
        total = (random.standard_normal(6) / 1_000).astype(wide)
        mean = total / 4
        velocity = momentum * velocity + mean
        master = master - 0.5 * (mean + momentum * velocity)
        whole.update(total, step)
        cut.update(total, step)
        np.testing.assert_allclose(whole.weight, master.astype(dtype), rtol=1e-6)
        np.testing.assert_array_equal(whole.weight, cut.weight)


def test_what_no_worker_would_send_is_refused() -> None:
    optimizer = OuterOptimizer()
    with pytest.raises(ProtocolError, match="no optimizer settings hold"):
        optimizer.update(key("float32"), 0, np.zeros(6), np.zeros(6), 1)
    with pytest.raises(ProtocolError, match="an outer optimizer can't have"):
        OuterSettings(0.5, 1.0, 4)
    with pytest.raises(ProtocolError, match="that no outer optimizer can have"):
        optimizer.load(key("float32"), 0, State({"other": np.zeros(6)}, {}))


# Whole jobs, beside the same training of all workers in one process, bit for bit.


@NEEDS_TORCH
@pytest.mark.parametrize("rule", rules(DILOCO, STREAMING, MEAN))
def test_workers_of_one_front_end_train_as_in_one_process(rule: str) -> None:
    """With a schedule, clipping, and a layer that some steps do not use."""
    result = torch_job("torch_local.py", P3KV_SLICE_SIZE=100, P3KV_CONSISTENCY=rule)
    assert result.code == 0, result.output
    assert result.output.count("right by the rule local") == 2, result.output
    steps = {DILOCO: 2, STREAMING: 4, LAZY: 1}.get(rule)
    told = re.findall(r"lack what each worker .* the last (\d) of 17", result.said_by("worker 0"))
    assert told[:1] == ([str(steps)] if steps else []), result.output


@pytest.mark.parametrize("rule", rules(STREAMING, LAZY, MEAN))
def test_workers_of_the_other_train_as_in_one_process(tmp_path: Path, rule: str) -> None:
    result = run_job("local.py", [tmp_path], 2, 2, P3KV_SLICE_SIZE=100, P3KV_CONSISTENCY=rule)
    assert result.code == 0, result.output
    assert result.output.count("right by the rule local") == 2, result.output


@pytest.mark.parametrize(
    "rule", ["local:steps=4", pytest.param("bounded:staleness=3,lazy=1", marks=pytest.mark.long)]
)
def test_workers_of_a_host_send_one_sum_of_what_they_have_learned(
    tmp_path: Path, rule: str
) -> None:
    result = run_on_hosts(
        2, "local.py", tmp_path, workers=2, P3KV_SLICE_SIZE=100, P3KV_CONSISTENCY=rule
    )
    assert result.code == 0, result.output
    assert result.output.count("right by the rule local") == 2, result.output
    assert "P3KV_LOCAL_AGGREGATION" not in result.output, result.output
    sent = [float(times) for times in re.findall("has sent the model (.*) times", result.output)]
    # Of 17 steps every fourth; worker 0 has sent the initial values, too.
    assert len(sent) == 2 and 4 < sum(sent) < 6, result.output


@NEEDS_TORCH
def test_servers_need_no_framework() -> None:
    """Theirs is the environment of another one, which does not have the workers'."""
    env = {"P3KV_CONSISTENCY": "local:steps=2,rate=1,momentum=0", "P3KV_SLICE_SIZE": 100}
    serve = [sys.executable, "-c", "import p3kv"]
    work = [str(PYTHON), str(SCRIPTS / "torch_local.py")]
    since = time.monotonic()
    with held_port() as held:
        port = held.getsockname()[1]
        processes = {
            name: start_role(name.partition(" ")[0], command, port, workers=2, **env)
            for name, command in {
                "scheduler": serve, "server": serve, "worker 0": work, "worker 1": work
            }.items()
        }  # fmt: skip
        ended = results(processes, since, JOB_S)
    for name, result in ended.items():
        assert result.code == 0, f"{name}: {result.output}"


@NEEDS_TORCH
@pytest.mark.long  # other rules' means are shown, and those of whoever stays
@pytest.mark.parametrize(
    ("leaver", "rule"),
    [
        (2, "local:steps=5,delay=1"),
        (0, "bounded:staleness=3,lazy=1"),
        (0, "local:steps=3,streaming=false"),
    ],
)
def test_when_a_worker_has_left_the_mean_is_that_of_the_others(leaver: int, rule: str) -> None:
    result = torch_job(
        "torch_local.py", 9, leaver, workers=3, P3KV_SLICE_SIZE=100, P3KV_CONSISTENCY=rule,
        P3KV_LET_WORKERS_LEAVE=1, P3KV_DETERMINISTIC=1,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("right until the end") == 1, result.output
    assert result.output.count("right by the rule local") == 2, result.output


@NEEDS_TORCH
def test_a_worker_that_is_killed_is_named_by_the_others() -> None:
    result = torch_job("torch_local_ends.py", P3KV_CONSISTENCY="local:steps=4")
    assert result.code != 0
    assert result.output.count("right until the end") == 1, result.output
    [last] = result.output.splitlines()[-1:]
    assert "worker 1" in last and "killed by SIGKILL" in last, result.output


@NEEDS_TORCH
def test_scripts_need_no_change_but_what_is_refused(tmp_path: Path) -> None:
    """GradScaler, closures and whatever the script does to its own gradients; and a straggler."""
    result = torch_job("torch_local_habits.py", tmp_path, P3KV_WARN_AFTER_S=1, **LOCAL)
    assert result.code == 0, result.output
    check_lag_is_told(result)
    assert result.output.count("all habits are right") == 2, result.output
    one, other = (
        [line for line in result.said_by(f"worker {rank}").splitlines() if "own:" in line]
        for rank in range(2)
    )
    assert one == other != [], result.output


def test_a_worker_that_lags_behind_is_named_by_one_that_waits_for_it(tmp_path: Path) -> None:
    """And not by one that goes on; the other front end's is above."""
    result = run_job("local_lags.py", [tmp_path], 2, 1, P3KV_WARN_AFTER_S=1, **LOCAL)
    assert result.code == 0, result.output
    check_lag_is_told(result)
    for_all = result.said_by("worker 0").split("worker 0 waits for all")[1]
    assert "worker 1 has not pushed key 'w' in round 3" in for_all, result.output


def check_lag_is_told(result: JobResult) -> None:
    before, after = result.said_by("worker 0").split("worker 0 has not waited")
    assert "has not pushed" not in before, result.output
    assert "worker 1 has not pushed" in after, result.output
    lags = re.findall("for which worker 0 waited ([0-9]+) s", after)
    assert lags and int(lags[0]) < LAG_S, result.output
