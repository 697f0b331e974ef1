"""Finds the checkpoint from which a job goes on, and reads it.

Each file is opened once, checked, and read through the descriptor that was checked: a file that
gets its name later is another one.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from contextlib import ExitStack
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from p3kv.checkpoints.files import open_folder, owner_in
from p3kv.checkpoints.outline import KeyOutline, Part, array_member, parts_in, value_member
from p3kv.checkpoints.parts import Folder, OpenPart, Refused, StoredRows
from p3kv.errors import CheckpointError
from p3kv.wire.messages import Key, ResumedStore

_log = logging.getLogger(__name__)

_ADVICE = (
    "Give p3kv a folder that all hosts share, or remove the files and set P3KV_RESUME=0 to start "
    "from the beginning"
)


class SavedState(NamedTuple):
    """The optimizer's state of a key on one server."""

    elements: Dict[str, np.ndarray]
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
    """A checkpoint that is complete, and whose files are as they were written.

    Its files stay open as long as it is there, and arrays are read when they are asked for.
    """

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
        """The name of the codec of which workers' files have what it remembers of a key; None if
        they have nothing."""
        return self._codecs.get((store, key))

    def key(self, store: int, key: Key) -> SavedKey:
        """A key's value and states; the key must be there. The value is worker rank 0's where its
        file has one. Raises CheckpointError if they can't be read any more."""
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

    def rows(self, store: int, key: Key, row_elems: int) -> StoredRows:
        """The value of a key of rows, which servers have written, left in its files. Raises as
        `key`."""
        outline, places = self.outline(store, key), self._places[store, key]
        assert outline is not None
        parts = [self._parts[server] for server, _ in outline.runs]
        members = [value_member(places[server]) for server, _ in outline.runs]
        return StoredRows(parts, [p.stored(m) for p, m in zip(parts, members)], row_elems)

    def _workers_value(self, places: Dict[int, int]) -> Optional[np.ndarray]:
        """Takes the place in worker rank 0's file out of `places`, and reads the value there."""
        workers = len(self._outlines[0].hosts)
        if workers not in places:
            return None
        return self._parts[workers].array(value_member(places.pop(workers)))


def newest(folder: str, host: str) -> Optional[Saved]:
    """The newest checkpoint in a folder that is complete and not damaged; None if none was ever
    complete.

    Warns of each newer one, with the file that is damaged or missing. `host` is this host's
    address. Raises CheckpointError where there are files of which none can be used, unless the
    first one had not been written when its job ended, by this host's own processes.
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
        except Refused as refused:
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
    """The complete checkpoint among the files of a step; Refused if there is none."""
    by_identity: Dict[str, Dict[Part, OpenPart]] = defaultdict(dict)
    refused = None
    with ExitStack() as unused:
        for part in sorted(parts):
            try:
                opened = unused.enter_context(OpenPart(folder, part))
            except Refused as error:
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
            refused = refused or Refused(
                f"{missing.name}, the part of {missing.role} {missing.rank}, which was to write it "
                f"on host {hosts[missing]}, is not in {folder.path}",
                hosts[missing] if outline.is_first else None,
            )
    assert refused is not None
    raise refused
