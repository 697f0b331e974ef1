"""Files of checkpoints: read as they were written, or refused by name."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import List, Optional

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.checkpoints import (
    Abandoned,
    CutOfKey,
    KeyOutline,
    Outline,
    Part,
    newest,
    remove_unneeded,
    write,
)
from p3kv.errors import CheckpointError
from p3kv.wire.messages import ResumedStore
from tests.faults import small_disk

HERE, THERE = "10.0.0.1", "10.0.0.2"
SHAPE = (5, 4)
RUNS = [(0, 12), (1, 8)]


def array(seed: int, length: int, dtype: str = "float32") -> np.ndarray:
    return np.random.RandomState(seed).standard_normal(length).astype(dtype)


def cut(server: int, step: int) -> List[CutOfKey]:
    """A key on two servers, and one whose whole tensor server 0 has."""
    length = dict(RUNS)[server]
    arrays = [("0", "float32", [length]), ("1", "float16", [length])]
    numbers = {"updates": step, "structure": ["0", "1"]}
    spread = KeyOutline(
        0, "w", "weight", SHAPE, "float32", "dense", RUNS, False, numbers, arrays
    )  # fmt: skip
    value, momentum = array(step + server, length), array(step + 10 + server, length)
    parts = [momentum[:3], momentum[3:]]
    cuts = [
        CutOfKey(
            spread, [value[:5], value[5:]], [parts, [part.astype("float16") for part in parts]]
        )
    ]
    if server == 0:
        outline = KeyOutline(
            1, 7, None, (2, 3), "float64", "dense", [(0, 6)], True, {"kept": None},
            [("a", "float64", [3, 1])],
        )  # fmt: skip
        cuts.append(
            CutOfKey(outline, [array(step, 6, "float64")], [[array(2, 3, "float64").reshape(3, 1)]])
        )
    return cuts


def save(
    folder: Path, step: int, *servers: int, identity: str = "one", second: str = THERE
) -> None:
    """Writes the parts of some of two servers."""
    for server in servers:
        stores = [ResumedStore(0, step, {"steps": step}), ResumedStore(1, step, {})]
        keys = cut(server, step)
        outline = Outline(
            1, identity, step, server, [HERE, second], stores, [key.outline for key in keys]
        )
        write(str(folder), outline, keys, lambda: True)


def found(folder: Path) -> Optional[int]:
    """The step of the checkpoint that is used, when all in it is as it was written."""
    saved = newest(str(folder), HERE)
    if saved is None:
        return None
    step = saved.step
    assert [store.steps for store in saved.stores] == [step, step]
    key = saved.key(0, "w")
    np.testing.assert_array_equal(key.value, np.concatenate([array(step, 12), array(step + 1, 8)]))
    for state, server in zip(key.states, (0, 1)):
        momentum = array(step + 10 + server, dict(RUNS)[server])
        np.testing.assert_array_equal(state.elements["0"], momentum)
        np.testing.assert_array_equal(state.elements["1"], momentum.astype("float16"))
        assert state.numbers["updates"] == step
    whole = saved.key(1, 7)
    np.testing.assert_array_equal(whole.value, array(step, 6, "float64"))
    assert whole.states[0].elements["a"].shape == (3, 1)
    assert saved.outline(0, "v") is None
    return step


def path_of(folder: Path, step: int, server: int) -> Path:
    return folder / Part(step, server, 2).name


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 4 and 8."""
    for step in (4, 8):
        save(tmp_path, step, 0, 1)
    return tmp_path


def test_the_newest_complete_checkpoint_is_read_as_it_was_written(two: Path) -> None:
    assert found(two) == 8
    numbers = np.load(path_of(two, 8, 1))
    np.testing.assert_array_equal(numbers["0/value"], array(9, 8))


def test_without_files_there_is_none_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert found(folder) is None
        assert f"there is no checkpoint in {folder}" in caplog.text


@settings(max_examples=400, deadline=None)
@given(place=st.floats(0, 1, exclude_max=True), bits=st.integers(1, 255), cut=st.booleans())
def test_a_damaged_file_is_refused_by_name_and_the_one_before_is_used(
    tmp_path_factory: pytest.TempPathFactory, place: float, bits: int, cut: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged"
    if not folder.exists():
        folder.mkdir()
        for step in (4, 8):
            save(folder, step, 0, 1)
    path = path_of(folder, 8, 0)
    whole = path.read_bytes()
    at = int(place * len(whole))
    damaged = whole[:at] if cut else whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :]
    said: List[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("p3kv.checkpoints.reading")
    logger.addHandler(handler)
    path.write_bytes(damaged)
    try:
        # Some bytes mean nothing, such as dates.
        step = found(folder)
        assert step == 8 or (step == 4 and f"{path} is damaged" in said[0])
        assert not cut or step == 4
    finally:
        path.write_bytes(whole)
        logger.removeHandler(handler)


def test_every_byte_of_numbers_counts(two: Path) -> None:
    path = path_of(two, 8, 1)
    whole = path.read_bytes()
    at = whole.index(array(9, 8).tobytes())
    for byte in range(at, at + 32):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 1]) + whole[byte + 1 :])
        assert found(two) == 4


def test_where_all_are_damaged_nothing_is_trained(two: Path) -> None:
    for step in (4, 8):
        os.truncate(path_of(two, step, 1), 1000)
    with pytest.raises(CheckpointError) as refused:
        found(two)
    assert f"{path_of(two, 8, 1)} is damaged" in str(refused.value)


def test_a_file_under_another_s_name_is_refused(two: Path) -> None:
    shutil.copy(path_of(two, 4, 1), path_of(two, 8, 1))
    assert found(two) == 4


def test_a_part_that_is_missing_is_named_with_its_host(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path_of(two, 8, 1).unlink()
    assert found(two) == 4
    assert f"{path_of(two, 8, 1).name}, the part of server 1" in caplog.text
    path_of(two, 4, 1).unlink()
    with pytest.raises(CheckpointError, match=rf"host {THERE}.*all hosts share"):
        found(two)


def test_a_first_checkpoint_that_was_never_complete_is_none(tmp_path: Path) -> None:
    """A job on one host that died while it was being written begins anew."""
    save(tmp_path, 4, 0, second=HERE)
    assert found(tmp_path) is None


def test_parts_of_two_runs_are_no_checkpoint(two: Path) -> None:
    save(two, 12, 0, identity="one")
    save(two, 12, 1, identity="two")
    assert found(two) == 8
    save(two, 12, 0, identity="two")
    assert found(two) == 12


@pytest.mark.parametrize("pieces", [0, 1, 4])
def test_a_file_whose_writing_was_interrupted_leaves_nothing(two: Path, pieces: int) -> None:
    left = iter([True] * pieces + [False])
    keys = cut(0, 12)
    outline = Outline(1, "one", 12, 0, [HERE], [], [key.outline for key in keys])
    with pytest.raises(Abandoned):
        write(str(two), outline, keys, lambda: next(left))
    assert len(list(two.iterdir())) == 4
    (two / (Part(12, 0, 1).name + ".unfinished")).write_bytes(b"killed here")
    assert found(two) == 8


def test_what_is_no_longer_needed_is_removed_and_nothing_else(two: Path) -> None:
    save(two, 12, 0, 1)
    (two / (Part(2, 1, 2).name + ".unfinished")).touch()
    (two / "notes").touch()
    (two / Part(3, 3, 5).name).touch()
    remove_unneeded(str(two), 1, 2, 8)
    expected = [Part(4, 0, 2), *(Part(step, server, 2) for step in (8, 12) for server in (0, 1))]
    assert sorted(os.listdir(two)) == ["notes", *(part.name for part in expected)]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    folder, size_bytes = tmp_path / "small", 1 << 16
    with small_disk(folder, size_bytes):
        save(folder, 4, 0, 1)
        keys = [key._replace(value=[np.zeros(size_bytes // 4, "float32")]) for key in cut(1, 8)]
        outline = Outline(1, "one", 8, 1, [HERE, THERE], [], [key.outline for key in keys])
        with pytest.raises(OSError, match="No space left"):
            write(str(folder), outline, keys, lambda: True)
        assert len(list(folder.iterdir())) == 2
        assert found(folder) == 4
