"""p3kv.torch where workers differ: in what they count, in their batches, and in how many they have.

Numbers are those of one process with the batches of all.
"""

from __future__ import annotations

from typing import Any

from tests.frontends.test_torch import job
from tests.jobs import JOB_S, SCRIPTS, environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


def passes(said: str, script: str, *arguments: object, workers: int = 3, **env: Any) -> None:
    """Each worker of a job comes to its end, and says so."""
    result = job(script, *arguments, workers=workers, **env)
    assert result.code == 0, result.output
    assert result.output.count(said) == workers, result.output


def test_all_workers_have_the_same_sum_of_a_number() -> None:
    passes("has the sums", "torch_sums.py")


def test_a_process_alone_has_its_own_number() -> None:
    result = run([str(PYTHON), str(SCRIPTS / "torch_sums.py")], environment(), JOB_S)
    assert result.code == 0 and "worker 0 has the sums" in result.output, result.output
