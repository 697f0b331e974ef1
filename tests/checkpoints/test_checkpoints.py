"""Jobs that die and go on from a checkpoint: bit for bit as if nothing had happened."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest

from p3kv.checkpoints import newest
from tests.faults import small_disk
from tests.jobs import SCRIPTS, JobResult, environment, run, run_job

SETTINGS: Dict[str, Any] = {
    "P3KV_CHECKPOINT_EVERY": 4,
    "P3KV_DETERMINISTIC": 1,  # the norm by which one store clips does not depend on slices then
    "P3KV_SLICE_SIZE": 200,
    "P3KV_OPTIMIZERS": "own_mxnet_optimizers",
}


def train(
    folder: Path, *victim: str, servers: int = 2, restarts: int = 0, **more: Any
) -> JobResult:
    """Runs `continued.py` with checkpoints in `folder`; the weights go to `end.npz` there."""
    settings = {**SETTINGS, "P3KV_CHECKPOINT_DIR": folder / "checkpoints", **more}
    command = [
        sys.executable, "-m", "p3kv", "launch", "-n", "2", "-s", str(servers),
        "--restarts", str(restarts), "--",
        sys.executable, str(SCRIPTS / "continued.py"), str(folder / "end.npz"), *victim,
    ]  # fmt: skip
    return run(command, environment(**settings), 120)


def goes_on(folder: Path, servers: int = 2, **more: Any) -> JobResult:
    return train(folder, servers=servers, P3KV_RESUME=1, **more)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, np.ndarray]:
    """The weights of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(folder)
    assert result.code == 0, result.output
    return weights(folder)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a job has left whose server was killed."""
    folder = tmp_path_factory.mktemp("killed")
    result = train(folder, "server 0")
    assert result.code != 0
    assert "server 0" in result.output.splitlines()[-1], result.output
    return folder


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(killed / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def weights(folder: Path) -> Dict[str, np.ndarray]:
    return dict(np.load(folder / "end.npz"))


def same(actual: Dict[str, np.ndarray], expected: Dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    assert len(actual) > 30
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize(
    "servers", [*(pytest.param(few, marks=pytest.mark.long) for few in (1, 2)), 3]
)
def test_after_a_server_s_death_the_job_goes_on_bit_for_bit_on_any_number_of_servers(
    left: Path, undisturbed: Dict[str, np.ndarray], servers: int
) -> None:
    # Slices of another size, too.
    result = goes_on(left, servers, P3KV_SLICE_SIZE=150 * servers)
    assert result.code == 0, result.output
    assert "the job goes on from the checkpoint of step" in result.said_by("worker 0")
    assert "begins after 0" not in result.output
    same(weights(left), undisturbed)


@pytest.mark.long
def test_after_the_death_of_all_the_job_goes_on_bit_for_bit(
    tmp_path: Path, undisturbed: Dict[str, np.ndarray]
) -> None:
    assert train(tmp_path, "all").code != 0
    result = goes_on(tmp_path)
    assert result.code == 0, result.output
    same(weights(tmp_path), undisturbed)


def test_a_job_whose_worker_dies_is_restarted_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, undisturbed: Dict[str, np.ndarray]
) -> None:
    result = train(tmp_path, "worker 1", restarts=1)
    assert result.code == 0, result.output
    assert re.search(r"p3kv launch: worker 1( \(round \d+\))? failed first", result.output)
    assert "starts the job again from its newest checkpoint (1 of 1)" in result.output
    same(weights(tmp_path), undisturbed)


def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(
    left: Path, undisturbed: Dict[str, np.ndarray]
) -> None:
    older, newer = sorted((left / "checkpoints").glob("*server-1-of-2.npz"))
    data = newer.read_bytes()
    middle = len(data) // 2
    newer.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
    result = goes_on(left)
    assert result.code == 0, result.output
    said = result.said_by("worker 0")
    assert f"{newer} is damaged" in said, said
    assert f"goes on from the checkpoint of step {int(older.name[5:15])}" in said, said
    same(weights(left), undisturbed)


def test_on_a_full_disk_the_job_goes_on_and_keeps_the_last_checkpoint(
    left: Path, tmp_path: Path, undisturbed: Dict[str, np.ndarray]
) -> None:
    parts = sorted((left / "checkpoints").glob("*.npz"))
    newest_parts = [part for part in parts if part.name[:15] == parts[-1].name[:15]]
    assert len(newest_parts) == 3  # worker 0's, too: some parameters are trained in some steps only
    folder = tmp_path / "small"
    size_bytes = sum(part.stat().st_size for part in newest_parts)
    with small_disk(folder, int(1.5 * size_bytes)):
        for part in newest_parts:
            shutil.copy(part, folder)
        result = goes_on(left, P3KV_CHECKPOINT_DIR=folder)
        kept = newest(str(folder), "127.0.0.1")
    assert result.code == 0, result.output
    said = re.findall(r"the checkpoint of step \d+ can't be written to (\S+): (.*)", result.output)
    assert said, result.output
    for path, reason in said:
        assert path.startswith(f"{folder}/step-")
        assert reason.startswith("No space left on device. The job goes on")
    assert kept is not None
    assert kept.stores[0].steps == 8
    same(weights(left), undisturbed)


def test_a_job_that_begins_does_not_mix_its_checkpoints_with_those_of_another(left: Path) -> None:
    result = train(left)
    assert result.code != 0
    assert "has checkpoints of an earlier run" in result.output.splitlines()[-1]


def test_what_can_not_go_on_or_have_checkpoints_is_refused_with_the_reason(left: Path) -> None:
    result = run_job(
        "checkpoint_misuse.py", P3KV_CHECKPOINT_DIR=left / "checkpoints", P3KV_RESUME=1, **SETTINGS
    )
    assert "all is refused" in result.output, result.output


@pytest.mark.long
def test_a_module_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    for resume, right in ((0, "right from step 0"), (1, "right from step 3")):
        result = run_job(
            "module_continued.py", workers=2, P3KV_CHECKPOINT_DIR=tmp_path,
            P3KV_CHECKPOINT_EVERY=3, P3KV_RESUME=resume, MXNET_UPDATE_ON_KVSTORE=1,
        )  # fmt: skip
        assert result.code == 0, result.output
        assert right in result.output
        for path in tmp_path.glob("step-*6.server-*"):  # that of the end
            path.unlink()


@pytest.mark.parametrize(
    ("who", "names"),
    [
        ("trainer", "'norm_beta', 'norm_running_mean', 'norm_running_var', 'own'"),
        pytest.param(
            "trainers",
            "'other_beta', 'other_running_mean', 'other_running_var'",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "module", "'norm_beta', 'norm_moving_mean', 'norm_moving_var'", marks=pytest.mark.long
        ),
    ],
)
def test_what_no_gradient_changes_goes_on_as_worker_0_had_it_and_is_named_at_each_start(
    who: str, names: str, tmp_path: Path
) -> None:
    for start in (0, 4):
        result = run_job(
            "never_pushed.py", [tmp_path, who], workers=2, servers=2,
            P3KV_CHECKPOINT_DIR=tmp_path / "checkpoints", P3KV_CHECKPOINT_EVERY=4,
            P3KV_RESUME=int(start > 0), P3KV_DETERMINISTIC=1,
        )  # fmt: skip
        assert result.code == 0, result.output
        assert f"worker 1 has trained from step {start} on" in result.output
        told = f"checkpoints have worker 0's values of {names} as long as no gradient changes them"
        assert result.output.count(told) == 1 and told in result.said_by("worker 0")


@pytest.mark.parametrize(
    ("frozen", "late"), [pytest.param("none", 0.4, marks=pytest.mark.long), ("resumed", 0.6)]
)
def test_a_weight_that_is_frozen_when_the_trainer_is_made_goes_on_as_it_was_trained(
    frozen: str, late: float, tmp_path: Path
) -> None:
    settings = {"P3KV_CHECKPOINT_DIR": tmp_path, "P3KV_CHECKPOINT_EVERY": 4}
    command = [
        sys.executable, "-m", "p3kv", "launch", "-n", "2", "-s", "2", "--restarts", "1", "--",
        sys.executable, str(SCRIPTS / "thawed.py"), "5", frozen,
    ]  # fmt: skip
    result = run(command, environment(**settings), 120)
    assert result.code == 0, result.output
    for worker in (0, 1):
        said = result.said_by(f"worker {worker}")
        assert f"worker {worker} went on from 4: late is {late:.4f}" in said, result.output
        assert f"worker {worker} went on from 4: always is 0.4000" in said, result.output
    assert "do not have" not in result.output


def test_what_feed_forward_keeps_to_itself_is_said_not_to_be_in_checkpoints(tmp_path: Path) -> None:
    result = run_job("feed_forward.py", workers=2, P3KV_CHECKPOINT_DIR=tmp_path)
    assert result.code == 0, result.output
    told = "checkpoints do not have the values of 'norm_moving_mean', 'norm_moving_var'"
    assert result.output.count(told) == 1 and told in result.said_by("worker 0")
