"""Without a size of slices the workers measure the network, and all come to the same size."""

from __future__ import annotations

import re

import pytest

from p3kv.slicing import slice_size_for
from tests.jobs import run_job

_SAID = re.compile(r"slices have (\d+) elements: (\d+) MB/s leave this worker")


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 3)])
def test_all_workers_agree_on_the_size_for_the_slowest(workers: int, servers: int) -> None:
    result = run_job("join.py", workers=workers, servers=servers, P3KV_VERBOSE=1)
    assert result.code == 0, result.output
    said = [_SAID.search(result.said_by(f"worker {rank}")) for rank in range(workers)]
    assert all(said), result.output
    sizes = {int(match[1]) for match in said if match}
    slowest_mb_s = min(int(match[2]) for match in said if match)
    # What is said is rounded.
    assert len(sizes) == 1
    assert sizes <= {slice_size_for((slowest_mb_s + off) * 1e6) for off in (-0.5, 0.5)}


def test_a_size_that_is_set_is_not_measured() -> None:
    result = run_job("join.py", P3KV_VERBOSE=1, P3KV_SLICE_SIZE=1000)
    assert result.code == 0, result.output
    assert not _SAID.search(result.output)
