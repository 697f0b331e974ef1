"""Gives codecs back what they remembered at the checkpoint from which the job goes on."""

from __future__ import annotations

import logging
from typing import Dict, Optional

import numpy as np

from p3kv.checkpoints import WORKER, Memories, Part, Saved
from p3kv.wire.messages import Resumed
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger(__name__)


class ResumedMemories:
    """Memories that this worker's codecs of gradients had; worker rank 0 says once if it is lost.

    Belongs to the thread that uses the stores.
    """

    def __init__(self, rank: int, num_workers: int, folder: Optional[str]) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._folder = folder
        self._memories: Optional[Memories] = None
        self._told = False

    def give_back(self, key: WorkerKey, resumed: Resumed, saved: Optional[Saved]) -> None:
        """Gives the codec of a key back what it remembered, before the first push. `saved` is the
        checkpoint, on worker rank 0. Raises CheckpointError where this worker's part of it can't be
        read."""
        found = None if key.memory is None else self._found(key, resumed)
        restored = key.memory is not None and found is not None and key.memory.restore(found)
        if saved is not None and not restored and not self._told:
            self._tell(key, saved)

    def _found(self, key: WorkerKey, resumed: Resumed) -> Optional[Dict[str, np.ndarray]]:
        if resumed.num_workers != self._num_workers:
            return None
        if self._memories is None:
            assert self._folder is not None
            part = Part(resumed.step, self._rank, resumed.num_workers, WORKER)
            self._memories = Memories(self._folder, part, resumed.identity)
        found = self._memories.of(key.store, key.key)
        if found is None or found.codec != key.declared.codecs.gradients.name:
            return None
        return found.arrays

    def _tell(self, key: WorkerKey, saved: Saved) -> None:
        codec = key.declared.codecs.gradients
        before = saved.codec_with_memory(key.store, key.key)
        if before is None:
            if key.memory is None or saved.outline(key.store, key.key) is None:
                return
            why = f"has nothing that the codec {codec} remembers of {key.called}"
        elif saved.num_workers != self._num_workers:
            why = f"is of {saved.num_workers} workers, and this job has {self._num_workers}"
        else:
            why = f"has what the codec {before!r} remembers of {key.called}, which now has {codec}"
        self._told = True
        _log.warning(
            "the checkpoint of step %d %s. So codecs begin with nothing in their memory: what they "
            "had kept back of gradients, to send it with later ones, is lost once",
            saved.step, why,
        )  # fmt: skip
