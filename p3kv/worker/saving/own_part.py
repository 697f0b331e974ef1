"""Writes this worker's part of checkpoints."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import Future
from itertools import chain
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import numpy as np

from p3kv.checkpoints import (
    WORKER,
    Contents,
    CutOfKey,
    KeyOutline,
    MemoryOutline,
    Outline,
    Part,
    Place,
    Saved,
    SavedTrained,
    TrainedOutline,
    WorkersPart,
    Writer,
    marks,
)
from p3kv.errors import ConfigError, ProtocolError
from p3kv.wire.messages import UNKNOWN, Checkpoint, Key, Resumed, Written
from p3kv.worker.job import JobMember
from p3kv.worker.saving.cuts import Cut, Trained
from p3kv.worker.saving.key_memory import MemoryCopy
from p3kv.worker.transfers import WorkerKey

_MARK_S = 5.0
"""How long to look for worker 0's mark: file systems of several hosts show new files later."""
_LOOK_EVERY_S = 0.2
_MOST_COPIES = 3
"""Of what codecs remember, for which worker rank 0 has not asked. It asks for a checkpoint before
its pushes of the next step, and this worker can't be many steps ahead of these. It never asks where
the checkpoint before is still being written."""


class _Copied(NamedTuple):
    """A worker's state at a checkpoint, copied, and its codecs' residuals."""

    cut: Cut
    memories: List[Tuple[WorkerKey, MemoryCopy]]


class OwnPart:
    """Writes what this worker's codecs remember, what it trains by itself, and on worker rank 0
    what no gradient changes.

    Each worker sees by itself between which steps a checkpoint lies, and copies then; worker rank 0
    says which checkpoints are written, and knows what each worker has to write: all have the same
    keys. Belongs to the worker's thread, except what says otherwise.
    """

    def __init__(
        self,
        place: Place,
        folder: Optional[str],
        keys: Mapping[int, WorkerKey],
        job: JobMember,
        written: Callable[[Written], None],
    ) -> None:
        """`keys` are the worker's, by id. `written` is told when a part is written, or why it is
        not."""
        self.has_part = False
        """Whether each worker has something to write; belongs to the thread that uses the
        stores."""
        self._place = place
        self._job = job
        self._folder = folder
        self._told = written
        self._writer = Writer(
            lambda step, problem: job.loop.call_soon(self._written, Written(step, problem))
        )
        self._all_keys = keys
        self._keys: Dict[int, WorkerKey] = {}
        """Those whose codecs remember, by id."""
        self._copied: Deque[_Copied] = deque(maxlen=_MOST_COPIES)
        self._wanted: Optional[Checkpoint] = None
        """For which worker rank 0 has asked, until this worker begins to write."""
        self._writes = False
        self._left_out = 0
        """The last step for which worker rank 0 has said that it asks for no checkpoint."""
        self._waits_for: Sequence[Future] = ()
        """What a thread waits for that writes a part."""

    def have_part(self) -> None:
        """Each worker writes a part, from the first checkpoint on; in the thread of stores. Raises
        ConfigError where it can't write to worker 0's folder."""
        if not self.has_part and self._place.rank != 0:
            self._check_folder()
        self.has_part = True

    def _check_folder(self) -> None:
        assert self._folder is not None
        rank, host, mark = self._place.rank, self._place.host, self._place.mark
        where = f"worker {rank} on host {host} can't use worker 0's folder {self._folder}"
        advice = (
            "Each worker writes what its codecs remember, and what it trains by itself. Set "
            "P3KV_CHECKPOINT_DIR to a folder that all hosts share under one name, for one user"
        )
        deadline = time.monotonic() + _MARK_S
        try:
            while problems := marks.look(self._folder, {0: mark("worker 0")}):
                if time.monotonic() > deadline:
                    raise ConfigError(f"{where}: {problems[0]}. {advice}")
                self._job.wait(_LOOK_EVERY_S)
            own = mark(f"worker {rank}")
            marks.leave(self._folder, own)
            marks.remove(self._folder, own)
        except OSError as error:
            raise ConfigError(f"{where}: {error.strerror}. {advice}") from error

    def declare(self, key: WorkerKey) -> None:
        """Save the residuals of a key's codec in checkpoints from now on."""
        self._keys[key.key_id] = key

    def forget(self, key_id: int) -> None:
        """No later checkpoint has a key."""
        self._keys.pop(key_id, None)

    def remembered(self, cut: Cut) -> List[Tuple[WorkerKey, int]]:
        """The keys whose codecs keep residuals, each with its round at a checkpoint."""
        rounds = [pair for store in cut.stores for pair in store.rounds]
        return [(self._keys[key_id], round_) for key_id, round_ in rounds if key_id in self._keys]

    def copy(self, cut: Cut) -> None:
        """Begin to copy residuals at a checkpoint, before this worker sends anything later."""
        if self._is_left_out(cut.step):
            return
        memories = []
        for key, round_ in self.remembered(cut):
            assert key.memory is not None
            memories.append((key, key.memory.begin_copy(round_)))
        self._copied.append(_Copied(cut, memories))
        self._write_if_copied()

    def write(self, checkpoint: Checkpoint) -> None:
        """Write this worker's part of a checkpoint once it is copied; ProtocolError while the one
        before is not written."""
        if self._wanted is not None or self._writes:
            raise ProtocolError("it asked for a checkpoint before it had the last one")
        self._wanted = checkpoint
        self._write_if_copied()

    def leave_out(self, step: int) -> None:
        """Rank 0 asks for no checkpoint of a step, nor for an older one."""
        self._left_out = step
        kept = [one for one in self._copied if not self._is_left_out(one.cut.step)]
        self._copied = deque(kept, maxlen=_MOST_COPIES)

    def _is_left_out(self, step: int) -> bool:
        asked = 0 if self._wanted is None else self._wanted.step
        return asked < step <= self._left_out

    @property
    def is_needed(self) -> bool:
        """Whether a part of this worker is being written, or may be asked for."""
        waits = self._writes or self._wanted is not None or bool(self._copied)
        return self.has_part and waits

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most; from any thread."""
        for one in self._waits_for:
            one.cancel()  # unless it is known, or being copied
        self._writer.close()

    def _write_if_copied(self) -> None:
        wanted = self._wanted
        if wanted is None or not self._copied or self._copied[-1].cut.step < wanted.step:
            return
        self._wanted, self._writes = None, True
        while self._copied[0].cut.step < wanted.step:
            self._copied.popleft()
        copied = self._copied[0]
        if copied.cut.step > wanted.step:
            self._refuse(wanted, "the worker was too many steps ahead of worker 0")
            return
        self._copied.popleft()
        asked = {key_id: round_ for store in wanted.stores for key_id, round_ in store.rounds}
        own = {key.key_id for key, _ in copied.memories}
        own.update(one.key_id for _, one in copied.cut.trained)
        for store in copied.cut.stores:
            for key_id, round_ in store.rounds:
                if key_id in own and asked.get(key_id) != round_:
                    self._refuse(
                        wanted,
                        f"the worker has pushed {self._all_keys[key_id].called} {round_} times "
                        f"before this step, and worker 0 {asked.get(key_id)} times",
                    )
                    return
        self._begin(wanted, copied)

    def _refuse(self, checkpoint: Checkpoint, reason: str) -> None:
        part = Part(checkpoint.step, self._place.rank, 1 + len(checkpoint.others_hosts), WORKER)
        self._written(Written(checkpoint.step, f"{part.name}: {reason}"))

    def _begin(self, checkpoint: Checkpoint, copied: _Copied) -> None:
        unpushed, memories = copied.cut.unpushed, copied.memories
        assert self._folder is not None
        keys = [
            KeyOutline(
                store, one.key, one.name, one.shape, one.dtype, "dense",
                [(0, math.prod(one.shape))], False, None, [],
            )
            for store, one in unpushed
        ]  # fmt: skip
        outline = Outline(
            1, checkpoint.identity, checkpoint.step, self._place.rank,
            list(self._place.servers_hosts),
            [store.known for store in copied.cut.stores], keys, checkpoint.workers_host, WORKER,
            checkpoint.others_hosts, [_outline(key) for key, _ in memories],
            [_trained(store, one) for store, one in copied.cut.trained],
            checkpoint.keep_from == UNKNOWN,
        )  # fmt: skip
        values = [one.value for _, one in unpushed]
        copies = [copy.complete for _, copy in memories]
        trained = [[array.value for array in one.arrays.values()] for _, one in copied.cut.trained]
        self._waits_for = [*values, *copies, *chain.from_iterable(trained)]

        def contents() -> Contents:
            return Contents(
                [
                    CutOfKey(key, [value.result().reshape(-1)], [])
                    for key, value in zip(keys, values)
                ],
                [list(copy.result().values()) for copy in copies],
                [[value.result() for value in of_key] for of_key in trained],
            )

        self._writer.begin(self._folder, outline, contents)

    def _written(self, written: Written) -> None:
        self._writes, self._waits_for = False, ()
        self._told(written)


def _outline(key: WorkerKey) -> MemoryOutline:
    assert key.memory is not None
    arrays = [(name, array.dtype.name) for name, array in key.memory.memory().items()]
    codec = key.declared.codecs.gradients.name
    return MemoryOutline(key.store, key.key, codec, key.size_elems, arrays)


def _trained(store: int, one: Trained) -> TrainedOutline:
    arrays = [(name, array.dtype, list(array.shape)) for name, array in one.arrays.items()]
    return TrainedOutline(store, one.key, one.numbers, arrays)


_log = logging.getLogger(__name__)


class ResumedPart:
    """What codecs of gradients remembered, and what this worker has trained by itself. Worker rank
    0 says once if it is lost. Belongs to the thread that uses the stores."""

    def __init__(self, rank: int, num_workers: int, folder: Optional[str]) -> None:
        self._rank = rank
        self._num_workers = num_workers
        self._folder = folder
        self._part: Optional[WorkersPart] = None
        self._told: Set[str] = set()

    # What codecs remembered.

    def give_back(self, key: WorkerKey, resumed: Resumed, saved: Optional[Saved]) -> None:
        """Restore the residuals of a key's codec, before the first push; `saved`: on rank 0.
        CheckpointError where this worker's part can't be read."""
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
        """What this worker had of a key, or None; CheckpointError where it can't be read."""
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
