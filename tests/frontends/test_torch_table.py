"""Tables that servers hold, by p3kv.torch.Embedding, in real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frontends.test_torch import job
from tests.jobs import JOB_S, environment, run
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [
        ("SparseAdam", 2, 2),
        pytest.param("Adagrad", 3, 1, marks=pytest.mark.long),
        pytest.param("SGD", 1, 3, marks=pytest.mark.long),
    ],
)
def test_losses_and_rows_are_those_of_an_embedding_of_torch(
    name: str, workers: int, servers: int
) -> None:
    """Bit for bit on any number of servers, and those of one process but for rounding; the first
    rows are those that the seed gives in one process."""
    result = job(
        "torch_table.py", name, workers=workers, servers=servers, P3KV_SLICE_SIZE=100,
        P3KV_DETERMINISTIC=1,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"right with {name}") == workers, result.output


@pytest.mark.long  # the next one resumes a table, too
def test_a_killed_job_goes_on_with_more_servers(tmp_path: Path) -> None:
    undisturbed, goes_on = tmp_path / "undisturbed.pt", tmp_path / "goes on.pt"
    right = job("torch_table.py", "SparseAdam", undisturbed, P3KV_SLICE_SIZE=100)
    assert right.code == 0, right.output
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path / "checkpoints", "P3KV_CHECKPOINT_EVERY": 3}
    killed = job("torch_table.py", "SparseAdam", goes_on, 7, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output, killed.output
    result = job("torch_table.py", "SparseAdam", goes_on, 7, servers=3, P3KV_RESUME=1, **settings)
    assert result.code == 0, result.output
    assert result.output.count("begins after 6 steps") == 2, result.output
    program = (
        "import sys, torch\n"
        "one, other = map(torch.load, sys.argv[1:])\n"
        "assert len(one) == 3 and all(map(torch.equal, one, other))\n"
    )
    command = [str(PYTHON), "-c", program, str(undisturbed), str(goes_on)]
    compared = run(command, environment(), JOB_S)
    assert compared.code == 0, compared.output


def test_no_worker_needs_memory_for_a_table_that_comes_from_a_checkpoint(tmp_path: Path) -> None:
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 2}
    killed = job("torch_table_resumed.py", 4, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output, killed.output
    result = job("torch_table_resumed.py", 4, servers=3, P3KV_RESUME=1, **settings)
    assert result.code == 0, result.output
    assert result.output.count("little memory after") == 2, result.output
    assert "after 0 steps" not in result.output, result.output


def test_workers_need_little_memory_and_what_users_do_works_or_is_refused() -> None:
    result = job("torch_table_uses.py", P3KV_SUMMARY_EVERY=5)
    assert result.code == 0, result.output
    # What DDP would take is known of whole tensors only.
    assert "the job's limit is" in result.output and "with DDP" not in result.output, result.output
    assert result.output.count("little memory") == result.output.count("refused") == 2
    assert result.output.count("stays on the servers") == 2, result.output  # of two tables


def test_in_one_process_it_is_an_embedding_of_torch() -> None:
    """The rows that a job has, trained by torch's own optimizers bit for bit."""
    program = (
        "import p3kv.torch, torch\n"
        "from torch.nn.functional import embedding\n"
        "for kind in (torch.optim.SGD, torch.optim.SparseAdam):\n"
        "    one = p3kv.torch.Embedding(9, 4, 2, seed=5)\n"
        "    other = torch.nn.Embedding(9, 4, 2, sparse=True)\n"
        "    other.load_state_dict(one.state_dict())\n"
        "    assert not one.weight[2].any() and one.weight.std() > 0.5\n"
        "    mine = p3kv.torch.Optimizer(one, kind(one.parameters(), lr=0.1))\n"
        "    for step in range(5):\n"
        "        ids = torch.tensor([step, 2, step + 1])\n"
        "        one.zero_grad(), one(ids).square().sum().backward(), mine.step()\n"
        "        theirs = theirs if step else kind(other.parameters(), lr=0.1)\n"
        "        other.zero_grad(), other(ids).square().sum().backward(), theirs.step()\n"
        "    one.prefetch(ids)\n"
        "    assert torch.equal(one.weight, other.weight) and not one.stats()\n"
    )
    result = run([str(PYTHON), "-c", program], environment(), JOB_S)
    assert result.code == 0, result.output
