"""Without a size of slices the workers measure the network, and all come to the same size."""

from __future__ import annotations

import re

import pytest

from experiments.cluster import Cluster, missing_requirements
from p3kv.slicing import slice_size_for
from p3kv.slicing.size import FEWEST_ELEMS
from tests.jobs import DEADLINE_S, SUMS_ONLY, run_job, start_on

_SAID = re.compile(r"slices have (\d+) elements: (\d+) MB/s leave this worker")


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3)])
def test_all_workers_agree_on_the_size_for_the_slowest(workers: int, servers: int) -> None:
    result = run_job("join.py", workers=workers, servers=servers, P3KV_VERBOSE=1, **SUMS_ONLY)
    assert result.code == 0, result.output
    said = [_SAID.search(result.said_by(f"worker {rank}")) for rank in range(workers)]
    assert all(said), result.output
    sizes = {int(match[1]) for match in said if match}
    slowest_mb_s = min(int(match[2]) for match in said if match)
    # What is said is rounded.
    assert len(sizes) == 1
    assert sizes <= {slice_size_for((slowest_mb_s + off) * 1e6, servers) for off in (-0.5, 0.5)}


def test_a_size_that_is_set_is_not_measured() -> None:
    result = run_job("join.py", P3KV_VERBOSE=1, P3KV_SLICE_SIZE=1000, **SUMS_ONLY)
    assert result.code == 0, result.output
    assert not _SAID.search(result.output)


@pytest.mark.skipif(missing_requirements() is not None, reason=str(missing_requirements()))
def test_a_server_on_the_same_host_does_not_hide_a_slow_link() -> None:
    with Cluster(2, 10.0) as cluster:
        started = start_on(cluster, "join.py", P3KV_VERBOSE=1, **SUMS_ONLY)
        outputs = [(role, process.communicate(timeout=DEADLINE_S)[0]) for role, process in started]
    said = [_SAID.search(output) for role, output in outputs if role == "worker"]
    assert [match[1] for match in said if match] == [str(FEWEST_ELEMS)] * 2, outputs
