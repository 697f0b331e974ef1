"""When there is a checkpoint, what belongs to it, and from which one the job goes on."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Set

from p3kv.checkpoints import Saved, any_parts, marks, newest
from p3kv.config import Settings
from p3kv.errors import ConfigError, P3Error, ProtocolError
from p3kv.wire.connection import Connection
from p3kv.wire.framing import Landing, message_landing
from p3kv.wire.header import Header, Kind
from p3kv.wire.messages import (
    UNKNOWN,
    Checkpoint,
    Resumed,
    ResumedStore,
    StoreAtCut,
    Written,
    encode,
)

_log = logging.getLogger(__name__)

_IDENTITY_BYTES = 8
_MARKS_S = 5.0
"""How long to look for the servers' marks: file systems of several hosts show new files later."""
_LOOK_EVERY_S = 0.2


class Cut(NamedTuple):
    """What belongs to a checkpoint."""

    after: int
    """The last step whose pushes do, of those that all stores count."""
    step: int
    """As the script counts."""
    stores: List[StoreAtCut]


class Checkpoints:
    """Worker rank 0 asks the servers for checkpoints; all workers hear from which one they go on.

    Rank 0 alone knows which step its pushes belong to. It asks between two steps, and names for
    each key the round that it has pushed last. A server can't have ended a later one.

    Belongs to the worker's thread, except what says otherwise.
    """

    def __init__(
        self,
        rank: int,
        settings: Settings,
        tell: Callable[..., None],
        num_servers: Callable[[], int],
    ) -> None:
        """`tell` sends a frame without a slice to servers."""
        self.saved: Optional[Saved] = None
        """The checkpoint from which the job goes on; on worker rank 0 only. Belongs to the thread
        that uses the stores."""
        self._rank = rank
        self._settings = settings
        self._tell = tell
        self._num_servers = num_servers
        self._cuts: Deque[Cut] = deque()
        self._waits_for: Set[int] = set()
        """Servers that have not answered for the last checkpoint."""
        self._problem = ""
        self._complete: List[int] = []
        """The last two complete steps."""
        self._resumed: Future[Resumed] = Future()

    # How a job begins.

    def find(self, host: str, rounds_end_with_all: bool) -> None:
        """Worker rank 0 finds the checkpoint from which the job goes on, if it is to go on from
        one; in the thread that joins the job. `host` is this host's address;
        `rounds_end_with_all`: no round ends before all workers have pushed for it.

        Makes the folder if there is none, and says where it is: its name may be misspelt. Raises
        ConfigError where there can't be checkpoints, and where a job is to begin from the beginning
        in a folder that has some; CheckpointError where none of those can be used.
        """
        folder = self._settings.checkpoint_dir
        if folder is None or self._rank != 0:
            return
        if not rounds_end_with_all:
            raise ConfigError(
                f"P3KV_CONSISTENCY={self._settings.consistency} has no checkpoints: they need "
                "rounds that end with the pushes of all workers"
            )
        made = self._make(folder, host)
        if self._settings.resume:
            self.saved = newest(folder, host)
        elif any_parts(folder):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier run, which this one would mix with its "
                "own. Set P3KV_RESUME=1 to go on from them, or P3KV_CHECKPOINT_DIR to another "
                "folder, or remove the files"
            )
        _log.warning(
            "checkpoints go to %s%s", folder, f", which was made on host {host}" if made else ""
        )

    def check_folder(
        self,
        host: str,
        hosts: Sequence[str],
        mark: Callable[[int], bytes],
        wait: Callable[[float], None],
    ) -> None:
        """On worker rank 0, when all servers have welcomed it: removes their marks from the folder.
        Raises ConfigError for servers whose marks do not appear there in time: they have other
        folders of this name.

        `host` is this one, `hosts` are the servers'; `mark(server)` is a server's mark;
        `wait(seconds)` raises the job's failure.
        """
        folder = self._settings.checkpoint_dir
        if folder is None or self._rank != 0:
            return
        deadline = time.monotonic() + _MARKS_S
        left = {server: mark(server) for server in range(len(hosts))}
        while True:
            try:
                problems = marks.take(folder, left)
            except OSError as error:
                raise ConfigError(f"the folder {folder} can't be read: {error.strerror}") from error
            left = {server: left[server] for server in problems}
            if not left:
                return
            if time.monotonic() > deadline:
                break
            wait(_LOOK_EVERY_S)
        who = ", ".join(f"server {server} on host {hosts[server]}" for server in left)
        raise ConfigError(
            f"worker 0 on host {host} can't use what is written to {folder} by {who}: "
            f"{problems[min(left)]}. Set P3KV_CHECKPOINT_DIR to a folder that all hosts share "
            "under one name, for one user"
        )

    @staticmethod
    def _make(folder: str, host: str) -> bool:
        """Returns whether the folder was not there before."""
        made = not os.path.lexists(folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} for checkpoints can't be made on host {host}: "
                f"{error.strerror}; set P3KV_CHECKPOINT_DIR to one that worker 0 and every server "
                "can write to"
            ) from error
        marks.remove_old(folder)
        return made

    def announce(self) -> None:
        """Worker rank 0 tells all workers from which checkpoint the job goes on."""
        if self._rank != 0 or not self._settings.resume:
            return
        step, stores = 0, []
        if self.saved is not None:
            step, stores = self.saved.step, self.saved.stores
            self._complete.append(step)
            _log.warning("the job goes on from the checkpoint of step %d", step)
        self._tell(Kind.RESUMED, encode(Resumed(step, stores)), servers=[0])

    def land_resumed(self, connection: Connection, header: Header) -> Landing:
        """Takes what rank 0 has announced."""
        if self._resumed.done():
            raise ProtocolError("it said twice from which checkpoint the job goes on")
        return message_landing(header, Resumed, self._resumed.set_result)

    def resumed(self) -> Resumed:
        """From which checkpoint the job goes on; waits until that is known. From the thread that
        uses the stores; raises the job's failure."""
        return self._resumed.result() if self._settings.resume else Resumed(0, [])

    # Checkpoints.

    def add(self, cut: Cut) -> None:
        """Adds a checkpoint; before any transfer begins that does not belong to it."""
        self._cuts.append(cut)

    def begin_step(self, step: int) -> None:
        """Asks the servers for the checkpoints that are due; before the first slice of a step is
        sent.

        Not earlier: a server must know how large the slices are that end the rounds in question,
        and new sizes are announced when steps begin.
        """
        while self._cuts and self._cuts[0].after < step:
            cut = self._cuts.popleft()
            self._ask(cut.step, cut.stores)

    def _ask(self, step: int, stores: List[StoreAtCut]) -> None:
        if self._waits_for:
            _log.warning(
                "there is no checkpoint of step %d: the one before is still being written (by "
                "server %s). Set P3KV_CHECKPOINT_EVERY to more steps, or P3KV_CHECKPOINT_DIR to a "
                "folder on a faster disk",
                step, ", ".join(map(str, sorted(self._waits_for))),
            )  # fmt: skip
            return
        self._waits_for, self._problem = set(range(self._num_servers())), ""
        keep_from = self._complete[0] if self._complete else UNKNOWN
        identity = secrets.token_hex(_IDENTITY_BYTES)
        self._tell(Kind.CHECKPOINT, encode(Checkpoint(step, identity, keep_from, stores)))

    def land_written(self, connection: Connection, header: Header) -> Landing:
        """Takes a server's answer."""
        if header.rank not in self._waits_for:
            raise ProtocolError("it has written a checkpoint for which nobody has asked")
        return message_landing(header, Written, partial(self._written, header.rank))

    def fail(self, error: P3Error) -> None:
        """Ends what waits with an error."""
        if not self._resumed.done():
            self._resumed.set_exception(error)

    def _written(self, server: int, written: Written) -> None:
        self._waits_for.remove(server)
        if written.problem:
            _log.warning("server %d has not written %s", server, written.problem)
            self._problem = written.problem
        if not self._waits_for and not self._problem:
            self._complete = [*self._complete[-1:], written.step]
            _log.info("the checkpoint of step %d is complete", written.step)


class Cuts:
    """Says between which steps there is a checkpoint. Belongs to the thread that uses the stores.

    Where several stores take turns, as for a GAN, a checkpoint is before a step of the store that
    leads: the one that has made the first step. So all have made the same number of iterations.
    Another leads when it steps and the one that led does not any more.
    """

    def __init__(self, every: int, resumed: Callable[[], Resumed]) -> None:
        """`every`: how many steps of the store that leads. `resumed()` waits until it is known from
        which checkpoint the job goes on."""
        self._every = every
        self._resumed = resumed
        self._stores: List[Callable[[], StoreAtCut]] = []
        self._step: Optional[int] = None
        """Counts the steps of all stores, in this run and before it."""
        self._leader: Optional[int] = None
        self._followed: Dict[int, int] = {}
        """By store: its steps since the last one of the store that leads."""
        self.count = 0
        """How many checkpoints were due."""

    def add(self, at_cut: Callable[[], StoreAtCut]) -> Optional[ResumedStore]:
        """Adds the next store, which says what it is between two steps; returns what it is in the
        checkpoint from which the job goes on."""
        number = len(self._stores)
        self._stores.append(at_cut)
        return next((one for one in self._resumed().stores if one.store == number), None)

    def due(self, store: int, steps: int) -> Optional[int]:
        """To be called before a store's step, with the number of those that it has made in this
        run and before it. Returns the step of the checkpoint that is due now."""
        if self._step is None:
            self._step = self._resumed().step
        step, self._step = self._step, self._step + 1
        is_first = self._leader is None
        if is_first or self._followed.get(store, 0) >= self._every:
            self._leader = store
        if store != self._leader:
            self._followed[store] = self._followed.get(store, 0) + 1
            return None
        self._followed.clear()
        if is_first or steps % self._every:
            return None  # the first step is where the run begins
        self.count += 1
        return step

    def stores(self) -> List[StoreAtCut]:
        """All stores as they are now, between two steps."""
        return [at_cut() for at_cut in self._stores]
