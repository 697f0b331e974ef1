"""Has workers write their parts of a checkpoint, and tells worker rank 0 when they are written."""

from __future__ import annotations

from typing import Optional, Set

from msgspec.structs import replace

from p3kv.errors import ProtocolError
from p3kv.server.workers import Workers
from p3kv.wire.connection import Connection
from p3kv.wire.fields import Header
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT, Kind
from p3kv.wire.messages import Checkpoint, Written, encode


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
        """Asks a worker that takes frames now for its part of the last checkpoint, if it is
        missing, and then tells it for which ones nobody asks."""
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
