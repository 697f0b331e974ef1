"""Asks for checkpoints, and says from which one the job goes on."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import Deque, List, Mapping, Optional, Set

from p3kv.checkpoints import Place, Saved, any_parts, marks, newest
from p3kv.common.combinations import Feature, check
from p3kv.config import Settings
from p3kv.consistency import Consistency
from p3kv.errors import ConfigError, P3Error, ProtocolError
from p3kv.wire.connection import Connection, Landing, new_memory
from p3kv.wire.fields import Header
from p3kv.wire.header import Kind
from p3kv.wire.messages import MAX_STEP, UNKNOWN, Checkpoint, CutReached, Resumed, Written, encode
from p3kv.worker.egress import Egress
from p3kv.worker.job import JobMember
from p3kv.worker.saving.cuts import Cut
from p3kv.worker.saving.own_part import OwnPart, ResumedPart
from p3kv.worker.transfers import WorkerKey

_log = logging.getLogger(__name__)

_IDENTITY_BYTES = 8
_NONE = "none"
"""In place of the identity, where no checkpoint is asked for."""
_MARKS_S = 5.0
"""How long to look for the servers' marks: file systems of several hosts show new files later."""
_LOOK_EVERY_S = 0.2
_HELD_S = 3.0
"""How long to wait for a job that ends: one that is started again has the same folder."""


class Checkpoints:
    """Worker rank 0 asks the servers for checkpoints; all workers hear from which one they go on.

    Rank 0 asks between two steps, and names for each key the round that it has pushed last. A
    server can't have ended a later one. Where rounds are each worker's own, all workers name
    theirs, and servers hold later ones back. What workers have to write is in `own`.

    Belongs to the worker's thread, except what says otherwise.
    """

    def __init__(
        self,
        place: Place,
        settings: Settings,
        keys: Mapping[int, WorkerKey],
        egress: Egress,
        job: JobMember,
    ) -> None:
        """`keys` are the worker's, by id."""
        self.own = OwnPart(place, settings.checkpoint_dir, keys, job, self._own_written)
        self.resumed_part = ResumedPart(
            place.rank, len(place.workers_hosts), settings.checkpoint_dir
        )
        self.saved: Optional[Saved] = None
        """The checkpoint from which the job goes on; on worker rank 0 only. Belongs to the thread
        that uses the stores."""
        self._place = place
        self._rank = place.rank
        self._settings = settings
        self._keys = keys
        self._egress = egress
        self._job = job
        self.cuts: Deque[Cut] = deque()
        """Checkpoints that are still to be told to the servers."""
        self._waits_for: Set[str] = set()
        """Who has not written the last checkpoint: servers, or workers."""
        self._held: Optional[int] = None
        """The descriptor by which worker rank 0 keeps other jobs from the folder."""
        self._ends = False
        """Whether the script has ended, so that no step begins any more."""
        self._finished: Optional[Future[None]] = None
        self._leaves = False
        """Whether this worker says nothing more to the servers."""
        self._problem = ""
        self._complete: List[int] = []
        """The last two complete steps."""
        self._resumed: Future[Resumed] = Future()

    # How a job begins.

    def find(self, rule: Consistency) -> None:
        """Worker rank 0 finds the checkpoint from which the job goes on, if it is to go on from
        one; in the thread that joins the job. `rule` is the job's.

        Makes the folder if there is none, and says where it is: its name may be misspelt. Raises
        NotSupportedError where there can't be checkpoints; ConfigError where a job is to begin from
        the beginning in a folder that has some; CheckpointError where none of those can be used.
        """
        folder, host = self._settings.checkpoint_dir, self._place.host
        if folder is None or self._rank != 0:
            return
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
        with suppress(OSError):  # of which the servers say more
            marks.leave(folder, self._place.mark(_worker(0)))
        _log.warning(
            "checkpoints go to %s%s", folder, f", which was made on host {host}" if made else ""
        )

    def check_folder(self) -> None:
        """Rank 0, once welcome, removes the servers' marks; ConfigError where one does not appear:
        that server has another folder of this name."""
        folder, hosts = self._settings.checkpoint_dir, self._place.servers_hosts
        if folder is None or self._rank != 0:
            return
        deadline = time.monotonic() + _MARKS_S
        left = {server: self._place.mark(_server(server)) for server in range(len(hosts))}
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
            self._job.wait(_LOOK_EVERY_S)
        who = ", ".join(f"server {server} on host {hosts[server]}" for server in left)
        raise ConfigError(
            f"worker 0 on host {self._place.host} can't use what is written to {folder} by {who}: "
            f"{problems[min(left)]}. Set P3KV_CHECKPOINT_DIR to a folder that all hosts share "
            "under one name, for one user"
        )

    def _make(self, folder: str, host: str) -> bool:
        """Makes the folder, and keeps other jobs from it; returns whether it was not there."""
        made = not os.path.lexists(folder)
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the folder {folder} for checkpoints can't be made on host {host}: "
                f"{error.strerror}; set P3KV_CHECKPOINT_DIR to one that worker 0 and every server "
                "can write to"
            ) from error
        self._hold(folder, host)
        return made

    def _hold(self, folder: str, host: str) -> None:
        deadline = time.monotonic() + _HELD_S
        while True:
            try:
                self._held = marks.hold(folder)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another job that runs now writes its checkpoints to {folder}, as host "
                        f"{host} sees it. Set P3KV_CHECKPOINT_DIR to another folder, or wait for "
                        "its end"
                    ) from None
                self._job.wait(_LOOK_EVERY_S)
            except OSError as error:
                raise ConfigError(
                    f"the folder {folder} can't be read on host {host}: {error.strerror}"
                ) from error
            else:
                break
        if self._held is not None:
            marks.remove_old(folder)

    def let_go(self) -> None:
        """Other jobs may use the folder, as far as this process is concerned."""
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def announce(self) -> None:
        """Worker rank 0 tells all workers from which checkpoint the job goes on."""
        if self._rank != 0 or not self._settings.resume:
            return
        resumed = Resumed(0, [])
        if self.saved is not None:
            saved = self.saved
            resumed = Resumed(saved.step, saved.stores, saved.identity, saved.num_workers)
            self._complete.append(saved.step)
            _log.warning("the job goes on from the checkpoint of step %d", saved.step)
        self._egress.tell(Header(Kind.RESUMED, self._rank), encode(resumed), servers=[0])

    def take_resumed(self, connection: Connection, header: Header, resumed: Resumed) -> None:
        """Takes what rank 0 has announced."""
        if self._resumed.done():
            raise ProtocolError("it said twice from which checkpoint the job goes on")
        self._resumed.set_result(resumed)

    def resumed(self) -> Resumed:
        """Wait until it is known from which checkpoint the job goes on; from the thread of stores.
        Raises the job's failure."""
        return self._resumed.result() if self._settings.resume else Resumed(0, [])

    def remember(self, key: WorkerKey, goes_on: bool) -> None:
        """Save the residuals of a key's codec in checkpoints, and restore them (`goes_on`: its
        store is in the checkpoint). In the thread of stores, before the worker's thread knows the
        key.

        Raises ConfigError where they can't be written, CheckpointError where they can't be read.
        """
        if key.codecs.gradients.remembers and key.size_elems:
            self.own.have_part()
            key.keep_memory()
        if goes_on:
            self.resumed_part.give_back(key, self.resumed(), self.saved)

    # Checkpoints.

    def add(self, cut: Cut) -> None:
        """Adds a checkpoint; before any transfer begins that does not belong to it."""
        self.cuts.append(cut)
        if cut.own:
            self._egress.tell(Header(Kind.CUT, self._rank), encode(CutReached(cut.step, cut.own)))
            self.own.copy(cut)
        self.pushed()

    def pushed(self) -> None:
        """Begin checkpoints whose pushes are all sent and that can't wait for the next step's
        slice, after a push: workers that train by themselves may push none for long, and own steps
        are not counted. The servers know the slice sizes then; those of own rounds stay."""
        while self.cuts and self._is_sent(self.cuts[0]):
            if not (self._ends or _is_early(self.cuts[0])) or (self._ends and self._waits_for):
                return
            self._begin(self.cuts.popleft())

    def add_last(self, cut: Cut) -> None:
        """Adds the checkpoint after the script's last step. It is left out for no other one."""
        self._ends = True
        self.add(cut)

    def finish(self, done: Future[None]) -> None:
        """Complete `done` when all checkpoints that were due are written, as far as this worker
        has a part."""
        self._ends, self._finished = True, done
        self.pushed()
        self._look_finished()

    def _look_finished(self) -> None:
        """End the wait to leave; rank 0 says that it asks for no more, since others keep copies."""
        waits = self.cuts or self._waits_for or (self._rank != 0 and self.own.is_needed)
        if self._finished is None or self._finished.done() or waits:
            return
        if self._rank == 0:
            self._leave_out(MAX_STEP)
        self._finished.set_result(None)

    def _leave_out(self, step: int) -> None:
        """Tell other workers, which may wait for that to leave, that this step, or an older one, is
        not asked for."""
        if self.own.has_part and len(self._place.workers_hosts) > 1:
            none = Checkpoint(step, _NONE, UNKNOWN, [])
            self._egress.tell(Header(Kind.CHECKPOINT, self._rank), encode(none), servers=[0])

    def _is_sent(self, cut: Cut) -> bool:
        shared = (store for store in cut.stores if not store.own_rounds)
        rounds = (pair for store in shared for pair in store.rounds)
        known = ((self._keys.get(key_id), round_) for key_id, round_ in rounds)
        return all(key is None or key.channel.sent >= round_ for key, round_ in known)

    def begin_step(self, step: int) -> None:
        """Copy, or on rank 0 ask for, the checkpoints that are due before a step's first slice. Not
        earlier: servers must know the slice sizes, which are announced when steps begin."""
        while self.cuts and self.cuts[0].after < step:
            self._begin(self.cuts.popleft())

    def _begin(self, cut: Cut) -> None:
        if not cut.stores:
            return  # nobody has them any more
        if self._rank == 0:
            self._ask(cut)
        elif not cut.own:
            self.own.copy(cut)

    def _ask(self, cut: Cut) -> None:
        if self._waits_for:
            _log.warning(
                "there is no checkpoint of step %d: the one before is still being written (by %s). "
                "Set P3KV_CHECKPOINT_EVERY to more steps, or P3KV_CHECKPOINT_DIR to a folder on a "
                "faster disk",
                cut.step, ", ".join(sorted(self._waits_for)),
            )  # fmt: skip
            if cut.own:
                self._egress.tell(Header(Kind.CUT, self._rank), encode(CutReached(cut.step, [])))
            self._leave_out(cut.step)
            return
        self._waits_for = set(map(_server, range(len(self._place.servers_hosts))))
        self._problem = ""
        keep_from = self._complete[0] if self._complete else UNKNOWN
        identity = secrets.token_hex(_IDENTITY_BYTES)
        all_write = bool(cut.trained or self.own.remembered(cut))
        checkpoint = Checkpoint(
            cut.step, identity, keep_from, cut.stores,
            self._place.host if cut.unpushed or all_write else "",
            list(self._place.workers_hosts[1:]) if all_write else [],
        )  # fmt: skip
        self._egress.tell(Header(Kind.CHECKPOINT, self._rank), encode(checkpoint))
        if checkpoint.workers_host:
            self._waits_for.update(map(_worker, range(1 + len(checkpoint.others_hosts))))
            if not cut.own:
                self.own.copy(cut)
            self.own.write(checkpoint)

    def land_asked(self, connection: Connection, header: Header) -> Landing:
        """Lands what worker rank 0 has asked for; ProtocolError where it can't be."""
        if self._rank == 0 or header.rank != 0:
            raise ProtocolError("it asked for a checkpoint, and only server 0 asks other workers")
        return new_memory(header)

    def take_asked(self, connection: Connection, header: Header, checkpoint: Checkpoint) -> None:
        """Takes what worker rank 0 has asked for."""
        if checkpoint.stores:
            self.own.write(checkpoint)
        else:
            self.own.leave_out(checkpoint.step)
            self._look_finished()

    def take_written(self, connection: Connection, header: Header, written: Written) -> None:
        """Takes a server's answer, or that of another worker, which server 0 passes on."""
        server = header.rank
        name = _server(server) if written.worker == UNKNOWN else _worker(written.worker)
        by_itself = written.worker == UNKNOWN
        if name not in self._waits_for or not (by_itself or (server == 0 and written.worker > 0)):
            raise ProtocolError("it has written a checkpoint for which nobody has asked")
        if written.problem:
            _log.warning("%s has not written %s", name, written.problem)
        self._note(name, written)

    def _own_written(self, written: Written) -> None:
        """Takes note of this worker's own part, or that it is not needed."""
        if self._rank == 0:
            self._note(_worker(0), written)
        elif not self._leaves:
            self._egress.tell(Header(Kind.WRITTEN, self._rank), encode(written), servers=[0])
            self._look_finished()

    def leave(self) -> None:
        """Has this worker tell the servers nothing more."""
        self._leaves = True

    def fail(self, error: P3Error) -> None:
        """Ends what waits with an error."""
        if not self._resumed.done():
            self._resumed.set_exception(error)
        if self._finished is not None and not self._finished.done():
            self._finished.set_exception(error)

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most; from any thread."""
        self.own.close()
        if self._rank == 0 and self._settings.checkpoint_dir is not None:
            marks.remove(self._settings.checkpoint_dir, self._place.mark(_worker(0)))
        self.let_go()

    def _note(self, name: str, written: Written) -> None:
        self._waits_for.remove(name)
        self._problem = self._problem or written.problem
        if not self._waits_for and not self._problem:
            self._complete = [*self._complete[-1:], written.step]
            _log.info("the checkpoint of step %d is complete", written.step)
        if not self._waits_for and self._ends:
            self.pushed()
            self._look_finished()


def _is_early(cut: Cut) -> bool:
    """Whether a checkpoint does not wait for the next step's first slice."""
    return bool(cut.trained or cut.own)


def _server(rank: int) -> str:
    return f"server {rank}"


def _worker(rank: int) -> str:
    return f"worker {rank}"
