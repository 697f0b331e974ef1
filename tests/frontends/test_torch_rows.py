"""Embeddings with sparse gradients under p3kv.torch, in real jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.frontends.test_torch import job, weights
from tests.torch_environment import NEEDS_TORCH

pytestmark = NEEDS_TORCH


@pytest.mark.parametrize(
    ("name", "workers", "servers"),
    [
        ("Adagrad", 3, 1),
        pytest.param("SGD", 1, 2, marks=pytest.mark.long),
    ],
)
def test_weights_and_states_are_those_of_one_process(
    tmp_path: Path, name: str, workers: int, servers: int
) -> None:
    """With a row that is never trained, bags, tables that some workers or none use, gradients
    without rows, and dense layers."""
    result = job(
        "torch_rows.py", name, tmp_path / "w.pt", workers=workers, servers=servers,
        P3KV_SLICE_SIZE=100,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"right with {name}") == workers, result.output


def test_a_killed_job_of_two_optimizers_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """SparseAdam's gradients are ready after those of the dense layers, whose optimizer is another:
    a checkpoint has as many steps of both."""
    undisturbed, goes_on = tmp_path / "undisturbed.pt", tmp_path / "goes on.pt"
    right = job("torch_rows.py", "SparseAdam", undisturbed, P3KV_SLICE_SIZE=100)
    assert right.code == 0 and right.output.count("right with SparseAdam") == 2, right.output
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path / "checkpoints", "P3KV_CHECKPOINT_EVERY": 3}
    killed = job("torch_rows.py", "SparseAdam", goes_on, 8, P3KV_SLICE_SIZE=100, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output
    result = job(
        "torch_rows.py", "SparseAdam", goes_on, 8, servers=3, P3KV_SLICE_SIZE=200, P3KV_RESUME=1,
        **settings,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("begins after 6 steps") == 2, result.output
    compared = weights(undisturbed, goes_on)
    assert compared.code == 0, compared.output


def test_few_bytes_travel_and_what_users_do_works_or_is_refused() -> None:
    result = job("torch_rows_uses.py")
    assert result.code == 0, result.output
    assert result.output.count("few bytes") == result.output.count("refused") == 2, result.output


@pytest.mark.long
def test_rows_that_a_codec_has_rounded_come_exactly_on_request() -> None:
    codecs = {"P3KV_GRADIENT_CODEC": "float16", "P3KV_VALUE_CODEC": "float16"}
    result = job("torch_rows_uses.py", "codecs", **codecs)
    assert result.code == 0, result.output
    assert result.output.count("rounded") == 2, result.output
