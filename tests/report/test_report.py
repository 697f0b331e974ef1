"""A verdict says what limits a job, and a summary what it does now."""

from __future__ import annotations

import re
from typing import Dict

import pytest
from msgspec.structs import replace

from p3kv.report import rates, verdict
from p3kv.report.forecast import Workload
from p3kv.report.forecast.bound import lower_bound_s
from p3kv.report.verdict import with_own
from p3kv.wire.messages import Lag, ServerNumbers, WorkerNumbers
from tests.jobs import run_job

LAYERS = Workload([[(0, 250_000)], [(1, 250_000)]], [0.1, 0.1], [0.2, 0.2])  # 2 MB, C = 0.6 s
STEPS = 10


def numbers(step_s: float, push_bytes_s: float, sent: float = 1.0) -> WorkerNumbers:
    """Ten steps of LAYERS, each so long; `sent`: the part of the bytes that travels."""
    size_bytes = round(STEPS * sum(LAYERS.layer_bytes) * sent)
    return WorkerNumbers(
        steps=STEPS, step_s=STEPS * step_s, computing_s=STEPS * 0.6,
        network_s=STEPS * (step_s - 0.6), forward_s=0.2, backward_s=0.4, push_bytes_s=push_bytes_s,
        bytes_sent=size_bytes, bytes_received=size_bytes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("step_s", "push_bytes_s", "limit", "advice"),
    [
        (0.61, 1e9, "computing", "at most 1.6% shorter"),
        (1.0, 2e6, "network", "nearly what the network allows"),
        (1.0, 1e7, "network", "1.4 times what the network allowed"),
        (1.0, 0.0, "network", "up to 40% shorter"),
        (1.0, 1e9, "latency", "the link idles"),
    ],
)
def test_the_limit_is_found_and_what_to_do(
    step_s: float, push_bytes_s: float, limit: str, advice: str
) -> None:
    found = verdict(numbers(step_s, push_bytes_s), LAYERS, 4, None)
    assert found is not None
    assert found.limit == limit
    assert advice in found.advice
    assert found.shares["network"] == pytest.approx(1 - 0.6 / step_s)
    text = "\n".join(found.lines)
    bounds = push_bytes_s > 0 and limit in ("network", "computing")
    assert bounds == ("the shortest possible step" in text)


def in_parts(**seconds: float) -> WorkerNumbers:
    """Ten steps of 0.1 s, of which computing is what is nothing else."""
    computing_s = 1.0 - sum(seconds.values())
    return WorkerNumbers(steps=STEPS, step_s=1.0, computing_s=computing_s, **seconds)


@pytest.mark.parametrize(
    ("parts", "limit", "advice"),
    [
        ({"script_s": 0.9, "network_s": 0.08}, "script", "DataLoader"),
        ({"script_s": 0.2}, "computing", "computation"),
        ({"straggler_s": 0.4, "network_s": 0.1}, "straggler", "look at worker 3"),
        ({"straggler_s": 0.37, "processor_s": 0.34}, "straggler", "Here 34% of a step is waiting"),
        ({"server_s": 0.4, "network_s": 0.1}, "server", "start more servers"),
        ({"processor_s": 0.6, "straggler_s": 0.1}, "processor", "OMP_NUM_THREADS"),
        ({"network_s": 0.4, "script_s": 0.1}, "network", "up to 40% shorter"),
    ],
)
def test_each_part_of_a_step_may_be_the_limit(
    parts: Dict[str, float], limit: str, advice: str
) -> None:
    found = verdict(in_parts(**parts), LAYERS, 4, Lag(3, 0.97, 0.04), rank=0)
    assert found is not None
    assert (found.limit, advice in found.advice) == (limit, True)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert "worker 3 comes last in 97% of the rounds" in "\n".join(found.lines)


def test_the_slowest_worker_itself_says_that_the_others_wait() -> None:
    last = Lag(3, 0.97, 0.04, waiting=0.4)
    for rank, limit in ((3, "straggler"), (0, "computing")):
        found = verdict(in_parts(), LAYERS, 4, last, rank)
        assert found is not None and found.limit == limit
    for processor_s, limit in ((0.69, "processor"), (0.45, "processor"), (0.2, "straggler")):
        found = verdict(in_parts(processor_s=processor_s), LAYERS, 4, last, 3)
        assert found is not None and found.limit == limit
    link = verdict(in_parts(network_s=0.5), LAYERS, 4, last, 3)
    assert link is not None and link.limit == "network"


def test_bounds_are_those_of_the_measured_network() -> None:
    found = verdict(numbers(1.4, 2e6), LAYERS, 4, None)
    assert found is not None and found.bound_s is not None
    # A worker that pushes 2 MB/s shares a link of 3 MB/s with a server.
    assert found.link_bytes_s == pytest.approx(3e6)

    def bound_s(hosts: int, link_bit_s: float) -> float:
        layers = (LAYERS.layer_bytes, LAYERS.forward_s, LAYERS.backward_s)
        return lower_bound_s(*layers, hosts, link_bit_s, payload=1.0)

    assert found.bound_s == pytest.approx(bound_s(4, 24e6))
    assert found.bound_twice_the_bandwidth_s == pytest.approx(bound_s(4, 48e6))
    assert found.bound_twice_the_hosts_s == pytest.approx(bound_s(8, 24e6))
    # Half the bytes are on the wire where a codec makes half of them.
    half = verdict(numbers(1.4, 2e6, sent=0.5), LAYERS, 4, None)
    assert half is not None
    assert half.bound_s == pytest.approx(found.bound_twice_the_bandwidth_s)
    # Steps that are faster than the network was: it has more bandwidth.
    faster = verdict(numbers(0.9, 2e6), LAYERS, 4, None)
    assert faster is not None and faster.bound_s is not None and faster.link_bytes_s is not None
    assert faster.bound_s <= 0.9
    assert faster.link_bytes_s > 3e6


@pytest.mark.parametrize("own", ["dist_sync", "DDP"])
def test_a_verdict_compares_with_what_the_framework_has_itself(own: str) -> None:
    found = verdict(numbers(1.4, 2e6), LAYERS, 4, None)
    assert found is not None and found.bound_s is not None
    said = with_own(own, found, LAYERS, 4, 1)
    assert said is not None and said.startswith(f"with {own} a step")
    step_s = float(re.findall(r"at least ([\d.]+) s", said)[0])
    assert found.bound_s < step_s < 0.6 + 1.0 + 0.5  # computing, M, and nothing overlapped twice
    busy = verdict(replace(numbers(1.4, 2e6), computing_s=1.0, processor_s=5.0), LAYERS, 4, None)
    assert busy is not None and with_own(own, busy, LAYERS, 4, 1) == said
    unknown = verdict(numbers(1.4, 0.0), LAYERS, 4, None)
    assert unknown is not None
    assert with_own(own, unknown, LAYERS, 4, 1) is None
    assert with_own("another", found, LAYERS, 4, 1) is None


def test_a_job_that_has_just_begun_has_no_verdict() -> None:
    assert verdict(WorkerNumbers(steps=2, step_s=1.0), LAYERS, 4, None) is None
    assert verdict(WorkerNumbers(), Workload([], [], []), 4, None) is None
    alone = verdict(numbers(0.6, 1e9), LAYERS, 1, None)
    assert alone is not None and alone.bound_s is None


def test_rates_are_those_between_two_reports() -> None:
    before = WorkerNumbers(
        uptime_s=10.0,
        steps=5,
        step_s=5.0,
        network_s=1.0,
        computing_s=4.0,
        wire_bytes_sent=100,
        inversions=2,
    )
    after = WorkerNumbers(
        uptime_s=12.0, steps=9, step_s=7.0, network_s=1.5, computing_s=5.5,
        wire_bytes_sent=2_000_100,
        wire_bytes_received=10**6, inversions=5, queued_frames=7, slowest_layer="layer3",
    )  # fmt: skip
    found = rates(before, after)
    assert found.shares == pytest.approx(
        {"computing": 0.75, "network": 0.25, "script": 0, "server": 0, "straggler": 0,
         "processor": 0}
    )  # fmt: skip
    assert found._replace(shares=None) == (1e6, 5e5, 7, 3, 0.5, None, "layer3", None)
    assert found.words == (
        "0.5 s a step (computing 75%, network 25%; waits most for layer3), 8 Mbit/s out, "
        "4 Mbit/s in, 7 frames queued, 3 inversions"
    )
    stale = rates(before, replace(after, stale_values=8, stale_rounds=12, most_stale_rounds=3))
    assert stale.words.startswith(
        "0.5 s a step (computing 75%, network 25%; waits most for layer3)"
    )
    assert ", values 1.5 rounds old, " in stale.words
    idle = rates(after, after)
    assert (idle.step_s, idle.shares) == (None, None)
    server = rates(ServerNumbers(), ServerNumbers(uptime_s=1.0, wire_bytes_sent=10))
    assert (server.send_bytes_s, server.step_s) == (10.0, None)


def test_a_job_logs_its_speed_and_a_verdict_with_time_and_rank() -> None:
    result = run_job("measured.py", [9, 0.05, 0.0], workers=2, servers=1, P3KV_SUMMARY_EVERY=4)
    assert result.code == 0, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        mark = rf"p3kv worker {rank} \d\d:\d\d:\d\d\.\d\d\d: "
        for step in (4, 8):
            assert re.search(rf"{mark}step {step}: .* a step \(.*\), .*bit/s out", said), (
                result.output
            )
        assert bool(re.search(f"{mark}the job's limit is ", said)) == (rank == 0), result.output
