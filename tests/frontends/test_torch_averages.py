"""p3kv.torch with `updates="workers"` in real jobs: servers average gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.frontends.test_torch import job
from tests.jobs import JOB_S, SCRIPTS, environment, run_with_gloo
from tests.torch_environment import NEEDS_TORCH, PYTHON

pytestmark = NEEDS_TORCH


def right(*names: str, **settings: Any) -> None:
    result = job("torch_averages.py", *names, P3KV_SLICE_SIZE=400, **settings)
    assert result.code == 0, result.output
    for name in names:
        assert result.output.count(f"right: {name}") == 2, result.output


def test_workers_step_by_the_means_of_gradients_bit_for_bit_as_one_process() -> None:
    """Any optimizer; several passes for a step, clipping, two optimizers, a pass that has raised,
    parameters that are added, also after a step has been weighed; sparse gradients, complex ones,
    gradients in parts and large halves; a scaler that skips alike on all; and a first step that
    tells who updates."""
    right(
        "optimizers", "lbfgs", "first_step", "passes", "two_optimizers", "caught", "groups",
        "weighed_and_grown", "sparse", "models", "large_halves", "scaler",
    )  # fmt: skip


def test_a_compiled_model_has_the_means_when_its_backward_pass_has_ended() -> None:
    right("compiled")  # alone: other checks would leave the lean imports' compiler in its place


def test_workers_update_what_servers_can_t_and_the_log_says_why() -> None:
    result = job("torch_averages.py", "chosen")
    assert result.code == 0, result.output
    assert result.output.count("each worker's own optimizer steps: ") == 4, result.output
    for why in (
        "can't run the optimizer Sign",
        "can't run the optimizer LBFGS: it evaluates the closure",
        "can't update parameters of torch.complex64",
        "SGD's note is a object",
    ):
        assert result.output.count(why) == 1, result.output


@pytest.mark.long  # codecs are shown where servers update
@pytest.mark.parametrize(
    ("gradients", "values"), [("float16", "float16"), ("topk:share=0.2", "identity")]
)
def test_codecs_encode_gradients_and_their_sums(gradients: str, values: str) -> None:
    right("encoded", P3KV_GRADIENT_CODEC=gradients, P3KV_VALUE_CODEC=values)


def test_epochs_of_different_lengths_are_those_of_distributed_data_parallel() -> None:
    command = [
        str(PYTHON), "-m", "p3kv", "launch", "-n", "3", "-s", "2", "--", str(PYTHON),
        str(SCRIPTS / "torch_averages.py"), "uneven",
    ]  # fmt: skip
    result = run_with_gloo(command, environment(P3KV_SLICE_SIZE=400), JOB_S)
    assert result.code == 0, result.output
    assert result.output.count("right: uneven") == 3, result.output
