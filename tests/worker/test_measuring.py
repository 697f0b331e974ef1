"""What a worker measures is what happened: waiting, traffic, and who keeps the others waiting."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Optional

import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.consistency import BulkSynchronous, Consistency, Local
from p3kv.server.engine import Round
from p3kv.server.stragglers import Lateness
from p3kv.wire.messages import DeclaredKey, ServerNumbers, slowest
from p3kv.worker import step_times
from p3kv.worker.measures import layer_name
from p3kv.worker.step_times import Parts, StepTimes
from p3kv.worker.transfers import Push, WorkerKey
from tests.jobs import DEADLINE_S, output_of, run_job, start_on

FORWARD_S, BACKWARD_S = (0.01, 0.02, 0.03, 0.02), (0.02, 0.04, 0.06, 0.04)


def _key(number: int, rule: Consistency = BulkSynchronous(2)) -> WorkerKey:  # noqa: B008
    declared = DeclaredKey(number, number, (8,), "float32", [(0, 8)], f"layer{number}")
    return WorkerKey(declared, rule)


def _transfer(key: WorkerKey, step: int, ready_s: float) -> Push:
    transfer = Push(key, step, step, 1, 1, lambda error: None)
    transfer.ready_s = ready_s
    return transfer


class Steps:
    """Steps of four layers on a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = StepTimes()
        self.keys = [_key(number) for number in range(len(FORWARD_S))]
        self.now = 0.0
        self.waited_s = 0.0
        self._step = 0
        monkeypatch.setattr(step_times, "now_s", lambda: self.now)

    def step(self, arrive_s: List[float], more_s: float = 0.0) -> None:
        """A backward pass, and the forward pass after it: its values arrive so long after the
        backward pass. The script does something else for `more_s` first."""
        self._step += 1
        transfers = []
        for key, seconds in reversed(list(zip(self.keys, BACKWARD_S))):
            self.now += seconds
            transfers.append(_transfer(key, self._step, self.now))
            self.times.gradient_ready(transfers[-1])
        ended = self.now
        for transfer, after_s in sorted(zip(transfers[::-1], arrive_s), key=lambda one: one[1]):
            self.now = ended + after_s
            self.times.value_arrived(transfer)
        self.now = ended + more_s
        for after_s, seconds in zip(arrive_s, FORWARD_S):
            ready = max(self.now, ended + after_s)
            self.waited_s += ready - self.now
            self.now = ready + seconds


@pytest.mark.parametrize(
    ("arrive_s", "slowest_layer"),
    [([0.0] * 4, None), ([0.03, 0.03, 0.03, 0.03], 0), ([0.0, 0.0, 0.2, 0.21], 2)],
)
def test_a_forward_pass_and_what_it_waits_for_are_told_apart(
    arrive_s: List[float], slowest_layer: Optional[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(monkeypatch)
    for _ in range(41):
        steps.step(arrive_s)
    times = steps.times
    assert times.steps == 40
    waited_s = steps.waited_s / 41
    assert times.parts.network_s / 40 == pytest.approx(waited_s, abs=0.01)
    assert times.step_s / 40 == pytest.approx(sum(FORWARD_S) + sum(BACKWARD_S) + waited_s)
    assert times.forward_s == pytest.approx(sum(FORWARD_S), abs=0.01)
    assert times.waited_for is (None if slowest_layer is None else steps.keys[slowest_layer])
    # A column has no room for "parameter 'layer0' (key 0)".
    name = "" if slowest_layer is None else f"layer{slowest_layer}"
    assert layer_name(times.waited_for) == name
    layers = times.layers()
    assert [layer.key for layer in layers] == steps.keys
    assert [layer.backward_s for layer in layers[:3]] == pytest.approx(BACKWARD_S[:3])


def test_a_step_of_local_training_waits_while_the_script_does_and_a_value_is_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each moment counts once, and only for values that are due."""
    times, clock = StepTimes(), [0.0]
    monkeypatch.setattr(step_times, "now_s", lambda: clock[0])
    rule = Local(2, steps=5)
    keys = [_key(number, rule) for number in range(3)]
    for key, due_s in zip(keys, (2.0, 3.0, 0.0)):
        key.goes_on = True
        key.due = (1, due_s) if due_s else (0, 0.0)
    transfers = [_transfer(key, 1, 0.5) for key in keys]
    times.begin_local_step(1.0)
    for transfer, at_s, late_s in zip(transfers, (6.0, 7.0, 8.0), (4.0, 5.5, 7.0)):
        clock[0] = at_s
        times.value_arrived(transfer, late_s)
    times.script.blocked(0, 2.5, 3.5)
    times.script.blocked(0, 4.0, 9.0)
    times.begin_local_step(11.0)
    assert (times.steps, times.step_s) == (1, 10.0)
    # From 2.5 to 3.5 and from 4 to 6 for the first key, until 4.5 for another worker's difference;
    # from 6 to 7 for the second one, all of it for the network.
    assert times.parts == Parts(computing_s=6.0, network_s=2.5, straggler_s=1.5)


@pytest.mark.parametrize("last_s", [0.02, 0.0002])
def test_a_forward_pass_that_waits_for_each_layer_is_taken_for_half_a_backward_pass(
    last_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the last layer, whose own backward pass shows nowhere, takes no time at all."""
    backward_s = (0.02,) * 39 + (last_s,)
    monkeypatch.setattr("tests.worker.test_measuring.BACKWARD_S", backward_s)
    monkeypatch.setattr(
        "tests.worker.test_measuring.FORWARD_S", [seconds / 2 for seconds in backward_s]
    )
    steps = Steps(monkeypatch)
    for _ in range(41):
        steps.step([0.05 * layer for layer in range(1, 41)])
    waiting = steps.times.parts.network_s / steps.times.step_s
    assert waiting == pytest.approx(steps.waited_s / steps.times.step_s, abs=0.03)


def test_a_pass_that_waits_for_its_last_layers_is_no_longer_than_they_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last layer's backward pass shows nowhere, so the last ones bound a forward pass badly,
    and the one before them bounds it too loosely when the pass has waited for them, too."""
    monkeypatch.setattr("tests.worker.test_measuring.BACKWARD_S", (0.025,) * 8)
    monkeypatch.setattr("tests.worker.test_measuring.FORWARD_S", (0.0125,) * 8)
    steps = Steps(monkeypatch)
    for _ in range(11):
        steps.step([0.137, 0.192, 0.228, 0.284, 0.349, 0.376, 0.409, 0.0])
    waiting = steps.times.parts.network_s / steps.times.step_s
    assert waiting == pytest.approx(steps.waited_s / (11 * 0.3 + steps.waited_s), abs=0.02)


def test_a_pause_of_the_script_is_no_waiting_for_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    for number in range(41):
        steps.step([0.01] * 4, more_s=5.0 if number % 10 == 9 else 0.0)
    assert steps.times.step_s > 20.0
    assert steps.times.parts.network_s == pytest.approx(41 * 0.01, rel=0.1)


def test_gradients_that_are_all_ready_when_they_are_pushed_tell_of_waiting_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    monkeypatch.setattr("tests.worker.test_measuring.BACKWARD_S", (0.0, 0.0, 0.0, 0.0))
    for _ in range(41):
        steps.step([0.5] * 4)
    assert steps.times.parts.network_s / 40 == pytest.approx(0.5, abs=0.01)
    assert steps.times.forward_s == pytest.approx(sum(FORWARD_S), abs=0.01)
    assert sum(layer.forward_s for layer in steps.times.layers()) == pytest.approx(
        sum(FORWARD_S), abs=0.01
    )


def test_layers_take_no_longer_than_passes_when_only_the_first_ones_were_spread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch)
    steps.step([0.5] * 4)
    monkeypatch.setattr("tests.worker.test_measuring.BACKWARD_S", (1e-5,) * 4)
    for _ in range(41):
        steps.step([0.5] * 4)
    layers, times = steps.times.layers(), steps.times
    assert sum(layer.forward_s for layer in layers) == pytest.approx(times.forward_s)
    assert sum(layer.backward_s for layer in layers) == pytest.approx(times.backward_s)
    assert times.backward_s < 0.001


def test_the_worker_whose_gradient_is_ready_last_is_counted_with_its_lag() -> None:
    lateness, now = Lateness(3), 0.0
    for last in (2, 2, 2, 0):
        current = Round(None, 1, None, 1)
        for rank in [*(rank for rank in range(3) if rank != last), last]:
            now += 0.25 if rank == last == 2 else 0.01
            current.ready_s[rank] = now
        lateness.note(current)
    assert (lateness.rounds, lateness.last_rounds) == (4, [1, 0, 3])
    numbers = ServerNumbers(
        rounds=4, last_rounds=tuple(lateness.last_rounds), last_s=tuple(lateness.last_s)
    )
    found = slowest([numbers, ServerNumbers()])
    assert found is not None
    assert (found.rank, found.share, found.lag_s) == (2, 0.75, pytest.approx(0.25))
    assert slowest([ServerNumbers()]) is None


def told(output: str) -> List[Dict[str, Any]]:
    found = [line[line.index("{") :] for line in output.splitlines() if '{"rank"' in line]
    return sorted((json.loads(line) for line in found), key=lambda one: one["rank"])


@pytest.mark.alone
@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
@pytest.mark.parametrize("rate_mbit_s", [30.0, None])
def test_waiting_is_measured_on_a_slow_link_and_there_is_none_on_a_fast_one(
    rate_mbit_s: Optional[float],
) -> None:
    with Cluster(2, rate_mbit_s) as cluster:
        started = start_on(cluster, "measured.py", [12, 0.3, 0])
        outputs = [output_of(process, DEADLINE_S) for _, process in started]
    workers = told("\n".join(output or "" for output in outputs))
    assert len(workers) == 2, outputs
    for one in workers:
        stats = one["stats"]
        # All hosts share two processors here, so servers and threads are waited for a little, too.
        parts = ("network_s", "server_s", "straggler_s", "processor_s")
        waited_s = sum(stats[part] for part in parts)
        assert waited_s / stats["step_s"] == pytest.approx(one["waited"], abs=0.06)
        assert stats["network_s"] >= 0.75 * waited_s or rate_mbit_s is None
        assert stats["forward_s"] + stats["backward_s"] == pytest.approx(0.3, rel=0.15)
        if rate_mbit_s is not None:
            assert one["waited"] > 0.3
            link_bytes_s = rate_mbit_s * 1e6 / 8
            assert 0.7 * link_bytes_s < stats["push_bytes_s"] < 1.3 * link_bytes_s
        pushed_bytes = 12 * 8 * 4 * 65_536  # in all, of which half stays on the host
        assert stats["wire_bytes_sent"] >= 0.95 * pushed_bytes / 2
        assert sorted(link["same_host"] for link in stats["links"].values()) == [False, True]


def test_stats_say_which_worker_the_others_wait_for() -> None:
    result = run_job("measured.py", [8, 0.1, 0.1, 3.0], workers=2, servers=2)
    assert result.code == 0, result.output
    assert "p3kv worker 0" not in result.output  # a job of some seconds gets no verdict unasked
    for one in told(result.output):
        stats = one["stats"]
        assert stats["rounds"] == {str(key): 8 for key in range(8)}
        assert stats["steps"] == 7
        slow = stats["slowest_worker"]
        assert (slow["rank"], slow["share"] > 0.7) == (1, True), stats
        assert slow["lag_s"] > 0.05
        assert {"bytes_sent", "bytes_received", "inversions", "inversion_bytes"} <= set(stats)
