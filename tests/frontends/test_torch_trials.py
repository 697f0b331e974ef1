"""`p3kv compare` with scripts that use p3kv.torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import ROOT, JobResult, environment, run_with_gloo
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH
EQUAL_UNDER_DDP = """
import p3kv.torch
import torch
from torch import distributed, nn

model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = p3kv.torch.Optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
torch.manual_seed(optimizer.rank)
for step in range(100):
    for part in range(2):
        with optimizer.no_sync() if part == 0 else torch.enable_grad():
            model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if distributed.is_initialized():
        mine = model[0].weight.detach().clone()
        theirs = [torch.empty_like(mine) for _ in range(2)]
        distributed.all_gather(theirs, mine)
        assert torch.equal(*theirs), "not averaged"
        assert distributed.get_rank() == optimizer.rank and optimizer.num_workers == 2
"""


WRAPPED_AGAIN = """
import p3kv.torch.ddp
import torch
from torch import distributed, nn

distributed.init_process_group("gloo")
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for fit in range(50):
    wrapped = nn.parallel.DistributedDataParallel(model)
    model[0].requires_grad_(False)
    for step in range(4):
        model[0].requires_grad_(True)
        wrapped(torch.randn(4, 8)).square().mean().backward()
        model[0].requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
"""


def compared(script: Path, rounds: int = 1) -> JobResult:
    command = [
        str(PYTHON), "-m", "p3kv", "compare", "-s", "1", "--rounds", str(rounds), "--steps", "6",
        "--", str(PYTHON), str(script),
    ]  # fmt: skip
    return run_with_gloo(command, environment(), 200)


def test_a_script_is_compared_with_ddp_which_really_averages(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EQUAL_UNDER_DDP)
    result = compared(script)
    assert result.code == 0, result.output
    rows = re.findall(r"^(computing alone|DDP|p3kv, FIFO|p3kv)  .*\d", result.output, re.M)
    assert rows == ["computing alone", "DDP", "p3kv, FIFO", "p3kv"], result.output
    text = " ".join(result.output.split())
    assert "with DDP" in text or "as fast as DDP" in text or "this says nothing" in text, text
    assert "dist_sync" not in text, text
    assert "DDP at best" in text or "No forecast for other networks" in text, text


@pytest.mark.long  # habits are wrapped again
def test_a_comparison_goes_on_where_a_model_is_wrapped_again_and_thawed(tmp_path: Path) -> None:
    """In its fourth step: six are timed after those that warm up."""
    script = tmp_path / "train.py"
    script.write_text(WRAPPED_AGAIN)
    result = compared(script)
    assert result.code == 0, result.output
    assert re.search(r"^p3kv  .*\d", result.output, re.M), result.output


def test_another_rule_than_the_default_is_not_compared(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        EQUAL_UNDER_DDP.replace("momentum=0.9)", "momentum=0.9), consistency='local'")
    )
    result = compared(script)
    assert result.code == 1 and "the consistency here is 'local'" in result.output, result.output


@pytest.mark.long
def test_the_example_is_compared_as_it_is() -> None:
    result = compared(ROOT / "examples" / "torch_language_model.py")
    assert result.code == 0 and "\nDDP " in result.output, result.output
