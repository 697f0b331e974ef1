"""What users' PyTorch scripts do, in real jobs, beside the same training without p3kv."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import median
from typing import List

import pytest

from p3kv.tools.timeline import FORWARD, iterations, passes, read_job
from tests.frontends.test_torch import PYTHON, job, weights
from tests.jobs import environment, run

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="there is no environment with torch: scripts/test makes one"
)


def test_a_script_s_habits_give_the_numbers_of_one_process_or_are_refused() -> None:
    """Weights that it writes, freezes and thaws; strides that differ between workers; activations
    that are computed again; functions of its own; evaluations and averages in mid-training; several
    losses; loaders that fork. And all workers have all of worker 0's model: parameters that no
    optimizer has, of all dtypes; buffers of two optimizers, or that are replaced, expanded, or
    weights by another name; copies right after a step."""
    result = job("in_turn.py", "torch_habits.py", ",", "torch_whole_model.py")
    assert result.code == 0, result.output
    assert result.output.count("right: loaders_fork") == 2, result.output
    assert result.output.count("right: what_can_t_be_shared_is_refused") == 2, result.output


def test_the_script_s_optimizer_is_the_one_that_is_attached() -> None:
    """Its states, hooks, schedulers, groups and copies, from before and after; by every rule."""
    result = job("torch_one_optimizer.py", P3KV_DETERMINISTIC=1)
    assert result.code == 0, result.output
    assert result.output.count("right: a_scalar_s_state_has_its_shape") == 2, result.output


@pytest.mark.parametrize("norm", [[], pytest.param([0.3], marks=pytest.mark.long)])
def test_what_nobody_trains_does_not_travel_until_a_worker_thaws_it(norm: List[float]) -> None:
    result = job("torch_asleep.py", *norm, workers=3)
    assert result.code == 0, result.output
    assert result.output.count("nothing travels for what nobody trains") == 3, result.output


@pytest.mark.alone
def test_reports_and_traces_tell_what_a_script_reads_and_whom_it_waits_for_from_computing(
    tmp_path: Path,
) -> None:
    result = job("torch_marks.py", P3KV_TRACE=tmp_path)
    assert result.code == 0, result.output
    assert result.output.count("knows where its time goes") == 2, result.output
    timeline = read_job(tmp_path)
    slow = next(one for one in timeline.processes if (one.role, one.rank) == ("worker", 1))
    forwards = [one for one in passes(slow) if one.phase == FORWARD]
    assert len(forwards) == 9, forwards
    taken_s = median((one.end_ns - one.start_ns) * 1e-9 for one in forwards)
    assert 0.3 < taken_s < 0.43, taken_s  # what it reads in 0.15 s is not in it
    # In the first step nothing leaves before all workers have said who updates.
    assert all(one.overlap is not None for one in iterations(timeline, slow) if one.whole)


@pytest.mark.parametrize(
    ("model", "optimizer", "workers", "servers"),
    [
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in [
                ("channels_last", "SGD", 2, 2),
                ("convolutions", "SGD", 4, 3),
                ("convolutions", "AdamW", 3, 1),
                ("channels_last", "AdamW", 3, 2),
                ("channels_last", "Adagrad", 1, 3),
                ("transformer", "SGD", 2, 1),
                ("transformer", "AdamW", 4, 2),
                ("transformer", "Adagrad", 3, 3),
                ("recurrent", "SGD", 3, 3),
                ("recurrent", "AdamW", 1, 1),
                ("recurrent", "Adagrad", 4, 1),
            ]
        ),
    ],
)
def test_weights_are_those_of_distributed_data_parallel_and_of_one_process(
    tmp_path: Path, model: str, optimizer: str, workers: int, servers: int
) -> None:
    result = job(
        "torch_proof.py", model, optimizer, tmp_path, workers=workers, servers=servers,
        P3KV_SLICE_SIZE=300,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"{model} is right with {optimizer}") == workers, result.output


@pytest.mark.long
@pytest.mark.parametrize("model", ["transformer", "channels_last", "recurrent"])
def test_slices_and_servers_change_no_bit(tmp_path: Path, model: str) -> None:
    files = []
    for servers, slice_size in [(1, 100_000), (3, 200)]:
        folder = tmp_path / f"{servers}"
        folder.mkdir()
        result = job(
            "torch_proof.py", model, "AdamW", folder, workers=3, servers=servers,
            P3KV_SLICE_SIZE=slice_size, P3KV_DETERMINISTIC=1,
        )  # fmt: skip
        assert result.code == 0, result.output
        files.append(folder / "weights.pt")
    compared = weights(*files)
    assert compared.code == 0, compared.output


@pytest.mark.long  # habits thaw weights, and codecs round others
@pytest.mark.parametrize("rule", ["bulk_synchronous", "delayed:staleness=1"])
def test_a_weight_that_was_frozen_trains_on_whatever_codecs_do(tmp_path: Path, rule: str) -> None:
    result = job(
        "torch_thawed.py", P3KV_VALUE_CODEC="float16", P3KV_CONSISTENCY=rule,
        P3KV_CHECKPOINT_EVERY=4, P3KV_CHECKPOINT_DIR=tmp_path / "checkpoints",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("trains on") == 2, result.output


@pytest.mark.long  # those that go on from a checkpoint are right, too
@pytest.mark.parametrize("how", ["broadcast", "average", "own"])
def test_buffers_are_those_that_the_script_chooses_whatever_codecs_do(
    tmp_path: Path, how: str
) -> None:
    result = job(
        "torch_buffers.py", how, tmp_path / "w.pt", workers=3, P3KV_GRADIENT_CODEC="2bit",
        P3KV_VALUE_CODEC="topk:share=0.5",
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count(f"buffers are right: {how}") == 3, result.output


@pytest.mark.parametrize(
    "how", ["broadcast", *(pytest.param(one, marks=pytest.mark.long) for one in ("average", "own"))]
)
def test_buffers_and_frozen_weights_go_on_from_a_checkpoint_bit_for_bit(
    tmp_path: Path, how: str
) -> None:
    undisturbed, goes_on = tmp_path / "undisturbed.pt", tmp_path / "goes on.pt"
    assert job("torch_buffers.py", how, undisturbed).code == 0
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path / "checkpoints", "P3KV_CHECKPOINT_EVERY": 4}
    killed = job("torch_buffers.py", how, goes_on, 9, **settings)
    assert killed.code != 0 and "killed by SIGKILL" in killed.output, killed.output
    result = job("torch_buffers.py", how, goes_on, 9, servers=3, P3KV_RESUME=1, **settings)
    assert result.code == 0, result.output
    assert result.output.count("begins after 8 steps") == 2, result.output
    compared = weights(undisturbed, goes_on)
    assert compared.code == 0, compared.output


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_models_blocks_and_functions_are_compiled_once_and_wait(backend: str) -> None:
    """Compiled before and after the optimizer is made. What breaks a graph, or compiles it again,
    is an error in the script."""
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    result = job("torch_compiled.py", backend, servers=1)
    assert result.code == 0, result.output
    assert result.output.count("compiled models are right") == 2, result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("package", "script", "name"),
    [
        ("accelerate", "torch_accelerate.py", "accelerate"),
        ("transformers", "torch_trainer.py", "the Trainer"),
        ("lightning", "torch_lightning.py", "lightning"),
    ],
)
def test_frameworks_around_the_loop_train_with_it(package: str, script: str, name: str) -> None:
    if run([str(PYTHON), "-c", f"import {package}"], environment(), 120).code != 0:
        pytest.skip(f"{package} is not installed beside torch: pip install {package}")
    result = job(script, HF_HUB_OFFLINE=1)
    assert result.code == 0, result.output
    assert result.output.count(f"right with {name}") == 2, result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "arguments"),
    [("torch_proof.py", ["recurrent", "AdamW"]), ("torch_buffers.py", ["average"])],
)
def test_workers_of_a_host_sum_in_memory_that_they_share(
    tmp_path: Path, script: str, arguments: List[str]
) -> None:
    """Servers are on another host; two workers on each of two."""
    result = job(
        "on_hosts.py", 2, script, *arguments, tmp_path if "proof" in script else tmp_path / "w.pt",
        workers=4, DMLC_NODE_HOST="127.0.0.9", P3KV_SLICE_SIZE=300,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert result.output.count("right") == 4, result.output
