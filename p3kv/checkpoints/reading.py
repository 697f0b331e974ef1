"""Finds the checkpoint from which a job goes on, and reads it."""

from __future__ import annotations

import logging
import os
import zipfile
from collections import defaultdict
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from numpy.lib import format as npy

from p3kv.checkpoints.outline import (
    OUTLINE,
    KeyOutline,
    Outline,
    Part,
    array_member,
    parts_in,
    value_member,
)
from p3kv.errors import CheckpointError, in_one_line
from p3kv.wire.messages import Key, ResumedStore, decode

_log = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20
_ADVICE = (
    "Give p3kv a folder that all hosts share, or remove the files and set P3KV_RESUME=0 to start "
    "from the beginning"
)


class _State(NamedTuple):
    """The optimizer's state of a key on one server."""

    elements: Dict[str, np.ndarray]
    numbers: Dict[str, Any]


class SavedKey(NamedTuple):
    """A key of a checkpoint."""

    outline: KeyOutline
    """As the first of its servers has written it."""
    value: np.ndarray
    """Flat."""
    states: List[_State]
    """In the order of the elements; one for a whole tensor; none if the optimizer remembers
    nothing."""


class Saved:
    """A checkpoint that is complete, and whose files are as they were written.

    Arrays are read when they are asked for.
    """

    def __init__(self, folder: str, outlines: List[Outline]) -> None:
        self._folder = folder
        self._outlines = outlines
        self._places: Dict[Tuple[int, Key], Dict[int, int]] = defaultdict(dict)
        """By store and key: the place of the key in each server's file."""
        for outline in outlines:
            for place, key in enumerate(outline.keys):
                self._places[key.store, key.key][outline.server] = place

    @property
    def step(self) -> int:
        return self._outlines[0].step

    @property
    def stores(self) -> List[ResumedStore]:
        return self._outlines[0].stores

    def keys(self, store: int) -> List[Key]:
        """A store's keys."""
        return [key for its_store, key in self._places if its_store == store]

    def outline(self, store: int, key: Key) -> Optional[KeyOutline]:
        """A key's; None if the checkpoint has no such key."""
        for server, place in self._places.get((store, key), {}).items():
            return self._outlines[server].keys[place]
        return None

    def key(self, store: int, key: Key) -> SavedKey:
        """A key's value and states; the key must be there. Raises CheckpointError if they can't be
        read any more."""
        outline = self.outline(store, key)
        assert outline is not None
        places, values, states = self._places[store, key], [], []
        for server, _ in outline.runs:
            part = self._outlines[server]
            path = os.path.join(self._folder, part.part.name)
            try:
                of_server = part.keys[places[server]]
                with zipfile.ZipFile(path) as archive:
                    values.append(_array(archive, value_member(places[server])))
                    if of_server.numbers is not None:
                        arrays = {
                            name: _array(archive, array_member(places[server], place))
                            for place, (name, _, _) in enumerate(of_server.arrays)
                        }
                        states.append(_State(arrays, of_server.numbers))
            except Exception as error:
                raise CheckpointError(f"{path} can't be read: {in_one_line(error)}") from error
        return SavedKey(outline, np.concatenate(values), states)


def newest(folder: str, host: str) -> Optional[Saved]:
    """The newest checkpoint in a folder that is complete and not damaged; None if none was ever
    complete.

    Warns of each newer one, with the file that is damaged or missing. `host` is this host's
    address. Raises CheckpointError where there are files of which none can be used, unless this
    host's own servers had not written the first one.
    """
    try:
        parts = parts_in(folder)
    except OSError as error:
        raise CheckpointError(f"the folder {folder} can't be read: {error.strerror}") from error
    by_step: Dict[int, List[Part]] = defaultdict(list)
    for part in parts:
        by_step[part.step].append(part)
    refusals = []
    only_unfinished = True
    for step in sorted(by_step, reverse=True):
        try:
            saved = _of_step(folder, by_step[step])
        except _Refused as refused:
            _log.warning("the checkpoint of step %d is not used: %s", step, refused)
            refusals.append(str(refused))
            only_unfinished = only_unfinished and refused.missing_of == host
        else:
            return saved
    if not refusals:
        _log.warning("there is no checkpoint in %s: the job starts from the beginning", folder)
    elif only_unfinished:
        _log.warning("no checkpoint in %s was complete: the job starts from the beginning", folder)
    else:
        raise CheckpointError(f"no checkpoint in {folder} can be used: {refusals[0]}. {_ADVICE}")
    return None


class _Refused(Exception):
    """A checkpoint can't be used; `missing_of` is the host that should have written a file which is
    not there."""

    def __init__(self, reason: str, missing_of: Optional[str] = None) -> None:
        super().__init__(reason)
        self.missing_of = missing_of


def _of_step(folder: str, parts: List[Part]) -> Saved:
    """The complete checkpoint among the files of a step; _Refused if there is none."""
    by_identity: Dict[str, List[Outline]] = defaultdict(list)
    refused = None
    for part in sorted(parts):
        try:
            outline = _checked(os.path.join(folder, part.name), part)
            by_identity[outline.identity].append(outline)
        except _Refused as error:
            refused = refused or error
    for outlines in by_identity.values():
        hosts, there = outlines[0].hosts, {outline.server for outline in outlines}
        missing = [server for server in range(len(hosts)) if server not in there]
        if not missing:
            return Saved(folder, sorted(outlines, key=lambda outline: outline.server))
        name = outlines[0].part._replace(server=missing[0]).name
        refused = refused or _Refused(
            f"{name}, the part of server {missing[0]}, which was to write it on host "
            f"{hosts[missing[0]]}, is not in {folder}",
            hosts[missing[0]],
        )
    assert refused is not None
    return _raise(refused)


def _raise(refused: _Refused) -> Saved:
    raise refused


def _checked(path: str, part: Part) -> Outline:
    """A file's outline, when every byte of the file that counts is as it was written."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename: info for info in archive.infolist()}
            for info in members.values():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise ValueError(f"{info.filename} is not stored as it is")
                with archive.open(info) as member:
                    while member.read(_PIECE_BYTES):  # at its end it compares the checksum
                        pass
            outline: Outline = decode(archive.read(OUTLINE), Outline)
            if outline.part != part:
                raise ValueError(f"it is {outline.part.name}")
            _check_members(archive, outline, set(members))
            return outline
    except Exception as error:
        raise _Refused(f"{path} is damaged ({in_one_line(error)})") from error


def _check_members(archive: zipfile.ZipFile, outline: Outline, members: set) -> None:
    expected = {OUTLINE}
    for index, key in enumerate(outline.keys):
        length = dict(key.runs)[outline.server]
        wanted = {value_member(index): ([length], key.dtype)}
        for place, (_, dtype, shape) in enumerate(key.arrays):
            wanted[array_member(index, place)] = (shape, dtype)
            if not key.whole and shape != [length]:
                raise ValueError(f"a state of {length} elements has the shape {shape}")
        for name, (shape, dtype) in wanted.items():
            with archive.open(name) as member:
                found_shape, found_dtype = _header(member)
            if (found_shape, found_dtype.name) != (tuple(shape), dtype):
                raise ValueError(f"{name} has {found_dtype} {found_shape}")
        expected.update(wanted)
    if members != expected:
        raise ValueError(f"it has other members: {sorted(members ^ expected)[:3]}")


def _header(member: Any) -> Tuple[Tuple[int, ...], np.dtype]:
    if npy.read_magic(member) != (1, 0):
        raise ValueError("an array of another version")
    shape, fortran_order, dtype = npy.read_array_header_1_0(member)
    if fortran_order:
        raise ValueError("an array in another order")
    return shape, dtype


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of a member, whose checksum is compared once more."""
    with archive.open(name) as member:
        shape, dtype = _header(member)
        data = member.read()
    return np.frombuffer(data, dtype).reshape(shape)
