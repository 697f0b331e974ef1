"""Finds the checkpoint from which a job goes on, and reads it.

Each file is opened once, checked, and read through the descriptor that was checked: a file that
gets its name later is another one.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import zipfile
from collections import defaultdict
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from numpy.lib import format as npy

from p3kv.checkpoints.files import NotOursError, open_folder, open_own, owner_in
from p3kv.checkpoints.outline import (
    OUTLINE,
    KeyOutline,
    Outline,
    Part,
    array_member,
    memory_member,
    parts_in,
    trained_member,
    value_member,
)
from p3kv.errors import CheckpointError, in_one_line
from p3kv.wire.messages import MAX_MESSAGE_BYTES, Key, ResumedStore, decode

_PIECE_BYTES = 1 << 20


_LENGTHS_AT = 26
"""Where a member's header in a ZIP archive has the lengths of its name and of what follows that."""


class Stored(NamedTuple):
    """An array in a file."""

    descriptor: int
    offset: int
    elems: int
    dtype: np.dtype


class StoredArray:
    """An array in the files of a checkpoint, read when its elements are asked for."""

    def __init__(self, parts: Sequence[OpenPart], arrays: Sequence[Stored]) -> None:
        """`arrays`, of each of the `parts` one, in the order of the elements."""
        self._parts = parts  # which stay open
        self._arrays = arrays
        self.size = sum(one.elems for one in arrays)
        self.dtype = arrays[0].dtype

    def __getitem__(self, elements: slice) -> np.ndarray:
        """Consecutive elements. Raises CheckpointError where a file has been cut off."""
        found = np.empty(elements.stop - elements.start, self.dtype)
        first = 0
        for one in self._arrays:
            start, stop = max(elements.start, first), min(elements.stop, first + one.elems)
            if start < stop:
                memory = found[start - elements.start : stop - elements.start].view(np.uint8).data
                _read_at(one.descriptor, memory, one.offset + (start - first) * one.dtype.itemsize)
            first += one.elems
        return found


class StoredRows:
    """Rows of a key's value in the files of a checkpoint, read when they are asked for."""

    def __init__(self, elements: StoredArray, row_elems: int) -> None:
        self._elements = elements
        self._row_elems = row_elems
        self.rows = elements.size // row_elems
        self.nbytes = elements.size * elements.dtype.itemsize

    def __getitem__(self, rows: slice) -> np.ndarray:
        """Consecutive rows. Raises as `StoredArray`."""
        each = self._row_elems
        return self._elements[rows.start * each : rows.stop * each].reshape(-1, each)


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


class Unusable(Exception):
    """Why a checkpoint can't be used; `missing_of` is the host that was to write a missing file, of
    a first checkpoint."""

    def __init__(self, reason: str, missing_of: Optional[str] = None) -> None:
        super().__init__(reason)
        self.missing_of = missing_of


class OpenPart:
    """A file of a checkpoint, when every byte of it that counts is as it was written."""

    outline: Outline

    def __init__(self, folder: Folder, part: Part) -> None:
        """Raises Unusable for a file that can't be used."""
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
                raise Unusable(f"{self._path} is not used: {error}") from error
            except Exception as error:
                raise Unusable(f"{self._path} is damaged ({in_one_line(error)})") from error
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
        """Where a member's array is in the file, which stays open. CheckpointError."""
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


_log = logging.getLogger(__name__)

_ADVICE = (
    "Give p3kv a folder that all hosts share, or remove the files and set P3KV_RESUME=0 to start "
    "from the beginning"
)


class SavedState(NamedTuple):
    """The optimizer's state of a key on one server."""

    elements: Dict[str, Any]
    """Arrays, or `StoredArray`s."""
    numbers: Dict[str, Any]


class SavedKey(NamedTuple):
    """A key of a checkpoint."""

    outline: KeyOutline
    """As the first of its servers has written it, or worker rank 0."""
    value: np.ndarray
    """Flat."""
    states: List[SavedState]
    """In the order of the elements; one for a whole tensor; none if the optimizer remembers
    nothing."""


class Saved:
    """A complete, undamaged checkpoint, whose files stay open; arrays are read when asked for."""

    def __init__(self, parts: List[OpenPart]) -> None:
        """`parts` are those of servers, by rank, and then those of workers, by rank."""
        self._parts = parts
        self._outlines = [part.outline for part in parts]
        self._places: Dict[Tuple[int, Key], Dict[int, int]] = defaultdict(dict)
        """By store and key: the place of the key in the files that have it, by number."""
        for number, outline in enumerate(self._outlines):
            for place, key in enumerate(outline.keys):
                self._places[key.store, key.key][number] = place
        self._codecs = {
            (memory.store, memory.key): memory.codec
            for outline in self._outlines
            for memory in outline.memories
        }

    @property
    def step(self) -> int:
        return self._outlines[0].step

    @property
    def identity(self) -> str:
        """The same in all its files, and in no others."""
        return self._outlines[0].identity

    @property
    def num_workers(self) -> int:
        """How many workers have files: none, rank 0 or all."""
        return len(self._parts) - len(self._outlines[0].hosts)

    @property
    def stores(self) -> List[ResumedStore]:
        return self._outlines[0].stores

    def keys(self, store: int) -> List[Key]:
        """A store's keys."""
        return [key for its_store, key in self._places if its_store == store]

    def outline(self, store: int, key: Key) -> Optional[KeyOutline]:
        """A key's; None if the checkpoint has no such key."""
        for number, place in self._places.get((store, key), {}).items():
            return self._outlines[number].keys[place]
        return None

    def codec_with_memory(self, store: int, key: Key) -> Optional[str]:
        """Name of the codec whose memory of a key workers' files have; None without one."""
        return self._codecs.get((store, key))

    def key(self, store: int, key: Key) -> SavedKey:
        """A key's value, worker rank 0's if its file has one, and states. CheckpointError if they
        can't be read any more."""
        outline = self.outline(store, key)
        assert outline is not None
        places = dict(self._places[store, key])
        value = self._workers_value(places)
        if value is None:
            value = np.concatenate(
                [self._parts[at].array(value_member(places[at])) for at, _ in outline.runs]
            )
        return SavedKey(outline, value, self.states(store, key))

    def states(self, store: int, key: Key) -> List[SavedState]:
        """A key's states, as `SavedKey` has them; raises as `key`."""
        outline, places = self.outline(store, key), self._places[store, key]
        states = []
        for server, _ in () if outline is None else outline.runs:
            if server not in places:
                continue  # worker rank 0 alone has it
            part = self._parts[server]
            of_server = part.outline.keys[places[server]]
            if of_server.numbers is not None:
                arrays = {
                    name: part.array(array_member(places[server], place))
                    for place, (name, _, _) in enumerate(of_server.arrays)
                }
                states.append(SavedState(arrays, of_server.numbers))
        return states

    def rows(self, store: int, key: Key, row_elems: int) -> Tuple[StoredRows, Optional[SavedState]]:
        """The value of a key of rows and its state, left in the servers' files. Raises as `key`."""
        outline, places = self.outline(store, key), self._places[store, key]
        assert outline is not None
        parts = {place: self._parts[place] for place, _ in outline.runs}

        def stored(name_of: Callable[[int], str]) -> StoredArray:
            arrays = [part.stored(name_of(places[at])) for at, part in parts.items()]
            return StoredArray(list(parts.values()), arrays)

        rows = StoredRows(stored(value_member), row_elems)
        first = next(part.outline.keys[places[at]] for at, part in parts.items())
        if first.numbers is None:
            return rows, None
        elements = {
            name: stored(partial(array_member, place=place))
            for place, (name, _, _) in enumerate(first.arrays)
        }
        return rows, SavedState(elements, first.numbers)

    def _workers_value(self, places: Dict[int, int]) -> Optional[np.ndarray]:
        """Takes the place in worker rank 0's file out of `places`, and reads the value there."""
        workers = len(self._outlines[0].hosts)
        if workers not in places:
            return None
        return self._parts[workers].array(value_member(places.pop(workers)))


def newest(folder: str, host: str) -> Optional[Saved]:
    """Open the newest checkpoint in a folder that is complete and not damaged; None if there is
    none.

    Warns of each newer one, with the file that is damaged or missing. `host` is this host's
    address. CheckpointError where there are files of which none can be used, unless a first
    checkpoint was cut off by this host's own processes.
    """
    try:
        parts = parts_in(folder)
        if not parts:
            _log.warning("there is no checkpoint in %s: the job starts from the beginning", folder)
            return None
        descriptor = open_folder(folder)
        try:
            return _newest_of(Folder(folder, descriptor, owner_in(descriptor)), parts, host)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise CheckpointError(f"the folder {folder} can't be read: {error.strerror}") from error


def _newest_of(folder: Folder, parts: List[Part], host: str) -> Optional[Saved]:
    by_step: Dict[int, List[Part]] = defaultdict(list)
    for part in parts:
        by_step[part.step].append(part)
    refusals = []
    only_unfinished = True
    for step in sorted(by_step, reverse=True):
        try:
            return _of_step(folder, by_step[step])
        except Unusable as refused:
            _log.warning("the checkpoint of step %d is not used: %s", step, refused)
            refusals.append(str(refused))
            only_unfinished = only_unfinished and refused.missing_of == host
    if not only_unfinished:
        raise CheckpointError(
            f"no checkpoint in {folder.path} can be used: {refusals[0]}. {_ADVICE}"
        )
    _log.warning("no checkpoint in %s was complete: the job starts from the beginning", folder.path)
    return None


def _of_step(folder: Folder, parts: List[Part]) -> Saved:
    """The complete checkpoint among the files of a step; Unusable if there is none."""
    by_identity: Dict[str, Dict[Part, OpenPart]] = defaultdict(dict)
    refused = None
    with ExitStack() as unused:
        for part in sorted(parts):
            try:
                opened = unused.enter_context(OpenPart(folder, part))
            except Unusable as error:
                refused = refused or error
            else:
                by_identity[opened.outline.identity][part] = opened
        for there in by_identity.values():
            outline = next(iter(there.values())).outline
            hosts = outline.parts
            missing = next((part for part in hosts if part not in there), None)
            if missing is None:
                unused.pop_all()
                return Saved([there[part] for part in hosts])
            refused = refused or Unusable(
                f"{missing.name}, the part of {missing.role} {missing.rank}, which was to write it "
                f"on host {hosts[missing]}, is not in {folder.path}",
                hosts[missing] if outline.is_first else None,
            )
    assert refused is not None
    raise refused


class SavedMemory(NamedTuple):
    """Memory that a codec had of a key."""

    codec: str
    """Its name."""
    arrays: Dict[str, np.ndarray]
    """By name, flat, with an item for each element of the whole key."""


class SavedTrained(NamedTuple):
    """A worker's state of a key that it trained by itself."""

    numbers: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    """By name."""


class WorkersPart:
    """One worker's file of a checkpoint, which stays open; arrays are read when asked for."""

    def __init__(self, folder: str, part: Part, identity: str) -> None:
        """Raises CheckpointError for a file that is damaged or not of the checkpoint `identity`."""
        try:
            descriptor = open_folder(folder)
            try:
                opened = OpenPart(Folder(folder, descriptor, owner_in(descriptor)), part)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"the folder {folder} can't be read: {error.strerror}") from error
        except Unusable as refused:
            raise CheckpointError(str(refused)) from refused
        if opened.outline.identity != identity:
            raise CheckpointError(
                f"{os.path.join(folder, part.name)} belongs to another checkpoint of this step; "
                "give p3kv a folder that all hosts share, and that no other job writes to"
            )
        self._part = opened
        outline = opened.outline
        self._memories = {(one.store, one.key): at for at, one in enumerate(outline.memories)}
        self._trained = {(one.store, one.key): at for at, one in enumerate(outline.trained)}

    def numbers(self, store: int) -> Dict[str, Any]:
        """A store's plain values on the worker."""
        return next((one.numbers for one in self._part.outline.stores if one.store == store), {})

    def memory(self, store: int, key: Key) -> Optional[SavedMemory]:
        """A codec's memory of a key, if any; CheckpointError if it can't be read any more."""
        index = self._memories.get((store, key))
        if index is None:
            return None
        outline = self._part.outline.memories[index]
        arrays = {
            name: self._part.array(memory_member(index, place))
            for place, (name, _) in enumerate(outline.arrays)
        }
        return SavedMemory(outline.codec, arrays)

    def trained(self, store: int, key: Key) -> Optional[SavedTrained]:
        """A worker's state of a key that it trained by itself, if any; CheckpointError as
        `memory`."""
        index = self._trained.get((store, key))
        if index is None:
            return None
        outline = self._part.outline.trained[index]
        arrays = {
            name: self._part.array(trained_member(index, place))
            for place, (name, _, _) in enumerate(outline.arrays)
        }
        return SavedTrained(outline.numbers, arrays)
