"""Files of checkpoints: what servers and workers write, and what workers read."""

from p3kv.checkpoints import marks
from p3kv.checkpoints.outline import (
    WORKER,
    Contents,
    CutOfKey,
    KeyOutline,
    MemoryOutline,
    Outline,
    Part,
    Place,
    TrainedOutline,
    any_parts,
    parts_in,
)
from p3kv.checkpoints.reading import (
    Saved,
    SavedKey,
    SavedMemory,
    SavedState,
    SavedTrained,
    StoredRows,
    WorkersPart,
    newest,
)
from p3kv.checkpoints.writing import Abandoned, Writer, remove_unneeded, write

__all__ = [
    "WORKER", "Abandoned", "Contents", "CutOfKey", "KeyOutline", "MemoryOutline", "Outline",
    "Part", "Place", "Saved", "SavedKey", "SavedMemory", "SavedState", "SavedTrained",
    "StoredRows", "TrainedOutline", "WorkersPart", "Writer", "any_parts", "marks", "newest",
    "parts_in", "remove_unneeded", "write",
]  # fmt: skip
