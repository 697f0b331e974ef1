"""Writes a process's part of a checkpoint, whole or not at all, while training goes on."""

from __future__ import annotations

import logging
import os
import threading
import zipfile
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import IO, Callable, Iterable, Optional, Sequence

import numpy as np
from numpy.lib import format as npy

from p3kv.checkpoints.files import make_anew, open_folder
from p3kv.checkpoints.outline import (
    OUTLINE,
    UNFINISHED,
    Contents,
    Outline,
    Part,
    array_member,
    memory_member,
    part_of,
    trained_member,
    value_member,
)
from p3kv.errors import in_one_line
from p3kv.wire.messages import UNKNOWN, encode

_PIECE_BYTES = 1 << 20
"""Written at once: the interpreter's lock is free meanwhile, and often held in between."""


class Abandoned(Exception):
    """Nobody waits for the file any more."""


def write(folder: str, outline: Outline, contents: Contents, wanted: Callable[[], bool]) -> None:
    """Write a file, and name it when all of it is on the disk; nothing is left of it on an error.

    Takes no lock for long. Raises OSError, and Abandoned soon after `wanted()` is false.
    """
    name = outline.part.name
    unfinished = name + UNFINISHED
    descriptor = open_folder(folder)
    try:
        with make_anew(descriptor, unfinished) as file:
            _write_archive(file, outline, contents, wanted)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, name, src_dir_fd=descriptor, dst_dir_fd=descriptor)
        os.fsync(descriptor)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=descriptor)
        raise _cause(error) from error
    finally:
        os.close(descriptor)


def remove_unneeded(folder: str, own: Part, keep_from: int) -> None:
    """Remove files of older steps than `keep_from`, servers' and workers', that are `own`'s share.

    An earlier run may have had more servers: its files are divided among those of now.
    """
    with suppress(OSError):
        for name in os.listdir(folder):
            part = part_of(name[: -len(UNFINISHED)] if name.endswith(UNFINISHED) else name)
            if part is not None and part.rank % own.ranks == own.rank and part.step < keep_from:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))


def _write_archive(
    file: IO[bytes], outline: Outline, contents: Contents, wanted: Callable[[], bool]
) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_member(OUTLINE), encode(outline))
        for index, key in enumerate(contents.keys):
            of_key = key.outline
            elems = sum(length for server, length in of_key.runs if server == outline.server)
            name = value_member(index)
            _write_array(archive, name, [elems], np.dtype(of_key.dtype), key.value, wanted)
            for place, (parts, (_, dtype, shape)) in enumerate(zip(key.arrays, of_key.arrays)):
                name = array_member(index, place)
                _write_array(archive, name, shape, np.dtype(dtype), parts, wanted)
        for member, of_keys in (
            (memory_member, contents.memories),
            (trained_member, contents.trained),
        ):
            for index, arrays in enumerate(of_keys):
                for place, array in enumerate(arrays):
                    name = member(index, place)
                    _write_array(archive, name, array.shape, array.dtype, [array], wanted)


def _write_array(
    archive: zipfile.ZipFile,
    name: str,
    shape: Sequence[int],
    dtype: np.dtype,
    parts: Iterable[np.ndarray],
    wanted: Callable[[], bool],
) -> None:
    """Writes consecutive parts as one array."""
    described = {
        "descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": tuple(shape)
    }  # fmt: skip
    with archive.open(_member(name), "w", force_zip64=True) as member:
        npy.write_array_header_1_0(member, described)
        for part in parts:
            memory = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            for start in range(0, len(memory), _PIECE_BYTES):
                if not wanted():
                    raise Abandoned
                member.write(memory[start : start + _PIECE_BYTES])


def _member(name: str) -> zipfile.ZipInfo:
    """With the same date always: equal checkpoints are equal files."""
    return zipfile.ZipInfo(name)


def _cause(error: BaseException) -> BaseException:
    """The error that came first: closing an archive that could not be written fails, too."""
    while not isinstance(error, (OSError, Abandoned)) and error.__context__ is not None:
        error = error.__context__
    return error


_log = logging.getLogger(__name__)

_CLOSE_S = 5.0
"""How long to wait at the end of the job for a file that is being written."""


class Writer:
    """Writes one file after the other. Belongs to the thread that calls `begin`."""

    def __init__(self, written: Callable[[int, str], None]) -> None:
        """`written(step, problem)` is called in the file's thread; an empty problem means
        success."""
        self._written = written
        self._thread: Optional[threading.Thread] = None
        self._wanted = True

    def begin(
        self,
        folder: str,
        outline: Outline,
        contents: Callable[[], Contents],
        keep_from: int = UNKNOWN,
    ) -> None:
        """Begin a file once the one before is written; older steps than `keep_from` are removed
        first.

        `contents()` is called in the file's thread; it may wait, and raises CancelledError if
        nobody needs the file any more.
        """
        self._thread = threading.Thread(
            target=self._write, args=(folder, outline, contents, keep_from),
            name="p3kv-checkpoint", daemon=True,
        )  # fmt: skip
        self._thread.start()

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most."""
        if self._thread is not None:
            self._thread.join(_CLOSE_S)
            self._wanted = False
            self._thread.join()

    def _write(
        self, folder: str, outline: Outline, contents: Callable[[], Contents], keep_from: int
    ) -> None:
        problem = ""
        try:
            if keep_from != UNKNOWN:
                remove_unneeded(folder, outline.part, keep_from)
            write(folder, outline, contents(), lambda: self._wanted)
        except (Abandoned, CancelledError):
            return
        except Exception as error:  # noqa: BLE001  the job goes on without the file
            reason = error.strerror if isinstance(error, OSError) else in_one_line(error)
            problem = f"{os.path.join(folder, outline.part.name)}: {reason}"
            _log.warning(
                "the checkpoint of step %d can't be written to %s. The job goes on, keeps the "
                "checkpoint before and tries again at the next one.",
                outline.step, problem,
            )  # fmt: skip
        self._written(outline.step, problem)
