"""Scripts of several workers that do as docs/using.md says get the numbers of all workers."""

from __future__ import annotations

import json

import pytest

from tests.jobs import run_job


def test_data_metrics_and_estimator_give_the_numbers_of_all_workers() -> None:
    result = run_job("whole_batches.py", workers=2)
    assert result.code == 0, result.output
    for rank in range(2):
        batches, weight, accuracies = json.loads(result.said_by(f"worker {rank}").splitlines()[-1])
        assert batches == 5  # of 11 samples, 2 each
        assert weight == pytest.approx(1 - 5 * 0.1)  # gradient 1, rate 0.1; else it were 0.0
        assert accuracies == [(1 + 2) / 8, (3 + 4) / 8]
