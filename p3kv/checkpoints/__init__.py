"""Files of checkpoints: what servers write, and what worker rank 0 reads."""

from p3kv.checkpoints import marks
from p3kv.checkpoints.outline import (
    WORKER,
    CutOfKey,
    KeyOutline,
    Outline,
    Part,
    any_parts,
    parts_in,
)
from p3kv.checkpoints.reading import Saved, SavedKey, newest
from p3kv.checkpoints.writer import Writer
from p3kv.checkpoints.writing import Abandoned, remove_unneeded, write

__all__ = [
    "WORKER",
    "Abandoned",
    "CutOfKey",
    "KeyOutline",
    "Outline",
    "Part",
    "Saved",
    "SavedKey",
    "Writer",
    "any_parts",
    "marks",
    "newest",
    "parts_in",
    "remove_unneeded",
    "write",
]
