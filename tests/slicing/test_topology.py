"""What each server should keep, so that no host's link takes longer than it must."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Dict, List, Tuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import linprog

from p3kv.slicing import Topology, balanced_runs, link_rates, loads_with

names = st.sampled_from(["a", "b", "c", "d", "e"])


def least_time(topology: Topology) -> float:
    """The same question, put to a solver of linear programmes: parts of hosts, then the time."""
    hosts, on = sorted(set(topology.servers)), Counter(topology.workers)
    count = len(topology.workers)
    fastest = max(topology.rates.values(), default=1.0)
    carried, already = [], []
    for host in sorted({*hosts, *topology.workers}):
        rate = topology.rates.get(host, fastest)
        part = [(count - 2 * on[host]) / rate if host == other else 0.0 for other in hosts]
        carried.append([*part, -1.0])
        already.append(-on[host] / rate)
    found = linprog(
        [0.0] * len(hosts) + [1.0], carried, already, [[1.0] * len(hosts) + [0.0]], [1.0]
    )
    assert found.success
    return float(found.fun)


def time_of(topology: Topology) -> float:
    """How long the busiest link takes for a model of one byte, with the shares that we give."""
    kept: Dict[str, float] = defaultdict(float)
    for host, share in zip(topology.servers, topology.shares):
        kept[host] += share
    on, count = Counter(topology.workers), len(topology.workers)
    fastest = max(topology.rates.values(), default=1.0)
    return max(
        (on[host] + kept[host] * (count - 2 * on[host])) / topology.rates.get(host, fastest)
        for host in {*topology.servers, *topology.workers}
    )


@given(
    st.lists(names, min_size=1, max_size=6),
    st.lists(names, min_size=1, max_size=8),
    st.dictionaries(names, st.floats(0.05, 20.0)),
)
# No byte crosses a link, and six sixths are not quite one.
@example(["a"] * 6, ["a"], {})
def test_no_shares_are_better(servers: List[str], workers: List[str], rates: dict) -> None:
    topology = Topology(tuple(servers), tuple(workers), rates)
    assert min(topology.shares) >= 0 and sum(topology.shares) == pytest.approx(1)
    assert time_of(topology) == pytest.approx(least_time(topology), rel=1e-6)
    assert topology.busy == pytest.approx(time_of(topology), rel=1e-6)


@pytest.mark.parametrize(("alone", "time"), [(0, 1.5), (1, 4 / 3), (2, 1.2), (4, 1.0)])
def test_hosts_without_a_worker_keep_what_theorem_1_says(alone: int, time: float) -> None:
    workers = tuple("abcd")
    topology = Topology(workers + tuple("stuv"[:alone]), workers)
    assert time_of(topology) == pytest.approx(time)
    assert topology.shares[:4] == pytest.approx([(4 - alone) / (16 + 2 * alone)] * 4)
    if alone == 4:
        assert topology.shares[:4] == pytest.approx([0.0] * 4, abs=1e-9)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=30), st.integers(1, 400))
def test_no_link_is_busy_longer_by_more_than_a_slice_for_each_server(
    sizes: List[int], slice_size: int
) -> None:
    topology = Topology(tuple("abcdst"), tuple("abcd"))
    loads = [0] * 6
    for size in sizes:
        loads = loads_with(loads, balanced_runs(size, slice_size, loads, topology.shares))
    for load, share in zip(loads, topology.shares):
        assert load <= share * (sum(loads) + len(loads) * slice_size)


def flows_over(
    links: Dict[str, float], workers: Tuple[str, ...], servers: Tuple[str, ...]
) -> List[List[float]]:
    """Max-min fair rates of flows between all workers and servers, each loading both its ends."""
    left, rates = dict(links), {}
    open_flows = {(w, s) for w in range(len(workers)) for s in range(len(servers))}
    open_flows = {(w, s) for w, s in open_flows if workers[w] != servers[s]}
    while open_flows:
        users = Counter(end for w, s in open_flows for end in (workers[w], servers[s]))
        host = min(users, key=lambda one: left[one] / users[one])
        fair = left[host] / users[host]
        for flow in [f for f in open_flows if host in (workers[f[0]], servers[f[1]])]:
            rates[flow] = fair
            for end in (workers[flow[0]], servers[flow[1]]):
                left[end] -= fair
            open_flows.remove(flow)
    return [[rates.get((w, s), 1e9) for s in range(len(servers))] for w in range(len(workers))]


@pytest.mark.parametrize("alone", [0, 1, 2, 4])
@pytest.mark.parametrize("slow", ["", "a", "d", "s"])
def test_a_slow_link_is_found_and_one_that_was_not_full_is_not(slow: str, alone: int) -> None:
    workers = tuple("abcd")
    servers = workers + tuple("stuv"[:alone])
    links = dict.fromkeys(servers, 100.0)
    if slow in links:
        links[slow] = 25.0 if slow == "s" else 50.0
    rates = link_rates(servers, workers, flows_over(links, workers, servers))
    fastest = max(rates.values())
    for host in servers:
        assert rates[host] / fastest == pytest.approx(links[host] / 100.0, rel=0.15)


@pytest.mark.parametrize(
    "flows",
    [
        [[133.0, 3.5, 3.5, 4.9, 8.6], [4.3, 161.1, 4.4, 5.4, 7.3],
         [4.7, 4.2, 253.7, 5.9, 7.2], [2.7, 4.0, 3.2, 151.1, 7.9]],
        [[107.5, 1.6, 2.2, 3.0, 4.3, 5.3, 5.1, 5.5], [1.4, 176.9, 2.1, 2.8, 5.0, 4.7, 5.1, 4.8],
         [1.4, 2.1, 150.3, 2.3, 5.5, 5.0, 5.6, 3.8], [1.9, 1.4, 1.4, 172.1, 4.6, 5.5, 4.9, 4.2]],
        [[78.0, 2.19, 1.45, 1.9, 5.59, 3.6, 4.45, 4.96],
         [2.03, 135.67, 1.39, 1.56, 6.98, 4.36, 4.74, 6.01],
         [2.35, 1.4, 139.76, 3.07, 4.83, 5.31, 5.97, 4.5],
         [3.65, 1.4, 1.61, 87.45, 5.87, 4.26, 3.84, 4.76]],
    ],
)  # fmt: skip
def test_equal_links_have_equal_rates_where_servers_have_hosts_of_their_own(
    flows: List[List[float]],
) -> None:
    """As they were measured on links of 263 Mbit/s, in MB/s."""
    servers = [f"10.0.0.{number}" for number in range(len(flows[0]))]
    rates = link_rates(servers, servers[: len(flows)], flows)
    assert len(set(rates.values())) == 1


@pytest.mark.parametrize(
    ("servers", "workers", "rates", "even"),
    [
        ("ab", "ab", {}, True),
        ("aabb", "abab", {"a": 2.0, "b": 2.0}, True),
        ("ab", "ab", {"a": 1.0, "b": 2.0}, False),
        ("abc", "ab", {}, False),
        ("ab", "abb", {}, False),
        ("a", "ab", {}, False),
        ("cd", "ab", {}, False),
    ],
)
def test_hosts_are_even_that_have_the_same_processes_and_links(
    servers: str, workers: str, rates: Dict[str, float], even: bool
) -> None:
    assert Topology(tuple(servers), tuple(workers), rates).is_even == even


def test_nothing_is_concluded_where_nothing_was_measured() -> None:
    assert link_rates(("a", "b"), ("a", "b"), []) == {}
    assert link_rates(("a", "a"), ("a", "a"), [[9.0, 9.0], [9.0, 9.0]]) == {}
    assert link_rates(("a", "b"), ("a", "b"), [[9.0, 0.0], [0.0, 9.0]]) == {}
