"""Scripts may fork in mid-training: neither a child nor its parent hangs, and no number changes."""

from __future__ import annotations

from tests.jobs import run_job


def test_training_goes_on_after_every_way_to_fork() -> None:
    """In all workers, and in one."""
    result = run_job("forks.py", workers=2, servers=2)
    assert result.code == 0, result.output
    for rank in range(2):
        assert "all weights are right" in result.said_by(f"worker {rank}"), result.output
