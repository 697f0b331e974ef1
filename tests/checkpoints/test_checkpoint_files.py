"""Files of checkpoints: read as they were written, or refused by name."""

from __future__ import annotations

import logging
import os
import re
import resource
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import List, Optional

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from p3kv.checkpoints import (
    WORKER,
    Abandoned,
    Contents,
    CutOfKey,
    KeyOutline,
    MemoryOutline,
    Outline,
    Part,
    WorkersPart,
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
    arrays = [("0", "float32", [length]), ("1", "bfloat16", [length])]
    numbers = {"updates": step, "structure": ["0", "1"]}
    spread = KeyOutline(
        0, "w", "weight", SHAPE, "float32", "dense", RUNS, False, numbers, arrays
    )  # fmt: skip
    value, momentum = array(step + server, length), array(step + 10 + server, length)
    parts = [momentum[:3], momentum[3:]]
    cuts = [
        CutOfKey(
            spread, [value[:5], value[5:]], [parts, [part.astype("bfloat16") for part in parts]]
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
        write(str(folder), outline, Contents(keys), lambda: True)


def save_with_worker(folder: Path, step: int, *parts: Part) -> None:
    """Writes some files of a checkpoint that has one of worker 0, too: of the spread key, which
    servers have trained before, and of a key that they do not have."""
    stores = [ResumedStore(0, step, {})]
    for part in parts:
        keys = cut(part.rank, step)[:1]
        if part.role == WORKER:
            keys = [
                CutOfKey(
                    KeyOutline(0, key, key, shape, "float32", "dense", runs, False, None, []),
                    [array(seed, runs[0][1])],
                    [],
                )
                for key, shape, runs, seed in (
                    ("w", SHAPE, [(0, 20)], 1),
                    ("mean", (), [(0, 1)], 2),
                )
            ]
        outlines = [key.outline for key in keys]
        outline = Outline(
            1, "with worker", step, part.rank, [HERE, HERE], stores, outlines, THERE, part.role
        )
        assert outline.part == part
        write(str(folder), outline, Contents(keys), lambda: True)


def with_worker(step: int) -> List[Part]:
    return [Part(step, 0, 2), Part(step, 1, 2), Part(step, 0, 1, WORKER)]


def save_with_memories(folder: Path, step: int, *ranks: int, identity: str = "one") -> None:
    """Writes the parts of a server and of some of two workers, whose codecs remember."""
    stores = [ResumedStore(0, step, {})]
    outline = Outline(1, identity, step, 0, [HERE], stores, [], HERE, others_hosts=[THERE])
    write(str(folder), outline, Contents([]), lambda: True)
    for rank in ranks:
        arrays = [array(step + rank, 20), array(rank, 20, "float64")]
        memory = MemoryOutline(
            0, "w", "own", 20, [("residual", "float32"), ("velocity", "float64")]
        )
        of_worker = replace(outline, role=WORKER, server=rank, memories=[memory])
        assert of_worker.part == Part(step, rank, 2, WORKER)
        write(str(folder), of_worker, Contents([], [arrays]), lambda: True)


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
        np.testing.assert_array_equal(state.elements["1"], momentum.astype("bfloat16"))
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


def write_again(path: Path, member: str, data: bytes) -> None:
    """Writes a file with other bytes in a member, and with the checksum of these bytes."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert member in members
    with zipfile.ZipFile(path, "w") as archive:
        for name, whole in {**members, member: data}.items():
            archive.writestr(name, whole)


@pytest.mark.parametrize("change_bytes", [-4, 4])
def test_an_array_with_less_data_than_its_header_says_or_more_is_damaged(
    two: Path, change_bytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = path_of(two, 8, 1)
    with zipfile.ZipFile(path) as archive:
        whole = archive.read("0/value.npy")
    write_again(path, "0/value.npy", (whole + bytes(4))[: len(whole) + change_bytes])
    assert found(two) == 4
    assert (
        f"{path} is damaged (ValueError: 0/value.npy has {32 + change_bytes} bytes of data"
        in caplog.text
    )


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


def test_worker_0_s_value_counts_and_the_servers_states(tmp_path: Path) -> None:
    save_with_worker(tmp_path, 4, *with_worker(4))
    saved = newest(str(tmp_path), HERE)
    assert saved is not None and saved.keys(0) == ["w", "mean"]
    of_key = saved.key(0, "w")
    np.testing.assert_array_equal(of_key.value, array(1, 20))
    np.testing.assert_array_equal(of_key.states[1].elements["0"], array(15, 8))
    assert of_key.outline.name == "weight"
    of_key = saved.key(0, "mean")
    np.testing.assert_array_equal(of_key.value, array(2, 1))
    assert of_key.states == [] and of_key.outline.shape == ()


@pytest.mark.parametrize("missing", range(3))
def test_a_checkpoint_with_a_file_of_worker_0_is_complete_with_all_files_only(
    two: Path, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    parts = with_worker(12)
    part = parts.pop(missing)
    save_with_worker(two, 12, *parts)
    assert found(two) == 8
    host = THERE if part.role == WORKER else HERE
    said = f"{part.name}, the part of {part.role} {part.rank}, which was to write it on host {host}"
    assert said in caplog.text
    save_with_worker(two, 12, part)
    saved = newest(str(two), HERE)
    assert saved is not None and saved.step == 12


def test_each_worker_reads_what_its_own_codecs_remembered(tmp_path: Path) -> None:
    save_with_memories(tmp_path, 4, 0, 1)
    saved = newest(str(tmp_path), HERE)
    assert saved is not None and (saved.num_workers, saved.keys(0)) == (2, [])
    assert saved.codec_with_memory(0, "w") == "own" and saved.codec_with_memory(1, "w") is None
    for rank in (0, 1):
        memories = WorkersPart(str(tmp_path), Part(4, rank, 2, WORKER), saved.identity)
        assert memories.memory(0, "v") is None
        memory = memories.memory(0, "w")
        assert memory is not None and memory.codec == "own"
        np.testing.assert_array_equal(memory.arrays["residual"], array(4 + rank, 20))
        np.testing.assert_array_equal(memory.arrays["velocity"], array(rank, 20, "float64"))
        assert memory.arrays["velocity"].dtype == np.float64


def test_a_worker_s_part_that_is_missing_damaged_or_of_another_checkpoint_is_not_used(
    two: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_with_memories(two, 12, 0)
    assert found(two) == 8
    name = Part(12, 1, 2, WORKER).name
    said = f"{name}, the part of worker 1, which was to write it on host {THERE}, is not in"
    assert said in caplog.text
    save_with_memories(two, 12, 1, identity="another run")
    assert found(two) == 8
    save_with_memories(two, 12, 0, 1)
    saved = newest(str(two), HERE)
    assert saved is not None and saved.step == 12
    whole = (two / name).read_bytes()
    at = whole.index(array(13, 20).tobytes())
    (two / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert found(two) == 8
    assert f"{two / name} is damaged" in caplog.text
    with pytest.raises(CheckpointError, match=f"{name} is damaged"):
        WorkersPart(str(two), Part(12, 1, 2, WORKER), saved.identity)
    save_with_memories(two, 12, 0, 1, identity="another run")
    with pytest.raises(CheckpointError, match=f"{name} belongs to another checkpoint"):
        WorkersPart(str(two), Part(12, 1, 2, WORKER), saved.identity)


def test_a_file_of_before_codecs_memories_were_saved_is_read(tmp_path: Path) -> None:
    save_with_worker(tmp_path, 4, *with_worker(4))
    for part in with_worker(4):
        with zipfile.ZipFile(tmp_path / part.name) as archive:
            outline = msgspec.msgpack.decode(archive.read("outline.msgpack"))
        del outline["memories"], outline["others_hosts"]
        write_again(tmp_path / part.name, "outline.msgpack", msgspec.msgpack.encode(outline))
    saved = newest(str(tmp_path), HERE)
    assert saved is not None and (saved.step, saved.num_workers) == (4, 1)
    assert saved.codec_with_memory(0, "w") is None
    np.testing.assert_array_equal(saved.key(0, "w").value, array(1, 20))


def test_servers_remove_the_old_files_of_all_workers(tmp_path: Path) -> None:
    for step in (4, 8):
        save_with_memories(tmp_path, step, 0, 1)
    remove_unneeded(str(tmp_path), Part(8, 0, 1), 8)
    left = [Part(8, 0, 1), Part(8, 0, 2, WORKER), Part(8, 1, 2, WORKER)]
    assert sorted(os.listdir(tmp_path)) == [part.name for part in left]


def test_server_0_removes_worker_0_s_old_files(tmp_path: Path) -> None:
    for step in (4, 8):
        save_with_worker(tmp_path, step, *with_worker(step))
    for server in (1, 0):
        remove_unneeded(str(tmp_path), Part(8, server, 2), 8)
        left = [part.name for part in with_worker(8)]
        left += [part.name for part in with_worker(4) if part.rank == 0 and server == 1]
        assert sorted(os.listdir(tmp_path)) == sorted(left)


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
        write(str(two), outline, Contents(keys), lambda: next(left))
    assert len(list(two.iterdir())) == 4
    (two / (Part(12, 0, 1).name + ".unfinished")).write_bytes(b"killed here")
    assert found(two) == 8


def test_what_is_no_longer_needed_is_removed_and_nothing_else(two: Path) -> None:
    save(two, 12, 0, 1)
    (two / (Part(2, 1, 2).name + ".unfinished")).touch()
    (two / "notes").touch()
    (two / Part(3, 3, 5).name).touch()
    remove_unneeded(str(two), Part(12, 1, 2), 8)
    expected = [Part(4, 0, 2), *(Part(step, server, 2) for step in (8, 12) for server in (0, 1))]
    assert sorted(os.listdir(two)) == ["notes", *(part.name for part in expected)]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    folder, size_bytes = tmp_path / "small", 1 << 16
    with small_disk(folder, size_bytes):
        save(folder, 4, 0, 1)
        keys = [key._replace(value=[np.zeros(size_bytes // 4, "float32")]) for key in cut(1, 8)]
        outline = Outline(1, "one", 8, 1, [HERE, THERE], [], [key.outline for key in keys])
        with pytest.raises(OSError, match="No space left"):
            write(str(folder), outline, Contents(keys), lambda: True)
        assert len(list(folder.iterdir())) == 2
        assert found(folder) == 4


FIND = """
import logging, sys
from p3kv.checkpoints import newest
logging.basicConfig()
print(newest(sys.argv[1], sys.argv[2]).step)
"""
MOST_BYTES = 1 << 30


def find_in_a_process(folder: Path) -> subprocess.CompletedProcess[str]:
    """Looks for the newest checkpoint in a process that is ended if it hangs, and whose memory is
    bounded."""
    return subprocess.run(
        [sys.executable, "-c", FIND, str(folder), HERE],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        timeout=20,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES)),
    )


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket"])
def test_what_is_no_file_is_not_waited_for(two: Path, kind: str) -> None:
    path = path_of(two, 8, 0)
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, 0o600 | stat.S_IFSOCK)
    done = find_in_a_process(two)
    assert done.stdout == "4\n", done.stderr
    assert f"{path} is not used: it is no file, but a {kind}" in done.stderr


@pytest.mark.parametrize("target", ["/dev/zero", "the file itself", "nothing"])
def test_a_link_is_not_followed(two: Path, target: str) -> None:
    path = path_of(two, 8, 0)
    if target == "the file itself":
        path.rename(two / target)
    else:
        path.unlink()
    path.symlink_to(target)
    done = find_in_a_process(two)
    assert done.stdout == "4\n", done.stderr
    assert f"{path} is not used: it is no file, but a link" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_used(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = path_of(two, 8, 0)
    os.chown(path, 12345, -1)
    assert found(two) == 4
    assert f"{path} is not used: it belongs to user 12345 and not to 0" in caplog.text


def test_a_huge_file_takes_little_memory(two: Path) -> None:
    """Most of it is a hole; at its end is a directory of members that says how large it is."""
    path = path_of(two, 8, 0)
    size_bytes = 2 * MOST_BYTES
    with path.open("wb") as file:
        file.seek(size_bytes)
        fields = (zipfile.stringEndArchive, 0, 0, 1, 1, size_bytes, 0, 0)
        file.write(struct.pack(zipfile.structEndArchive, *fields))
    done = find_in_a_process(two)
    assert done.stdout == "4\n", done.stderr
    assert re.search(f"{path} is damaged .*at most are right", done.stderr), done.stderr


def test_a_file_that_is_replaced_after_its_check_is_not_read(two: Path) -> None:
    saved = newest(str(two), HERE)
    assert saved is not None
    for server in (0, 1):
        os.replace(path_of(two, 4, server), path_of(two, 8, server))
    key = saved.key(0, "w")
    np.testing.assert_array_equal(key.value, np.concatenate([array(8, 12), array(9, 8)]))


def test_a_file_that_is_changed_after_its_check_is_refused(tmp_path: Path) -> None:
    length = 1 << 20
    value = array(1, length)
    key = KeyOutline(
        0, "w", None, (length,), "float32", "dense", [(0, length)], False, None, []
    )  # fmt: skip
    outline = Outline(1, "one", 4, 0, [HERE], [], [key])
    write(str(tmp_path), outline, Contents([CutOfKey(key, [value], [])]), lambda: True)
    saved = newest(str(tmp_path), HERE)
    assert saved is not None
    np.testing.assert_array_equal(saved.key(0, "w").value, value)
    path = tmp_path / outline.part.name
    at = path.read_bytes().index(value.tobytes())
    with path.open("r+b") as file:
        file.seek(at + value.nbytes // 2)
        file.write(bytes(4))
    with pytest.raises(CheckpointError, match=f"{path} can't be read: .*Bad CRC-32"):
        saved.key(0, "w")


def test_what_a_link_at_the_temporary_name_points_to_stays_as_it_is(two: Path) -> None:
    target = two / "notes"
    target.write_text("kept")
    (two / (Part(12, 0, 2).name + ".unfinished")).symlink_to(target)
    save(two, 12, 0, 1)
    assert target.read_text() == "kept"
    assert not path_of(two, 12, 0).is_symlink()
    assert found(two) == 12


def test_a_folder_with_an_old_file_s_name_keeps_no_other_from_being_removed(two: Path) -> None:
    for step in (1, 2, 3, 5, 6):
        path_of(two, step, 1).mkdir()
    remove_unneeded(str(two), Part(12, 1, 2), 8)
    assert not path_of(two, 4, 1).exists()
