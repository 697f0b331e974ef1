"""Reads what a worker has written at a checkpoint for itself."""

from __future__ import annotations

import os
from typing import Any, Dict, NamedTuple, Optional

import numpy as np

from p3kv.checkpoints.files import open_folder, owner_in
from p3kv.checkpoints.outline import Part, memory_member, trained_member
from p3kv.checkpoints.parts import Folder, OpenPart, Refused
from p3kv.errors import CheckpointError
from p3kv.wire.messages import Key


class SavedMemory(NamedTuple):
    """Memory that a codec had of a key."""

    codec: str
    """Its name."""
    arrays: Dict[str, np.ndarray]
    """By name, flat, with an item for each element of the whole key."""


class SavedTrained(NamedTuple):
    """What a worker had of a key that it trains by itself."""

    numbers: Dict[str, Any]
    arrays: Dict[str, np.ndarray]
    """By name."""


class WorkersPart:
    """One worker's file of a checkpoint, which stays open; arrays are read when they are asked
    for."""

    def __init__(self, folder: str, part: Part, identity: str) -> None:
        """`identity` is the checkpoint's. Raises CheckpointError for a file that is damaged or of
        another checkpoint."""
        try:
            descriptor = open_folder(folder)
            try:
                opened = OpenPart(Folder(folder, descriptor, owner_in(descriptor)), part)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"the folder {folder} can't be read: {error.strerror}") from error
        except Refused as refused:
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
        """What the worker knew of a store, as plain values."""
        return next((one.numbers for one in self._part.outline.stores if one.store == store), {})

    def memory(self, store: int, key: Key) -> Optional[SavedMemory]:
        """Memory that the codec had of a key; None if it had none. Raises CheckpointError if it
        can't be read any more."""
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
        """What the worker had of a key; None if it did not train it by itself. Raises
        CheckpointError if it can't be read any more."""
        index = self._trained.get((store, key))
        if index is None:
            return None
        outline = self._part.outline.trained[index]
        arrays = {
            name: self._part.array(trained_member(index, place))
            for place, (name, _, _) in enumerate(outline.arrays)
        }
        return SavedTrained(outline.numbers, arrays)
