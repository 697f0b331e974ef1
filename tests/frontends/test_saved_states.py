"""Optimizer states saved and loaded: a training goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import mxnet as mx
import pytest

from p3kv.frontends.mxnet.optimizers.saved_states import Loaded, digest, replacing
from tests.frontends.test_store import OWN_OPTIMIZERS
from tests.jobs import run_job


def test_training_goes_on_bit_for_bit_with_other_servers_and_slices(tmp_path: Path) -> None:
    for what, servers, slice_size in (("saves", 2, 100), ("loads", 1, 37)):
        result = run_job(
            "resumed.py", [tmp_path, what], workers=2, servers=servers, P3KV_SLICE_SIZE=slice_size,
            P3KV_DETERMINISTIC=1, **OWN_OPTIMIZERS,
        )  # fmt: skip
        assert result.code == 0, result.output
        for rank in range(2):
            assert "all is as without" in result.said_by(f"worker {rank}"), result.output


def test_an_optimizer_counts_on_from_what_it_has_trained_before(tmp_path: Path) -> None:
    result = run_job("used_optimizers.py", [tmp_path], workers=2, servers=2)
    assert result.code == 0, result.output
    assert result.output.count("has counted on") == 2, result.output


def test_a_file_takes_the_place_of_the_old_one_when_all_is_written(tmp_path: Path) -> None:
    path, link = tmp_path / "states", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    for name in (path, link):
        with pytest.raises(ZeroDivisionError), replacing(str(name), 0) as file:
            file.write(b"half")
            raise ZeroDivisionError
        assert path.read_bytes() == b"old"
    with replacing(str(link), 0) as file, replacing(str(path), 1) as other:
        file.write(b"new")
        other.write(b"newer")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert sorted(tmp_path.iterdir()) == [link, path] and link.is_symlink()


def test_a_device_is_written_and_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"), replacing("/dev/full", 0) as file:
        file.write(b"states")
    assert Path("/dev/full").is_char_device()


def test_workers_that_would_go_on_from_different_counts_differ() -> None:
    loaded = Loaded({}, None, None, 0)
    digests = {
        digest(loaded, {0: 1, "a": 2}),
        digest(loaded, {0: 1, "a": 3}),
        digest(loaded._replace(steps=1), {0: 1, "a": 2}),
        digest(loaded._replace(optimizer=mx.optimizer.SGD()), {0: 1, "a": 2}),
    }
    assert len(digests) == 4
    assert digest(loaded, {0: 1, "a": 2}) == digest(loaded, {"a": 2, 0: 1})
