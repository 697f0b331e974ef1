"""Jobs whose workers train by themselves go on from a checkpoint bit for bit, each with its own
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List

import numpy as np
import pytest

from p3kv.checkpoints import newest
from tests.frontends.test_torch import job as torch_job
from tests.jobs import JobResult, run_job
from tests.torch_environment import NEEDS_TORCH

STREAMING = "local:steps=6,delay=4"
"""At a checkpoint, values are under way that are taken some steps later."""
NEVER = "local:steps=30,streaming=false"
"""Nothing is exchanged in these trainings."""
TOPK = {"P3KV_GRADIENT_CODEC": "topk:share=0.2", "P3KV_VALUE_CODEC": "topk:share=0.2"}
Train = Callable[..., JobResult]


def settings(folder: Path, rule: str, **more: Any) -> Dict[str, Any]:
    return {
        "P3KV_CHECKPOINT_DIR": folder / "checkpoints", "P3KV_CHECKPOINT_EVERY": 4,
        "P3KV_CONSISTENCY": rule, "P3KV_SLICE_SIZE": 100, **more,
    }  # fmt: skip


def with_torch(folder: Path, rule: str, *last: int, **more: Any) -> JobResult:
    return torch_job("torch_local.py", *last, **settings(folder, rule, **more))


def with_the_other(folder: Path, rule: str, *last: int, **more: Any) -> JobResult:
    workers, servers = more.pop("workers", 2), more.pop("servers", 2)
    arguments = [folder, *last]
    return run_job("local.py", arguments, workers, servers, **settings(folder, rule, **more))


def leave(train: Train, folder: Path, rule: str, **more: Any) -> None:
    """Has a job end after 12 steps; the last checkpoint is that of its end."""
    result = train(folder, rule, 12, **more)
    assert result.code == 0, result.output


@pytest.mark.parametrize(
    ("train", "rule"),
    [
        pytest.param(with_torch, STREAMING, marks=[NEEDS_TORCH, pytest.mark.long]),
        (with_the_other, STREAMING),
        pytest.param(
            with_torch, "bounded:staleness=3,lazy=1", marks=[NEEDS_TORCH, pytest.mark.long]
        ),
        pytest.param(with_torch, NEVER, marks=[NEEDS_TORCH, pytest.mark.long]),
        pytest.param(with_the_other, "local:steps=3,streaming=false", marks=pytest.mark.long),
        pytest.param(with_the_other, "bounded:staleness=3,lazy=1", marks=pytest.mark.long),
    ],
)
def test_workers_go_on_with_their_own_weights_on_any_number_of_servers(
    tmp_path: Path, train: Train, rule: str
) -> None:
    """The script compares with the same training in one process, which nothing has disturbed."""
    leave(train, tmp_path, rule)
    result = train(tmp_path, rule, servers=3, P3KV_RESUME=1)
    assert result.code == 0, result.output
    assert result.output.count("right by the rule local, after 12 steps") == 2, result.output


@NEEDS_TORCH
@pytest.mark.long
def test_codecs_that_lack_changes_in_both_directions_go_on_bit_for_bit(tmp_path: Path) -> None:
    """The last value that comes of a key before a checkpoint travels as it is."""
    undisturbed = with_torch(tmp_path / "undisturbed", STREAMING, **TOPK)
    assert undisturbed.code == 0, undisturbed.output
    leave(with_torch, tmp_path, STREAMING, **TOPK)
    result = with_torch(tmp_path, STREAMING, P3KV_RESUME=1, **TOPK)
    assert result.code == 0, result.output
    assert "goes on from the checkpoint of step 12" in result.output
    for rank in range(2):
        one, other = (ends_of(job, rank) for job in (undisturbed, result))
        assert one == other != [], result.output


def ends_of(result: JobResult, rank: int) -> List[str]:
    lines = result.said_by(f"worker {rank}").splitlines()
    return [line for line in lines if line.strip().startswith("ends with")]


@NEEDS_TORCH
@pytest.mark.long  # test_kept_back.py and test_checkpoints.py tell of others by other rules
def test_other_workers_or_another_rule_are_told_of(tmp_path: Path) -> None:
    rule = "local:steps=3,streaming=false"
    leave(with_torch, tmp_path, rule, servers=1)
    saved = newest(str(tmp_path / "checkpoints"), "127.0.0.1")
    assert saved is not None and saved.num_workers == 2
    # What they have in common is the servers' value, whatever a worker has learned since.
    of_key = saved.key(0, 1)
    assert of_key.value.dtype == np.float32 and of_key.states[0].elements.keys() == {"velocity"}
    result = with_torch(tmp_path, "local:steps=5", P3KV_RESUME=1, servers=1)
    assert result.code != 0
    assert (
        "the checkpoint's consistency is local:steps=3,rate=0.7,momentum=0.9,streaming=false, and "
        "this script's is local:steps=5,rate=0.7,momentum=0.9,streaming=true,delay=1; go on with "
        "the checkpoint's (P3KV_CONSISTENCY, or the rule that the script gives)"
    ) in result.output
    result = with_the_other(tmp_path, rule, P3KV_RESUME=1, servers=1)
    assert result.code != 0 and "ValueError" not in result.output, result.output
    for rank in range(2):
        said = result.said_by(f"worker {rank}")
        assert "of a script with torch, and this one trains with mxnet" in said, result.output
    shared = settings(tmp_path, "bulk_synchronous", P3KV_RESUME=1)
    result = torch_job("torch_own_rounds.py", servers=1, **shared)
    assert result.code != 0
    assert "this script's is a rule by which the gradients of all workers make" in result.output
    result = with_torch(tmp_path, rule, 12, workers=3, servers=1, P3KV_RESUME=1)
    assert result.code == 0, result.output
    assert (
        "the checkpoint of step 12 is of 2 workers, and this job has 3. So all workers go on from "
        "the servers' weights"
    ) in result.said_by("worker 0"), result.output
    one, *others = (ends_of(result, rank) for rank in range(3))
    assert others == [one] * 2 and len(one) == 1, result.output
