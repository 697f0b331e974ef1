"""p3kv.torch where workers differ: in what they count, in their batches, and in how many they have.

Numbers are those of one process with the batches of all.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.frontends.test_torch import job
from tests.jobs import JOB_S, SCRIPTS, JobResult, environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


def passes(said: str, *arguments: object, times: int = 1, **env: Any) -> JobResult:
    """Each of a job's three workers comes to its end, and says so."""
    result = job(*arguments, workers=3, **env)
    assert result.code == 0, result.output
    assert result.output.count(said) == 3 * times, result.output
    return result


def test_a_process_alone_has_its_own_number() -> None:
    result = run([str(PYTHON), str(SCRIPTS / "torch_sums.py")], environment(), JOB_S)
    assert result.code == 0 and "worker 0 has the sums" in result.output, result.output


IN_ORDER = {"P3KV_SLICE_SIZE": 300, "P3KV_DETERMINISTIC": 1}


def test_means_are_weighted_by_samples_bit_for_bit_as_one_process_does() -> None:
    """In buckets, slices and sparse rows; also where a worker weighs nothing, or none does; where
    servers update, and where the first step shows that workers are to. Steps are clipped by that
    mean's norm; and all workers have the same sum of a number."""
    weighed = "torch_weighed.py"
    result = passes(
        "is right by weights", "in_turn.py", weighed, "exact", ",", weighed, "exact", "used", ",",
        weighed, 1e-5, "clipped", ",", "torch_sums.py", times=3, **IN_ORDER,
    )  # fmt: skip
    assert result.output.count("has the sums") == 3, result.output


@pytest.mark.long  # where the first step shows it nearly shows it
def test_means_that_come_back_are_weighted_bit_for_bit() -> None:
    passes("is right by weights", "torch_weighed.py", "exact", "workers", **IN_ORDER)


@pytest.mark.long  # sums of hosts and weights are shown each
def test_the_sums_of_a_host_are_weighted() -> None:
    passes(
        "is right by weights", "on_hosts.py", 2, "torch_weighed.py", "exact",
        DMLC_NODE_HOST="127.0.0.9", **IN_ORDER,
    )  # fmt: skip


@pytest.mark.long  # weighted means and codecs are shown each
@pytest.mark.parametrize("codec", ["bfloat16", "float16"])
def test_what_a_codec_rounds_is_weighted(codec: str) -> None:
    passes("is right by weights", "torch_weighed.py", 0.05, P3KV_GRADIENT_CODEC=codec)


@pytest.mark.long
def test_an_absent_worker_is_in_the_sums_of_its_host() -> None:
    passes(
        "is right with", "on_hosts.py", 2, "torch_joined.py", "samples", P3KV_SLICE_SIZE=30,
        DMLC_NODE_HOST="127.0.0.9",
    )  # fmt: skip


def test_a_worker_without_batches_is_absent_until_all_have_none() -> None:
    """Also worker 0, and in an epoch of which a worker has no batch; of two optimizers at once. A
    rate that changes while worker 0 is absent does not count, and is told."""
    joined = "torch_joined.py"
    result = passes(
        "is right with", "in_turn.py", joined, "all", ",", joined, "samples", ",", joined, "scaled",
        times=3, P3KV_SLICE_SIZE=30,
    )  # fmt: skip
    assert result.output.count("worker 0, whose learning rates count") == 1  # of both, by "all"


@pytest.mark.long
@pytest.mark.parametrize(("how", "servers"), [("present", 1), ("clipped", 2)])
def test_a_worker_without_batches_is_absent_also_where(how: str, servers: int) -> None:
    passes("is right with", "torch_joined.py", how, servers=servers, P3KV_SLICE_SIZE=30)


def test_a_job_that_allows_no_epochs_of_different_lengths_ends_with_the_shorter_one() -> None:
    result = job("torch_joined.py", "refused", workers=3)
    assert result.code != 0
    assert "this worker has no batch left, and workers [0, 2] have" in result.output
    assert "worker 1" in result.output.splitlines()[-1], result.output


@pytest.mark.parametrize("updates", ["servers", pytest.param("workers", marks=pytest.mark.long)])
def test_a_worker_that_is_half_as_fast_gets_half_of_a_batch(updates: str) -> None:
    """And weights are those of one process with the whole batches."""
    result = job("torch_shares.py", 0.02, 3, updates, workers=4, servers=1)
    assert result.code == 0, result.output
    takes = [int(found) for found in re.findall(r"worker \d takes (\d+)", result.output)]
    assert len(takes) == 4 and sum(takes) == 56
    assert sorted(takes)[0] <= 10 and all(one >= 13 for one in sorted(takes)[1:]), result.output
