"""Reads what a worker's codecs remembered at a checkpoint."""

from __future__ import annotations

import os
from typing import Dict, NamedTuple, Optional

import numpy as np

from p3kv.checkpoints.files import open_folder, owner_in
from p3kv.checkpoints.outline import Part, memory_member
from p3kv.checkpoints.parts import Folder, OpenPart, Refused
from p3kv.errors import CheckpointError
from p3kv.wire.messages import Key


class SavedMemory(NamedTuple):
    """Memory that a codec had of a key."""

    codec: str
    """Its name."""
    arrays: Dict[str, np.ndarray]
    """By name, flat, with an item for each element of the whole key."""


class Memories:
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
        self._places = {
            (memory.store, memory.key): place
            for place, memory in enumerate(opened.outline.memories)
        }

    def of(self, store: int, key: Key) -> Optional[SavedMemory]:
        """Memory that the codec had of a key; None if it had none. Raises CheckpointError if it
        can't be read any more."""
        index = self._places.get((store, key))
        if index is None:
            return None
        outline = self._part.outline.memories[index]
        arrays = {
            name: self._part.array(memory_member(index, place))
            for place, (name, _) in enumerate(outline.arrays)
        }
        return SavedMemory(outline.codec, arrays)
