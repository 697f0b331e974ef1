"""Nan and infinity pass through, or end the job where the user wants that."""

from __future__ import annotations

from typing import List

import numpy as np
import pytest

from p3kv.consistency import BulkSynchronous
from p3kv.server.engine import Engine, RowsKey, Unit
from p3kv.server.engine.buffers import BufferPool
from p3kv.server.engine.finite import NotFinite
from p3kv.server.engine.plan import KeyPlan
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import UNKNOWN, DeclaredKey
from p3kv.wire.rows import NUMBER, Rows
from tests.engines import one_slice
from tests.jobs import SUMS_ONLY, run_job

LARGEST = {"float32": 3e38, "float16": 6e4}


def test_nan_and_infinity_pass_through_as_in_one_process() -> None:
    job = run_job("not_finite.py", workers=2, servers=2)
    assert job.code == 0, job.output
    assert job.output.count("as in one process") == 2
    assert "RuntimeWarning" not in "".join(job.said_by(f"server {rank}") for rank in range(2))


def test_a_job_may_end_on_them_and_names_key_round_and_worker() -> None:
    job = run_job("not_finite.py", ["stop"], workers=2, P3KV_CHECK_FINITE=1, **SUMS_ONLY)
    assert job.code == 1, job.output
    reason = "its gradient of key 'b' has brought nan into the sum of round 2"
    last = job.output.splitlines()[-1]
    assert last.startswith(f"p3kv launch: worker 1 (round 2) failed first: {reason}. Look at this")
    for name in ("worker 0", "worker 1", "server 0", "scheduler"):
        assert reason in job.said_by(name)
    assert "Traceback" not in job.output


class Server:
    """Sums a key of one slice, or of rows, for two workers."""

    def __init__(self, dtype: str, deterministic: bool, by_rows: bool) -> None:
        self._pool = BufferPool()
        self._engine = Engine(BulkSynchronous(2), self._pool, deterministic)
        self._engine.rules.checks_finite = True
        layout = "sparse_rows" if by_rows else "dense"
        declared = DeclaredKey(0, "w", (2, 2), dtype, [(0, 4)], layout=layout)
        self._slice = one_slice(self._engine, declared)
        self._rows = RowsKey(KeyPlan(declared, 0, self._engine.rules))
        self._dtype = np.dtype(dtype)
        self._by_rows = by_rows
        self.push(0, INITIAL_ROUND, [np.nan, np.inf, 0, 0])

    def push(self, rank: int, round_: int, numbers: List[float]) -> None:
        gradient = np.array(numbers, self._dtype)
        if self._by_rows:
            rows = Rows(np.arange(2, dtype=NUMBER), gradient.reshape(2, 2))
            self._rows.push(rank, round_, 1, rows, round_)
            unit: Unit = self._rows
        else:
            buffer = self._pool.get(4, self._dtype)
            buffer.array[:] = gradient
            self._engine.push(self._slice, rank, round_, buffer, False, 0, round_)
            unit = self._slice
        assert len(list(self._engine.end_rounds(unit))) < 2


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
        assert caught.value.rank == (UNKNOWN if finds_at_the_end else 1)
        assert caught.value.round == 1
