"""Asks for checkpoints, writes worker rank 0's part, and says from which one the job goes on."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Callable, Deque, List, Optional, Sequence, Set, Tuple

from p3kv.checkpoints import (
    WORKER,
    CutOfKey,
    KeyOutline,
    Outline,
    Saved,
    Writer,
    any_parts,
    marks,
    newest,
)
from p3kv.common.combinations import Feature, check
from p3kv.config import Settings
from p3kv.consistency import Consistency
from p3kv.errors import ConfigError, P3Error, ProtocolError
from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header
from p3kv.wire.framing import Landing, message_landing
from p3kv.wire.header import Kind
from p3kv.wire.messages import (
    UNKNOWN,
    Checkpoint,
    Resumed,
    Written,
    encode,
)
from p3kv.worker.cuts import Cut, Unpushed

_log = logging.getLogger(__name__)

_IDENTITY_BYTES = 8
_MARKS_S = 5.0
"""How long to look for the servers' marks: file systems of several hosts show new files later."""
_LOOK_EVERY_S = 0.2


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
        call_soon: Callable[..., None],
    ) -> None:
        """`tell` sends a frame without a slice to servers; `call_soon` has the worker's thread call
        something, from any thread."""
        self.saved: Optional[Saved] = None
        """The checkpoint from which the job goes on; on worker rank 0 only. Belongs to the thread
        that uses the stores."""
        self._rank = rank
        self._settings = settings
        self._tell = tell
        self._num_servers = num_servers
        self._cuts: Deque[Cut] = deque()
        self._waits_for: Set[str] = set()
        """Who has not written the last checkpoint: servers, or this worker."""
        self._own_name = f"worker {rank}"
        self._own_values: List[Unpushed] = []
        """That are in this worker's part of it."""
        self._writer = Writer(
            lambda step, problem: call_soon(self._written, self._own_name, Written(step, problem))
        )
        self._host = ""
        self._servers_hosts: Sequence[str] = ()
        self._problem = ""
        self._complete: List[int] = []
        """The last two complete steps."""
        self._resumed: Future[Resumed] = Future()

    # How a job begins.

    def find(self, host: str, rule: Consistency) -> None:
        """Worker rank 0 finds the checkpoint from which the job goes on, if it is to go on from
        one; in the thread that joins the job. `host` is this host's address, `rule` the job's.

        Makes the folder if there is none, and says where it is: its name may be misspelt. Raises
        NotSupportedError where there can't be checkpoints; ConfigError where a job is to begin from
        the beginning in a folder that has some; CheckpointError where none of those can be used.
        """
        folder = self._settings.checkpoint_dir
        if folder is None or self._rank != 0:
            return
        self._host = host
        what = f"P3KV_CONSISTENCY={self._settings.consistency}"
        check({Feature.CHECKPOINTS, *rule.features}, what)
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
        hosts: Sequence[str],
        mark: Callable[[int], bytes],
        wait: Callable[[float], None],
    ) -> None:
        """On worker rank 0, when all servers have welcomed it: removes their marks from the folder.
        Raises ConfigError for servers whose marks do not appear there in time: they have other
        folders of this name.

        `hosts` are the servers'; `mark(server)` is a server's mark; `wait(seconds)` raises the
        job's failure.
        """
        folder = self._settings.checkpoint_dir
        if folder is None or self._rank != 0:
            return
        self._servers_hosts = hosts
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
            f"worker 0 on host {self._host} can't use what is written to {folder} by {who}: "
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
        self._tell(Header(Kind.RESUMED, self._rank), encode(Resumed(step, stores)), servers=[0])

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
            self._ask(cut)

    def _ask(self, cut: Cut) -> None:
        if self._waits_for:
            _log.warning(
                "there is no checkpoint of step %d: the one before is still being written (by %s). "
                "Set P3KV_CHECKPOINT_EVERY to more steps, or P3KV_CHECKPOINT_DIR to a folder on a "
                "faster disk",
                cut.step, ", ".join(sorted(self._waits_for)),
            )  # fmt: skip
            return
        self._waits_for, self._problem = set(map(_server, range(self._num_servers()))), ""
        keep_from = self._complete[0] if self._complete else UNKNOWN
        identity = secrets.token_hex(_IDENTITY_BYTES)
        checkpoint = Checkpoint(
            cut.step, identity, keep_from, cut.stores, self._host if cut.unpushed else ""
        )
        self._tell(Header(Kind.CHECKPOINT, self._rank), encode(checkpoint))
        if cut.unpushed:
            self._write_own(checkpoint, cut.unpushed)

    def _write_own(self, checkpoint: Checkpoint, unpushed: List[Tuple[int, Unpushed]]) -> None:
        """Begins this worker's part of a checkpoint."""
        folder = self._settings.checkpoint_dir
        assert folder is not None
        self._waits_for.add(self._own_name)
        self._own_values = [one for _, one in unpushed]
        keys = [
            KeyOutline(
                store, one.key, one.name, one.shape, one.dtype, "dense",
                [(0, math.prod(one.shape))], False, None, [],
            )
            for store, one in unpushed
        ]  # fmt: skip
        outline = Outline(
            1, checkpoint.identity, checkpoint.step, 0, list(self._servers_hosts),
            [store.known for store in checkpoint.stores], keys, self._host, WORKER,
        )  # fmt: skip

        def cuts() -> List[CutOfKey]:
            return [
                CutOfKey(key, [one.value.result().reshape(-1)], [])
                for key, (_, one) in zip(keys, unpushed)
            ]

        self._writer.begin(folder, outline, cuts)

    def land_written(self, connection: Connection, header: Header) -> Landing:
        """Takes a server's answer."""
        server = _server(header.rank)
        if server not in self._waits_for:
            raise ProtocolError("it has written a checkpoint for which nobody has asked")
        return message_landing(header, Written, partial(self._written, server))

    def fail(self, error: P3Error) -> None:
        """Ends what waits with an error."""
        if not self._resumed.done():
            self._resumed.set_exception(error)

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most; from any thread."""
        for one in self._own_values:
            one.value.cancel()  # unless it is known, or being copied
        self._writer.close()

    def _written(self, name: str, written: Written) -> None:
        self._waits_for.remove(name)
        if name == self._own_name:
            self._own_values = []
        if written.problem:
            if name != self._own_name:
                _log.warning("%s has not written %s", name, written.problem)
            self._problem = written.problem
        if not self._waits_for and not self._problem:
            self._complete = [*self._complete[-1:], written.step]
            _log.info("the checkpoint of step %d is complete", written.step)


def _server(rank: int) -> str:
    return f"server {rank}"
