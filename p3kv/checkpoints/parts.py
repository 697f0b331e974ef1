"""Reads a file of a checkpoint: opened once, checked, and read through the same descriptor."""

from __future__ import annotations

import math
import os
import struct
import zipfile
from contextlib import ExitStack
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.lib import format as npy

from p3kv.checkpoints.files import NotOursError, open_own
from p3kv.checkpoints.outline import (
    OUTLINE,
    Outline,
    Part,
    array_member,
    memory_member,
    trained_member,
    value_member,
)
from p3kv.errors import CheckpointError, in_one_line
from p3kv.wire.messages import MAX_MESSAGE_BYTES, decode

_PIECE_BYTES = 1 << 20


_LENGTHS_AT = 26
"""Where a member's header in a ZIP archive has the lengths of its name and of what follows that."""


class Stored(NamedTuple):
    """An array in a file."""

    descriptor: int
    offset: int
    elems: int
    dtype: np.dtype


class StoredRows:
    """Rows of a key's value in the files of a checkpoint, read when they are asked for."""

    def __init__(self, parts: Sequence[OpenPart], arrays: Sequence[Stored], row_elems: int) -> None:
        """`arrays`, of each of the `parts` one, in the order of the rows."""
        self._parts = parts  # which stay open
        self._arrays = arrays
        self._row_elems = row_elems
        self.rows = sum(one.elems for one in arrays) // row_elems
        self.nbytes = sum(one.elems * one.dtype.itemsize for one in arrays)

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Consecutive rows. Raises CheckpointError where a file has been cut off."""
        found = np.empty((rows.stop - rows.start, self._row_elems), self._arrays[0].dtype)
        first = 0
        for one in self._arrays:
            count = one.elems // self._row_elems
            start, stop = max(rows.start, first), min(rows.stop, first + count)
            if start < stop:
                memory = found[start - rows.start : stop - rows.start].view(np.uint8).data.cast("B")
                row_bytes = self._row_elems * one.dtype.itemsize
                _read_at(one.descriptor, memory, one.offset + (start - first) * row_bytes)
            first += count
        return found


def _read_at(descriptor: int, memory: memoryview, offset: int) -> None:
    while len(memory):
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise CheckpointError("a file of the checkpoint has been cut off while it was read")
        memory, offset = memory[count:], offset + count


class Folder(NamedTuple):
    path: str
    descriptor: int
    owner: int
    """Who owns the files of this user there."""


class Refused(Exception):
    """A checkpoint can't be used; `missing_of` is the host that was to write a file which is not
    there, of a first checkpoint."""

    def __init__(self, reason: str, missing_of: Optional[str] = None) -> None:
        super().__init__(reason)
        self.missing_of = missing_of


class OpenPart:
    """A file of a checkpoint, when every byte of it that counts is as it was written."""

    outline: Outline

    def __init__(self, folder: Folder, part: Part) -> None:
        """Raises Refused for a file that can't be used."""
        self._path = os.path.join(folder.path, part.name)
        self._wanted: Dict[str, Tuple[Tuple[int, ...], str]] = {}
        """Shape and dtype of each array, by the name of its member."""
        with ExitStack() as opened:
            try:
                file = opened.enter_context(
                    open_own(folder.descriptor, part.name, folder.owner, MAX_MESSAGE_BYTES)
                )
                self._descriptor = file.fileno()
                self._archive = opened.enter_context(zipfile.ZipFile(file))
                self._check_bytes(file.size_bytes)
                self._check_members(part)
            except NotOursError as error:
                raise Refused(f"{self._path} is not used: {error}") from error
            except Exception as error:
                raise Refused(f"{self._path} is damaged ({in_one_line(error)})") from error
            self._opened = opened.pop_all()

    def __enter__(self) -> OpenPart:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def array(self, name: str) -> np.ndarray:
        """A member's array, whose checksum is compared once more. Raises CheckpointError."""
        try:
            with self._archive.open(name) as member:
                shape, dtype = self._checked_header(name, member)
                value = np.empty(math.prod(shape), dtype)
                memory = value.view(np.uint8).data
                for start in range(0, len(memory), _PIECE_BYTES):
                    _read_into(member, memory[start : start + _PIECE_BYTES])
            return value.reshape(shape)
        except Exception as error:
            raise CheckpointError(f"{self._path} can't be read: {in_one_line(error)}") from error

    def stored(self, name: str) -> Stored:
        """Where a member's array is in the file, which is open as long as this is. Raises
        CheckpointError."""
        try:
            with self._archive.open(name) as member:
                shape, dtype = self._checked_header(name, member)
                header_bytes = member.tell()
            begins = self._archive.getinfo(name).header_offset
            lengths = os.pread(self._descriptor, 4, begins + _LENGTHS_AT)
            begins += _LENGTHS_AT + 4 + sum(struct.unpack("<HH", lengths)) + header_bytes
            return Stored(self._descriptor, begins, math.prod(shape), dtype)
        except Exception as error:
            raise CheckpointError(f"{self._path} can't be read: {in_one_line(error)}") from error

    def _check_bytes(self, size_bytes: int) -> None:
        """Reads all, in pieces: at a member's end its checksum is compared."""
        members = self._archive.infolist()
        if sum(info.file_size for info in members) > size_bytes:
            raise ValueError("its members are longer than the file")
        for info in members:
            stored = info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
            if not stored or info.compress_size != info.file_size:
                raise ValueError(f"{info.filename} is not stored as it is")
            with self._archive.open(info) as member:
                while member.read(_PIECE_BYTES):
                    pass

    def _check_members(self, part: Part) -> None:
        outline = self.outline = decode(self._archive.read(OUTLINE), Outline)
        if outline.part != part:
            raise ValueError(f"it is {outline.part.name}")
        for index, key in enumerate(outline.keys):
            length = dict(key.runs)[outline.server]
            self._wanted[value_member(index)] = ((length,), key.dtype)
            for place, (_, dtype, shape) in enumerate(key.arrays):
                self._wanted[array_member(index, place)] = (tuple(shape), dtype)
                if not key.whole and shape != [length]:
                    raise ValueError(f"a state of {length} elements has the shape {shape}")
        for index, memory in enumerate(outline.memories):
            for place, (_, dtype) in enumerate(memory.arrays):
                self._wanted[memory_member(index, place)] = ((memory.size_elems,), dtype)
        for index, trained in enumerate(outline.trained):
            for place, (_, dtype, shape) in enumerate(trained.arrays):
                self._wanted[trained_member(index, place)] = (tuple(shape), dtype)
        others = set(self._archive.namelist()) ^ {OUTLINE, *self._wanted}
        if others:
            raise ValueError(f"it has other members: {sorted(others)[:3]}")
        for name in self._wanted:
            with self._archive.open(name) as member:
                self._checked_header(name, member)

    def _checked_header(self, name: str, member: Any) -> Tuple[Tuple[int, ...], np.dtype]:
        """Shape and dtype, when the outline says the same and so much data follow."""
        shape, dtype = _header(member)
        right_shape, right_name = self._wanted[name]
        right = np.dtype(right_name)
        # A file has numbers that are none of numpy's own, such as bfloat16, without their meaning.
        if (shape, dtype) != (right_shape, np.dtype(right.str)):
            raise ValueError(f"{name} has {dtype} {shape}")
        data_bytes = self._archive.getinfo(name).file_size - member.tell()
        right_bytes = math.prod(shape) * dtype.itemsize
        if data_bytes != right_bytes:
            raise ValueError(f"{name} has {data_bytes} bytes of data, and {right_bytes} are right")
        return shape, right


def _header(member: Any) -> Tuple[Tuple[int, ...], np.dtype]:
    if npy.read_magic(member) != (1, 0):
        raise ValueError("an array of another version")
    shape, fortran_order, dtype = npy.read_array_header_1_0(member)
    if fortran_order:
        raise ValueError("an array in another order")
    return shape, dtype


def _read_into(member: Any, memory: memoryview) -> None:
    while memory:
        count = member.readinto(memory)
        if not count:
            raise ValueError("its end is missing")
        memory = memory[count:]
