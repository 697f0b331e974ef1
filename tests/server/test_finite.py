"""Nan and infinity pass through, or end the job where the user wants that."""

from __future__ import annotations

from contextlib import closing
from typing import Any, List, Tuple

import numpy as np
import pytest
from msgspec.structs import replace

from p3kv.common.finite import NotFinite
from p3kv.server.engine import Record
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey
from p3kv.wire.rows import NUMBER, Rows
from tests import engines
from tests.engines import ended, engine_of, one_slice, push_rows
from tests.in_memory import MemoryJob
from tests.jobs import SUMS_ONLY, run_job
from tests.whole_jobs.test_host_sums import run_on_hosts

LARGEST = {"float32": 3e38, "float16": 6e4}


def test_nan_and_infinity_pass_through_as_in_one_process() -> None:
    job = run_job("not_finite.py", workers=2, servers=2)
    assert job.code == 0, job.output
    assert job.output.count("as in one process") == 2
    assert "RuntimeWarning" not in "".join(job.said_by(f"server {rank}") for rank in range(2))


@pytest.mark.parametrize("per_host", [1, 2])
def test_a_job_may_end_on_them_and_names_key_round_and_worker(per_host: int) -> None:
    job = run_on_hosts(
        per_host, "not_finite.py", "stop", workers=2, servers=1, P3KV_CHECK_FINITE=1, **SUMS_ONLY
    )
    assert job.code == 1, job.output
    reason = "its gradient of key 'b' has brought nan into the sum of round 2"
    last = job.output.splitlines()[-1]
    assert last.startswith(f"p3kv launch: worker 1 (round 2) failed first: {reason}. Look at this")
    for name in ("worker 0", "worker 1", "server 0", "scheduler"):
        assert reason in job.said_by(name), job.output
    assert "Traceback" not in job.output


class Server:
    """Sums a key of one slice, or of rows, for two workers."""

    def __init__(self, dtype: str, deterministic: bool, by_rows: bool) -> None:
        self._engine = engine_of(2, deterministic=deterministic, check_finite=True)
        dense = DeclaredKey(0, "w", (2, 2), dtype, [(0, 4)])
        self._slice = one_slice(self._engine, dense)
        self._rows = self._engine.declare(replace(dense, key_id=1, layout="sparse_rows")).rows
        self._dtype = np.dtype(dtype)
        self._by_rows = by_rows
        self.push(0, INITIAL_ROUND, [np.nan, np.inf, 0, 0])

    def push(self, rank: int, round_: int, numbers: List[float]) -> None:
        gradient = np.array(numbers, self._dtype)
        if self._by_rows:
            rows = Rows(np.arange(2, dtype=NUMBER), gradient.reshape(2, 2))
            push_rows(self._rows, rank, round_, 1, rows, round_)
            record: Record[Any] = self._rows
        else:
            buffer = self._engine.state.pool.get(4, self._dtype)
            buffer.array[:] = gradient
            engines.push(self._slice, rank, round_, buffer, False, 0, round_)
            record = self._slice
        assert len(list(ended(self._engine.end_rounds(record)))) < 2


@pytest.mark.parametrize("by_rows", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
class TestAServerThatChecks:
    @pytest.mark.parametrize(("bad", "what"), [(np.nan, "nan"), (-np.inf, "infinity")])
    @pytest.mark.parametrize("culprit", [0, 1])
    def test_names_the_worker_whose_gradient_is_not_finite(
        self, dtype: str, deterministic: bool, by_rows: bool, bad: float, what: str, culprit: int
    ) -> None:
        server = Server(dtype, deterministic, by_rows)
        server.push(1, 1, [LARGEST[dtype], 0, 1, 2])
        server.push(0, 1, [-LARGEST[dtype], 0, 1, 2])
        server.push(1 - culprit, 2, [1, 2, 3, 4])
        with pytest.raises(NotFinite, match=rf"^its gradient of key 'w' .* {what} .*round 2"):
            server.push(culprit, 2, [1, 2, bad, 4])

    def test_ends_on_a_sum_that_is_too_large(
        self, dtype: str, deterministic: bool, by_rows: bool
    ) -> None:
        server = Server(dtype, deterministic, by_rows)
        server.push(0, 1, [0, LARGEST[dtype], 0, 0])
        with np.errstate(over="ignore"), pytest.raises(NotFinite, match="infinity") as caught:
            server.push(1, 1, [0, LARGEST[dtype], 0, 0])
        # Only where nothing but the sum is bad, and was found when all had come.
        finds_at_the_end = deterministic or by_rows or dtype == "float16"
        assert caught.value.rank == (None if finds_at_the_end else 1)
        assert caught.value.round == 1


class Hosts(MemoryJob):
    """Two hosts with two workers each, which have a key with its initial value."""

    def __init__(self, dtype: str, codec: str, deterministic: bool) -> None:
        super().__init__(
            4, 1, 8, codec=codec, per_host=2, dtype=dtype, check_finite=True,
            deterministic=deterministic,
        )  # fmt: skip
        self.key = self.declare("w", 4)
        self.failures: List[Tuple[Any, ...]] = []
        self.servers[0].workers.on_failure = lambda *failure: self.failures.append(failure)
        self.workers[0].call(self.key[0], INITIAL_ROUND, np.array([np.inf] * 4, dtype), None)
        self.finish()

    def push(self, round_: int, *first_numbers: float) -> None:
        """Has each worker push its number, and small ones behind it."""
        for worker, key, number in zip(self.workers, self.key, first_numbers):
            worker.call(key, round_, np.array([number, 0, 1, 2], self.dtype), None)
        self.finish()


@pytest.mark.parametrize("deterministic", [False, True])
class TestWorkersOfAHostThatCheck:
    @pytest.mark.parametrize(
        ("dtype", "codec"),
        [("float32", "identity"), ("float32", "float16"), ("float16", "identity")],
    )
    @pytest.mark.parametrize(("bad", "what"), [(np.nan, "nan"), (-np.inf, "infinity")])
    @pytest.mark.parametrize("culprit", range(4))
    def test_name_the_one_whose_gradient_is_not_finite(
        self, dtype: str, codec: str, deterministic: bool, bad: float, what: str, culprit: int
    ) -> None:
        with closing(Hosts(dtype, codec, deterministic)) as job:
            job.push(1, LARGEST[dtype], -LARGEST[dtype], 1, 2)
            numbers = [1.0, 2.0, 3.0, 4.0]
            numbers[culprit] = bad
            reason = f"^its gradient of key 'w' has brought {what} into the sum of round 2$"
            with pytest.raises(NotFinite, match=reason) as caught:
                job.push(2, *numbers)
            assert (caught.value.rank, caught.value.round) == (culprit, 2)
            assert all(one.round == 1 for one in job.servers[0].consumer.engine.records())
            assert not job.failures

    @pytest.mark.parametrize("on", [(0, 1), (0, 2)])
    @pytest.mark.parametrize("codec", ["identity", "float16"])
    def test_name_nobody_where_only_the_sum_is_too_large(
        self, codec: str, deterministic: bool, on: Tuple[int, int]
    ) -> None:
        """Be it one host's, or that of both."""
        with closing(Hosts("float32", codec, deterministic)) as job:
            numbers = [LARGEST["float32"] if rank in on else 0.0 for rank in range(4)]
            with np.errstate(over="ignore"):
                job.push(1, *numbers)
            reason = "the sum of several workers' gradients of key 'w' has infinity in round 1"
            assert job.failures == [(reason, 1, "NotFiniteError")]
            assert all(one.round == 0 for one in job.servers[0].consumer.engine.records())
