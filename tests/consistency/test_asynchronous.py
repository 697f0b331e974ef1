"""`kvstore='dist_async_p3'`: each worker's push updates the weights at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import run_job


def test_workers_train_each_at_its_own_pace_and_every_push_counts_once(tmp_path: Path) -> None:
    result = run_job("asynchronous.py", [tmp_path], workers=2, servers=2, P3KV_SLICE_SIZE=150)
    assert result.code == 0, result.output
    assert result.output.count("every value is right") == 2, result.output
    for words in (
        "key 'w' is pushed to a store without an optimizer: an asynchronous store's servers would",
        "Call kv.set_optimizer on every worker first",
        "the optimizer Nadam: the update of one key leaves a number for that of the next",
        "the optimizer LAMB, set after SGD",
        "the servers of an asynchronous store can't change from slices to whole tensors",
        "optimizer states can't be saved: a file has one count of updates for each key",
        "Please set update_on_kvstore=True when training in async mode",
    ):
        assert words in result.said_by("worker 1"), result.output


@pytest.mark.parametrize(
    ("rule", "workers"), [("asynchronous", 1), ("bounded:staleness=3", 1), ("asynchronous", 2)]
)
def test_a_push_counts_with_the_rate_of_its_step_however_far_ahead_the_script_is(
    rule: str, workers: int
) -> None:
    result = run_job("own_schedule.py", workers=workers, servers=2, P3KV_CONSISTENCY=rule)
    assert result.code == 0, result.output
    assert result.output.count("each push counts with its step's rate") == workers, result.output
