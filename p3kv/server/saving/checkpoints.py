"""Takes part in checkpoints: copies what this server keeps at the end of a step, and writes it."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Mapping, Optional, Set

from msgspec.structs import replace

from p3kv.checkpoints import Contents, Outline, Place, Writer, marks
from p3kv.errors import ConfigError, ProtocolError
from p3kv.server.engine import OwnRounds, Record, ServerKey
from p3kv.server.saving.key_cuts import KeyCut, OwnCuts
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT, Kind
from p3kv.wire.loop import Loop
from p3kv.wire.messages import UNKNOWN, Checkpoint, CutReached, StoreAtCut, Written, encode


class _Open:
    """A checkpoint that is not copied completely."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.cuts: Dict[int, KeyCut] = {}
        """By the key's id."""
        self.incomplete: Set[int] = set()
        """Ids of the keys that are not copied completely."""

    def add(self, key_id: int, cut: KeyCut) -> None:
        self.cuts[key_id] = cut
        self.note_copied(cut)
        if cut.missing:
            self.incomplete.add(key_id)

    def note_copied(self, cut: KeyCut) -> None:
        """Something was copied, perhaps of another checkpoint."""
        key_id = cut.declared.key_id
        if not cut.missing and self.cuts.get(key_id) is cut:
            self.incomplete.discard(key_id)


class Checkpoints:
    """Copies each slice when it ends the round that worker rank 0 has named, and writes the copies.

    Rank 0 asks for a checkpoint before it pushes for any later round, so no slice has ended a later
    one. A round that has ended is copied at once, any other when it ends: no worker waits, unless
    rounds are each worker's own (`OwnCuts`). The file is written by a thread. Rank 0 asks for the
    next checkpoint when all servers have answered.

    Belongs to the server's thread.
    """

    def __init__(
        self,
        place: Place,
        folder: Optional[str],
        keys: Mapping[int, ServerKey],
        left: Set[int],
        workers: Workers,
        loop: Loop,
    ) -> None:
        """`folder`: where files go, if the job has checkpoints; this server leaves its mark there,
        or raises ConfigError. `left`: ranks of workers that have left, for which nobody waits."""
        self._open: Optional[_Open] = None
        self._own = OwnCuts(keys, len(place.workers_hosts), left)
        self._place = place
        self._folder = folder
        self._keys = keys
        self._workers = workers
        self._writes = False
        if folder is not None:
            _leave_mark(folder, place)
        self._writer = Writer(lambda step, problem: loop.call_soon(self._written, step, problem))

    def begin(self, checkpoint: Checkpoint) -> None:
        """Begins a checkpoint; ProtocolError for one that can't be right."""
        if self._open is not None or self._writes:
            raise ProtocolError("it asked for a checkpoint before it had the last one")
        if self._folder is None:
            raise ProtocolError("it asked for a checkpoint in a job that has none")
        opened = self._open = _Open(checkpoint)
        own = any(store.own_rounds for store in checkpoint.stores)
        reached = self._own.take(checkpoint.step) if own else {}
        for store in checkpoint.stores:
            for key_id, round_ in store.rounds:
                if not store.own_rounds:
                    self._begin_key(opened, store, key_id, round_)
                elif key_id in reached:  # else on other servers
                    cut = reached[key_id]
                    # Of one worker's names for all keys: the others' may be shifted.
                    cut.declared = replace(cut.declared, name=store.names.get(key_id))
                    opened.add(key_id, cut)
        self._write_if_complete()

    def reach(self, rank: int, said: CutReached) -> None:
        """A worker of own rounds has reached a checkpoint; rank 0 may say that it is left out.
        ProtocolError for one that can't be right."""
        if self._folder is None:
            raise ProtocolError("it has reached a checkpoint in a job that has none")
        if said.stores:
            self._note_copied(self._own.reach(rank, said))
        elif rank == 0:
            self._own.drop(said.step)
        else:
            raise ProtocolError("it has reached a checkpoint without stores")

    @property
    def waits_for_rounds(self) -> bool:
        """Whether anything is to be copied when records end rounds."""
        return self._open is not None or bool(self._own.waiting)

    def record_ended(self, record: Record[Any]) -> None:
        """Copy a record that has ended a round, before it ends the next, if that is waited for."""
        if isinstance(record.rounds, OwnRounds):
            self._note_copied(self._own.record_ended(record))
            return
        cut = None if self._open is None else self._open.cuts.get(record.plan.key_id)
        if cut is not None and cut.round == record.round:
            cut.copy(record)
            self._note_copied([cut])

    def worker_left(self) -> Iterator[Record[Any]]:
        """To be called when a worker has left; gives the records that may end later rounds now."""
        for cut, record in self._own.left():
            self._note_copied([cut])
            yield record

    def close(self) -> None:
        """Waits for a file that is being written, for some seconds at most."""
        if self._folder is not None:
            marks.remove(self._folder, _mark(self._place))
        self._writer.close()

    def _begin_key(self, opened: _Open, store: StoreAtCut, key_id: int, round_: int) -> None:
        key = self._keys.get(key_id)
        if key is None:
            return  # on other servers
        records = key.records(round_)
        ended = [one for one in records if one.round >= round_]
        if any(one.round > round_ for one in ended):
            raise ProtocolError(
                f"it asked for round {round_} of {key.plan.called}, which has ended a later one"
            )
        # Of one worker's names for all keys: the others' may be shifted.
        declared = replace(key.declared, name=store.names.get(key_id))
        cut = KeyCut(declared, round_, store.whole, len(records))
        for one in ended:
            cut.copy(one)
        opened.add(key_id, cut)

    def _note_copied(self, cuts: List[KeyCut]) -> None:
        if self._open is not None and cuts:
            for cut in cuts:
                self._open.note_copied(cut)
            self._write_if_complete()

    def _write_if_complete(self) -> None:
        assert self._open is not None and self._folder is not None
        if self._open.incomplete:
            return
        complete, self._open = self._open, None
        checkpoint = complete.checkpoint
        keys = [key for cut in complete.cuts.values() for key in cut.complete]
        outline = Outline(
            1, checkpoint.identity, checkpoint.step, self._place.rank,
            list(self._place.servers_hosts),
            [store.known for store in checkpoint.stores], [key.outline for key in keys],
            checkpoint.workers_host, others_hosts=checkpoint.others_hosts,
            is_first=checkpoint.keep_from == UNKNOWN,
        )  # fmt: skip
        self._writes = True
        self._writer.begin(self._folder, outline, lambda: Contents(keys), checkpoint.keep_from)

    def _written(self, step: int, problem: str) -> None:
        """Tells worker rank 0 that this server's part of a step is written, or why it is not."""
        self._writes = False
        words = encode(Written(step, problem))
        self._workers.tell_rank_0(Header(Kind.WRITTEN, self._place.rank), memoryview(words))


def _mark(place: Place) -> bytes:
    return place.mark(f"server {place.rank}")


def _leave_mark(folder: str, place: Place) -> None:
    try:
        marks.leave(folder, _mark(place))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"there is no folder {folder} on host {place.host}, where this server is to write "
            "checkpoints; worker 0 has it. Set P3KV_CHECKPOINT_DIR to a folder that all hosts "
            "share under the same name"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"checkpoints can't be written to {folder} on host {place.host}: {error.strerror}; set "
            "P3KV_CHECKPOINT_DIR to a folder that every server can write to"
        ) from error


class PartsOfWorkers:
    """Server 0 passes on what worker rank 0 asks of the other workers, and what they answer.
    Workers have no connections to each other. Belongs to the server's thread."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._asked: Optional[Checkpoint] = None
        """What worker rank 0 has asked last."""
        self._left_out: Optional[Checkpoint] = None
        """What it has said last of checkpoints for which it does not ask."""
        self._step = 0
        self._missing: Set[int] = set()
        """Ranks of the workers that have not answered it."""

    def ask(self, checkpoint: Checkpoint) -> None:
        """Asks for the parts of a checkpoint. Raises ProtocolError while the parts of the one
        before are missing."""
        if self._missing:
            raise ProtocolError("it asked for a checkpoint before it had the last one")
        self._asked, self._step = checkpoint, checkpoint.step
        self._missing = set(range(1, 1 + len(checkpoint.others_hosts)))
        for rank in sorted(self._missing):
            if rank in self._workers.done:
                self.left(rank)
            elif rank in self._workers.connections:
                self._ask(rank)

    def leave_out(self, checkpoint: Checkpoint) -> None:
        """Tells the workers for which checkpoints nobody asks."""
        self._left_out = checkpoint
        for rank, connection in self._workers.connections.items():
            if rank != 0 and self._workers.listens(connection):
                self._tell(rank, checkpoint)

    def welcomed(self, rank: int) -> None:
        """Ask a new worker for its missing part of the last checkpoint, and tell it which are left
        out."""
        self._ask(rank)
        if self._left_out is not None and rank != 0:
            self._tell(rank, self._left_out)

    def take_written(self, connection: Connection, header: Header, written: Written) -> None:
        """Takes a worker's answer."""
        if header.rank not in self._missing:
            raise ProtocolError("it has written a checkpoint for which nobody has asked")
        self._written(header.rank, written)

    def left(self, rank: int) -> None:
        """A worker says nothing more."""
        if rank in self._missing:
            self._written(rank, Written(self._step, "its part: it has left the job"))

    def _ask(self, rank: int) -> None:
        if rank in self._missing and self._asked is not None:
            self._tell(rank, self._asked)

    def _tell(self, rank: int, checkpoint: Checkpoint) -> None:
        words = memoryview(encode(checkpoint))
        frame = Frame(URGENT, Header(Kind.CHECKPOINT, 0), words)
        self._workers.connections[rank].writer.push(frame)

    def _written(self, rank: int, written: Written) -> None:
        self._missing.remove(rank)
        words = encode(replace(written, worker=rank))
        self._workers.tell_rank_0(Header(Kind.WRITTEN, 0), memoryview(words))
