"""This worker's part of the checkpoint from which the job goes on."""

from __future__ import annotations

import logging
from typing import Any, Dict, Optional, Set

import numpy as np

from p3kv.checkpoints import WORKER, Part, Saved, SavedTrained, WorkersPart
from p3kv.wire.messages import Key, Resumed
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger(__name__)


class ResumedPart:
    """What codecs of gradients remembered, and what this worker has trained by itself. Worker rank
    0 says once if it is lost.

    Belongs to the thread that uses the stores.
    """

    def __init__(self, rank: int, num_workers: int, folder: Optional[str]) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._folder = folder
        self._part: Optional[WorkersPart] = None
        self._told: Set[str] = set()

    # What codecs remembered.

    def give_back(self, key: WorkerKey, resumed: Resumed, saved: Optional[Saved]) -> None:
        """Gives the codec of a key back what it remembered, before the first push. `saved` is the
        checkpoint, on worker rank 0. Raises CheckpointError where this worker's part of it can't be
        read."""
        found = None if key.memory is None else self._memory(key, resumed)
        restored = key.memory is not None and found is not None and key.memory.restore(found)
        if saved is not None and not restored:
            self._tell_memory(key, saved)

    def _memory(self, key: WorkerKey, resumed: Resumed) -> Optional[Dict[str, np.ndarray]]:
        part = self._opened(resumed)
        found = None if part is None else part.memory(key.store, key.key)
        if found is None or found.codec != key.declared.codecs.gradients.name:
            return None
        return found.arrays

    def _tell_memory(self, key: WorkerKey, saved: Saved) -> None:
        codec = key.declared.codecs.gradients
        before = saved.codec_with_memory(key.store, key.key)
        if before is None:
            if key.memory is None or saved.outline(key.store, key.key) is None:
                return
            why = f"has nothing that the codec {codec} remembers of {key.called}"
        elif saved.num_workers != self._num_workers:
            why = self._of_other_workers(saved.num_workers)
        else:
            why = f"has what the codec {before!r} remembers of {key.called}, which now has {codec}"
        self._tell(
            saved.step, why,
            "So codecs begin with nothing in their memory: what they had kept back of gradients, "
            "to send it with later ones, is lost once",
        )  # fmt: skip

    # What this worker has trained by itself.

    def numbers(self, store: int, resumed: Resumed) -> Dict[str, Any]:
        """What this worker knew of a store; nothing where `trained` gives nothing."""
        part = self._opened(resumed)
        return {} if part is None else part.numbers(store)

    def trained(self, store: int, key: Key, resumed: Resumed) -> Optional[SavedTrained]:
        """What this worker had of a key; None with another number of workers. Raises
        CheckpointError where its part of the checkpoint can't be read."""
        part = self._opened(resumed)
        if part is not None:
            return part.trained(store, key)
        if self._rank == 0:
            self._tell(
                resumed.step, self._of_other_workers(resumed.num_workers),
                "So all workers go on from the servers' weights, and with fresh states of their "
                "optimizers: what each has learned since its last exchange is lost once",
            )  # fmt: skip
        return None

    def _opened(self, resumed: Resumed) -> Optional[WorkersPart]:
        if resumed.num_workers != self._num_workers:
            return None
        if self._part is None:
            assert self._folder is not None
            part = Part(resumed.step, self._rank, resumed.num_workers, WORKER)
            self._part = WorkersPart(self._folder, part, resumed.identity)
        return self._part

    def _of_other_workers(self, count: int) -> str:
        return f"is of {count} workers, and this job has {self._num_workers}"

    def _tell(self, step: int, why: str, so: str) -> None:
        if so not in self._told:
            self._told.add(so)
            _log.warning("the checkpoint of step %d %s. %s", step, why, so)
