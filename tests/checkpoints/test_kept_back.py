"""Jobs whose codecs keep something back go on from a checkpoint bit for bit, with what that was."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Dict, Mapping

import numpy as np
import pytest

from p3kv.checkpoints import WORKER, Part
from tests.jobs import SCRIPTS, JobResult, environment, run, run_job

SETTINGS: Dict[str, Any] = {
    "P3KV_CHECKPOINT_EVERY": 4,
    "P3KV_DETERMINISTIC": 1,
    "P3KV_SLICE_SIZE": 200,
}
TWO_BITS = {"type": "2bit", "threshold": 2.0}


def train(
    folder: Path,
    *victim: str,
    workers: int = 2,
    servers: int = 2,
    codec: Mapping[str, Any] = TWO_BITS,
    every: int = 3,
    **more: Any,
) -> JobResult:
    """Runs `kept_back.py` with checkpoints in `folder`; the weights go to `end.npz` there."""
    settings = {**SETTINGS, "P3KV_CHECKPOINT_DIR": folder / "checkpoints", **more}
    command = [
        sys.executable, "-m", "p3kv", "launch", "-n", str(workers), "-s", str(servers), "--",
        sys.executable, str(SCRIPTS / "kept_back.py"), str(folder / "end.npz"), json.dumps(codec),
        str(every), *victim,
    ]  # fmt: skip
    return run(command, environment(**settings), 120)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Dict[str, np.ndarray]:
    """The weights of a run that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = train(folder)
    assert result.code == 0, result.output
    return dict(np.load(folder / "end.npz"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what a job has left of which all processes were killed."""
    folder = tmp_path_factory.mktemp("killed")
    assert train(folder, "all").code != 0
    return folder


@pytest.fixture
def left(killed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    shutil.copytree(killed / "checkpoints", tmp_path / "checkpoints")
    return tmp_path


def goes_on(folder: Path, undisturbed: Dict[str, np.ndarray], step: int, **more: Any) -> JobResult:
    """Goes on from the checkpoint of a step, and ends with the weights of the undisturbed run."""
    result = train(folder, P3KV_RESUME=1, **more)
    assert result.code == 0, result.output
    assert result.output.count(f"begins after {step} steps") == 2, result.output
    found = dict(np.load(folder / "end.npz"))
    assert found.keys() == undisturbed.keys() and len(found) == 4
    for name, value in undisturbed.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    assert "begin with nothing" not in result.output
    return result


@pytest.mark.parametrize(
    ("servers", "slice_size"),
    [
        (3, 150),
        *(pytest.param(*one, marks=pytest.mark.long) for one in [(2, 200), (1, 2000)]),
    ],
)
def test_a_job_goes_on_bit_for_bit_on_other_servers_and_with_other_slices(
    left: Path, undisturbed: Dict[str, np.ndarray], servers: int, slice_size: int
) -> None:
    goes_on(left, undisturbed, 8, servers=servers, P3KV_SLICE_SIZE=slice_size)


@pytest.mark.parametrize("damage", ["missing", pytest.param("a byte", marks=pytest.mark.long)])
def test_without_a_worker_s_part_the_checkpoint_before_is_used(
    left: Path, undisturbed: Dict[str, np.ndarray], damage: str
) -> None:
    path = left / "checkpoints" / Part(8, 1, 2, WORKER).name
    data = path.read_bytes()
    middle = len(data) // 2
    if damage == "missing":
        path.unlink()
        said = f"{path.name}, the part of worker 1, which was to write it on host 127.0.0.1"
    else:
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :])
        said = f"{path} is damaged"
    result = goes_on(left, undisturbed, 4)
    assert said in result.said_by("worker 0"), result.output


def test_where_each_checkpoint_lacks_a_worker_s_part_the_job_ends_and_says_so(left: Path) -> None:
    for path in (left / "checkpoints").glob("*.worker-1-of-2.npz"):
        path.unlink()
    result = train(left, P3KV_RESUME=1)
    assert result.code != 0 and "begins after" not in result.output, result.output
    assert "no checkpoint in" in result.output and "the part of worker 1" in result.output


def test_with_another_number_of_workers_what_was_kept_back_is_lost_and_said_so_once(
    left: Path,
) -> None:
    result = train(left, workers=3, P3KV_RESUME=1)
    assert result.code == 0, result.output
    assert result.output.count("begins after 8 steps") == 3, result.output
    told = (
        "the checkpoint of step 8 is of 2 workers, and this job has 3. So codecs begin with nothing"
    )
    assert result.output.count(told) == 1 and told in result.said_by("worker 0"), result.output
    # Those of two workers at step 8 are what there is until the first one of three.
    names = [path.name for path in (left / "checkpoints").glob("*.npz")]
    assert {re.sub(r"\D*-\d+-of-", " ", name[5:-4]) for name in names} == {
        "0000000008 2", "0000000012 2", "0000000012 3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("codec", "values"),
    [
        pytest.param(
            {"type": "dgc", "share": 0.05, "clip": 20.0, "warmup_steps": 10},
            "float16",
            marks=pytest.mark.long,
        ),
        ({"type": "topk", "share": 0.05}, "topk:share=0.1"),
    ],
)
def test_codecs_of_some_elements_go_on_bit_for_bit_in_both_directions(
    tmp_path: Path, codec: Mapping[str, Any], values: str
) -> None:
    """The values of all that is trained in the step before a checkpoint travel as they are."""
    more = {"codec": codec, "every": 1, "P3KV_VALUE_CODEC": values}
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    for folder in (killed, undisturbed):
        folder.mkdir()
    assert train(undisturbed, **more).code == 0
    assert train(killed, "all", **more).code != 0
    goes_on(killed, dict(np.load(undisturbed / "end.npz")), 8, **more)


@pytest.mark.parametrize("rule", ["bulk_synchronous", "asynchronous"])
def test_a_worker_leaves_though_worker_0_leaves_out_what_it_has_copied(
    tmp_path: Path, rule: str
) -> None:
    result = run_job(
        "leaves_copies.py", workers=2, P3KV_LET_WORKERS_LEAVE=1, P3KV_STALL_TIMEOUT_S=20,
        P3KV_CHECKPOINT_EVERY=1, P3KV_CHECKPOINT_DIR=tmp_path / "checkpoints",
        P3KV_CONSISTENCY=rule,
    )  # fmt: skip
    assert result.code == 0, result.output
    assert "there is no checkpoint of step 2: the one before is still" in result.output
