"""The forward order is learned in round 1, the same on all ranks, and in force in round 2."""

from __future__ import annotations

import gc
import json
import logging
import sys
from itertools import combinations
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mxnet import autograd, gluon

from p3kv.common.tracing import SEND, read_trace
from p3kv.frontends.mxnet import forward_order
from p3kv.frontends.mxnet.forward_order import GluonReads
from p3kv.store.forward_order import OrderLearner
from p3kv.wire.messages import Key
from tests.jobs import SCRIPTS, SUMS_ONLY, run_job

sys.path.insert(0, str(SCRIPTS))
import forward_order_script as script

WORKERS = 2
ON_SERVERS = (script.blocks.__name__, script.graph.__name__)
"""Scenarios whose Trainer updates on servers; in the others it updates on workers."""


class Learned:
    """What the workers of a job have written down, and what they have sent."""

    def __init__(self, folder: Path, scenario: str) -> None:
        trace = folder / "trace"
        result = run_job(
            "forward_order_script.py",
            [folder, scenario],
            WORKERS,
            2,
            P3KV_TRACE=trace,
            P3KV_SLICE_SIZE=40,
            **({} if scenario in ON_SERVERS else SUMS_ONLY),
        )
        assert result.code == 0, result.output
        files = [folder / f"rank{rank}.json" for rank in range(WORKERS)]
        written = [json.loads(file.read_text()) for file in files]
        self.orders: List[List[int]] = [one["learned"] for one in written]
        self.truth: List[int] = written[0]["truth"]
        self.pushed: List[int] = written[0]["pushed"]
        self._sent = [sent(trace / f"worker-{rank}.jsonl") for rank in range(WORKERS)]

    def priorities(self, round_: int) -> List[Dict[int, int]]:
        """Each worker's priority of every key that it has sent in a round."""
        found = []
        for events in self._sent:
            of_round = [event for event in events if event["round"] == round_]
            priorities = {event["key"]: event["priority"] for event in of_round}
            # All slices of a key go with the priority of the key.
            assert all(event["priority"] == priorities[event["key"]] for event in of_round)
            found.append(priorities)
        return found


def sent(path: Path) -> List[Dict[str, Any]]:
    trace = read_trace(path)
    return [
        {"key": trace.keys[span.key_id].key, "round": span.round, "priority": span.priority}
        for span in trace.spans
        if span.kind == SEND
    ]


_NEARLY_SHOWN = (script.graph, script.blocks_that_read_the_loss)
"""The others have blocks and a graph, a loss that is read, and updates on servers and workers."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(s.__name__, marks=[pytest.mark.long] if s in _NEARLY_SHOWN else [])
        for s in script.SCENARIOS[:-1]
    ],
)
def learned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Learned:
    return Learned(tmp_path_factory.mktemp(request.param), request.param)


def test_all_ranks_know_the_forward_order(learned: Learned) -> None:
    for order in learned.orders:
        assert order == learned.truth


def test_the_order_of_pushes_is_another(learned: Learned) -> None:
    """Otherwise nothing had to be learned."""
    in_forward = [key for key in learned.truth if key in learned.pushed]
    assert sorted(in_forward) == learned.pushed
    assert in_forward != learned.pushed


def test_the_order_is_in_force_from_the_second_round_on(learned: Learned) -> None:
    expected = {key: -learned.truth.index(key) for key in learned.pushed}
    for round_ in range(2, script.STEPS + 1):
        for priorities in learned.priorities(round_):
            assert priorities == expected


def test_where_nothing_can_be_learned_the_caller_s_priorities_stay(tmp_path: Path) -> None:
    job = Learned(tmp_path, script.gradients_all_at_once.__name__)
    assert job.orders == [[]] * WORKERS
    expected = {key: script.priority(key) for key in range(script.KEYS)}
    for round_ in range(1, script.STEPS + 1):
        for priorities in job.priorities(round_):
            assert priorities == expected


class Learner:
    """An OrderLearner, and what it publishes."""

    def __init__(self, *keys: Key, reads: Optional[GluonReads] = None) -> None:
        self.published: List[List[Key]] = []
        self.learner = OrderLearner(self.published.append, reads or GluonReads())
        for key in keys:
            self.learner.note_key(key, [])

    def push(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.learner.note_push(key)

    def become_ready(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.learner.note_ready(key)


@pytest.fixture(autouse=True)
def reads() -> Iterator[GluonReads]:
    """Gluon without what other tests' forward passes have left."""
    forward_order.FORWARD_READS.stop()
    noted = GluonReads()
    yield noted
    noted.stop()


@given(st.permutations(range(8)))
def test_gradients_that_become_ready_in_time_tell_the_forward_order(forward: List[int]) -> None:
    pushed = sorted(forward, key=lambda key: (key % 3, key))
    job = Learner(*range(8))
    job.learner.begin_step(1)
    job.push(pushed)
    job.become_ready(forward[::-1][:-1])
    assert job.published == []
    job.become_ready(forward[:1])
    overtaken_from_afar = {
        later
        for earlier, later in combinations(forward[::-1], 2)
        if pushed.index(earlier) - pushed.index(later) >= 4
    }
    if len(overtaken_from_afar) >= 3:
        assert job.published == [forward]
    else:
        assert job.published == []


@pytest.mark.parametrize("ready", [[0, 1, 2, 3, 4, 5], [1, 0, 3, 2, 5, 4], [0, 2, 1, 3, 5, 4]])
def test_gradients_that_become_ready_as_they_are_pushed_tell_nothing(ready: List[int]) -> None:
    """All were ready before: the engine keeps the order of the pushes, but for neighbours that
    two of its threads have started."""
    job = Learner(*range(6))
    job.learner.begin_step(1)
    for key in range(6):
        job.push([key])
    job.become_ready(ready)
    job.learner.begin_step(2)
    job.push(range(6))
    job.become_ready(range(5, -1, -1))
    assert job.published == []


def test_one_layer_that_is_pushed_last_and_ready_first_tells_enough() -> None:
    """Sockeye's names, sorted, are almost in the order of backward, but for the output layer's."""
    job = Learner(*range(37))
    ready = [36, 35, *range(35)]
    job.learner.begin_step(1)
    job.push(range(37))
    job.become_ready(ready)
    assert job.published == [ready[::-1]]


def test_gradients_that_a_thread_has_held_up_tell_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="p3kv")
    job = Learner(*range(37))
    job.learner.begin_step(1)
    job.push(range(37))
    job.become_ready([key for key in range(37) if key % 12] + [0, 12, 24, 36])
    job.learner.begin_step(2)
    assert job.published == []
    assert "nothing tells the forward order" in caplog.text


def test_a_gradient_that_is_ready_before_the_next_is_pushed_is_no_round() -> None:
    job = Learner("a", "b", "c")
    job.learner.begin_step(1)
    for key in "abc":
        job.push([key])
        job.become_ready([key])
    job.learner.begin_step(2)
    assert job.published == []


def test_keys_that_nobody_pushes_do_not_hold_up_the_order_and_come_last() -> None:
    job = Learner("frozen", "a", "b", "c", "d")
    job.learner.begin_step(1)
    job.push("abcd")
    job.become_ready("dc")
    job.learner.begin_step(2)
    assert job.published == []
    job.push("ab")
    job.become_ready("ba")
    assert job.published == [["a", "b", "c", "d", "frozen"]]


def test_an_order_is_published_once() -> None:
    job = Learner(*"abcd")
    for step in range(1, 4):
        job.learner.begin_step(step)
        job.push("abcd")
        job.become_ready("dcba")
    assert job.published == [list("abcd")]


def test_a_learner_that_is_stopped_publishes_nothing() -> None:
    job = Learner(*"abcd")
    job.learner.stop()
    job.learner.stop()
    job.learner.begin_step(1)
    job.push("abcd")
    job.become_ready("dcba")
    assert job.published == []


def parameters(*names: str) -> Dict[str, gluon.Parameter]:
    made = {name: gluon.Parameter(name, shape=(1,)) for name in names}
    for parameter in made.values():
        parameter.initialize()
    return made


def keys_of(made: Dict[str, gluon.Parameter]) -> Dict[int, Key]:
    return {id(parameter.list_data()[0]): name for name, parameter in made.items()}


def test_first_reads_while_autograd_records_are_the_order(reads: GluonReads) -> None:
    made = parameters("a", "b", "c")
    keys = keys_of(made)
    reads.start()
    made["a"].data()
    with autograd.record():
        for name in "cbcab":
            made[name].data()
    assert reads.order(keys) == ["c", "b", "a"]


def test_parameters_of_other_stores_and_those_that_are_gone_are_left_out(
    reads: GluonReads,
) -> None:
    reads.start()
    made = parameters("a", "b", "c")
    with autograd.record():
        for name in "cba":
            made[name].data()
    del made["b"]
    gc.collect()
    # A parameter that takes the place of one that is gone has not been read.
    others = parameters(*(f"other{n}" for n in range(20)))
    keys = {**keys_of(others), **keys_of({"a": made["a"]})}
    assert reads.order(keys) == ["a"]


def test_gluon_is_as_it_was_after_learning(reads: GluonReads) -> None:
    before = gluon.Parameter.data
    reads.start()
    assert gluon.Parameter.data is not before
    assert gluon.Parameter.data.__doc__ == before.__doc__
    reads.stop()
    reads.stop()
    assert gluon.Parameter.data is before


def test_reads_come_before_what_readiness_tells(reads: GluonReads) -> None:
    made = parameters("a", "b", "c", "frozen")
    reads.start()
    with autograd.record():
        for name in "bca":
            made[name].data()
    job = Learner(reads=reads)
    for name in ("frozen", "a", "b", "c"):
        job.learner.note_key(name, made[name].list_data())
    job.learner.begin_step(1)
    assert job.published == [["b", "c", "a", "frozen"]]
    job.push("abc")
    job.become_ready("bca")
    job.learner.begin_step(2)
    assert job.published == [["b", "c", "a", "frozen"]]
