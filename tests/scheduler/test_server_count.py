"""Too few servers for the workers' links are said once, with the number that would do."""

from __future__ import annotations

from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cluster import Cluster, missing_requirements
from p3kv.scheduler.job import too_few_servers
from p3kv.slicing import Topology
from tests.jobs import DEADLINE_S, SUMS_ONLY, run_job, start_on

names = st.sampled_from(["a", "b", "c", "d", "e"])


def said(servers: str, workers: str) -> Optional[str]:
    """What is said of a job with hosts of one letter."""
    return too_few_servers(Topology(tuple(servers), tuple(workers)))


@pytest.mark.parametrize(
    ("servers", "there", "enough", "times"),
    [
        ("a", "1 on 1 host", "4", "2.0"),
        ("ab", "2 on 2 hosts", "4", "1.3"),
        ("abc", "3 on 3 hosts", "4", "1.1"),
        ("s", "1 on 1 host", "5", "3.0"),
        ("st", "2 on 2 hosts", "6", "1.7"),
        ("ssss", "4 on 1 host", "8", "3.0"),
        ("aaaa", "4 on 1 host", "7", "2.0"),
    ],
)
def test_links_that_idle_are_counted_by_hand(
    servers: str, there: str, enough: str, times: str
) -> None:
    words = said(servers, "abcd")
    assert words is not None and "\n" not in words
    assert words.startswith(f"too few servers: {there}, for workers on 4 hosts. ")
    assert f"carries {times} times what it would with {enough}, so that each worker's" in words


@pytest.mark.parametrize(
    ("servers", "workers"),
    [
        ("abcd", "abcd"),
        ("abcdst", "abcd"),
        ("stuv", "abcd"),  # a host without a worker sends a value to four while each receives one
        ("ab", "aabb"),
        ("a", "aaaa"),  # one host, and nothing to gain
        ("aaa", "a"),
        ("a", "ab"),  # the other's gradients go out as often as half the values would come in
        ("a", "aab"),
        ("abcdefg", "abcdefgh"),  # 1.06 times
    ],
)
def test_nothing_is_said_where_more_servers_would_not_help(servers: str, workers: str) -> None:
    assert said(servers, workers) is None


def test_workers_of_one_host_need_no_network() -> None:
    assert said("ss", "aa") == (
        "too few servers: 2 on 1 host, for workers on 1 host. With 3, so that each worker's host "
        "has one, no gradient would cross the network"
    )


@given(st.lists(names, min_size=1, max_size=6), st.lists(names, min_size=1, max_size=8))
def test_who_does_as_told_is_told_nothing_more(servers: list, workers: list) -> None:
    hosts = Topology(tuple(servers), tuple(workers))
    assert too_few_servers(hosts.with_servers_beside_workers()) is None
    if {*workers} <= {*servers}:
        assert too_few_servers(hosts) is None


@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_one_server_for_workers_on_three_hosts_is_said_once_by_the_scheduler() -> None:
    with Cluster(3) as cluster:
        started = start_on(cluster, "join.py", servers=1, **SUMS_ONLY)
        outputs = [(role, process.communicate(timeout=DEADLINE_S)[0]) for role, process in started]
    told = [(role, output) for role, output in outputs if "too few servers" in output]
    assert [role for role, _ in told] == ["scheduler"], outputs
    assert told[0][1].count("too few servers") == 1
    words = "1 on 1 host, for workers on 3 hosts. The busiest link carries 1.5 times what it would "
    assert f"{words}with 3," in told[0][1]


def test_one_server_is_enough_on_one_host() -> None:
    result = run_job("join.py", workers=3, servers=1, **SUMS_ONLY)
    assert result.code == 0 and "too few servers" not in result.output, result.output
