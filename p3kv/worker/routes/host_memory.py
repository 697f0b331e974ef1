"""The workers of a host: which one carries a slice, and the memory that they share for each key
with their gradients and values. Each writes its own, and reads the others'."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import numpy as np

from p3kv.errors import ConfigError, ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import KeyHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import INITIAL_ROUND, URGENT, Kind
from p3kv.wire.messages import SharedMemory, encode
from p3kv.wire.rows import NUMBER, Rows, check_numbers
from p3kv.worker.transfers import WorkerKey

_EXTENT_BYTES = 64 << 20
"""Small keys share an extent, so that a process needs few descriptors. The system takes memory for
the pages that are written, and not before."""
_ALIGNED_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An extent keeps its size, whoever has it: who reads behind the end of a file is ended by the
system (SIGBUS)."""


class Carriers:
    """The workers of this host, some of which may have left. Belongs to the worker's thread."""

    def __init__(
        self, rank: int, neighbours: Mapping[int, Connection], deterministic: bool
    ) -> None:
        """`rank` is this worker's; `neighbours` are there before the first key is declared."""
        self._rank = rank
        self._neighbours = neighbours
        self._deterministic = deterministic
        self._all: List[int] = []
        self._left: Dict[int, Mapping[int, int]] = {}
        """By neighbour that has left, and key, the last round for which it has pushed."""

    def leave(self, rank: int, last_rounds: Mapping[int, int]) -> None:
        """A neighbour has left. By key, the last round for which it has pushed, if there is any."""
        self._left[rank] = last_rounds

    def have(self, rank: int) -> bool:
        """Whether a worker of the host has not left."""
        return rank not in self._left

    def adding(self, key_id: int, round: int) -> Sequence[int]:
        """The ranks of those that push for a round, as far as is known, in ascending order."""
        if len(self._all) <= len(self._neighbours):
            self._all = sorted([self._rank, *self._neighbours])
        if not self._left:
            return self._all
        return [
            rank
            for rank in self._all
            if rank not in self._left or round <= self._left[rank].get(key_id, INITIAL_ROUND)
        ]

    def carrier(self, key: WorkerKey, piece: Slice, round: int) -> int:
        """The worker that sends and receives a slice for all.

        All carry alike; in deterministic mode it is the first one, so that the sums of hosts are
        added in the same order whatever the size of slices. What a codec keeps back of sums stays
        with one worker, so there it is the same one for all that a server keeps. In place of one
        that has left comes the next one in turn, so a worker that carries a slice of a round never
        ceases to.
        """
        adding = self.adding(key.key_id, round)
        ranks = self._all
        part = piece.server if key.codecs.gradients.remembers else piece.index
        turn = 0 if self._deterministic else (key.key_id + part) % len(ranks)
        if len(adding) == len(ranks):
            return ranks[turn]
        return next(rank for rank in ranks[turn:] + ranks[:turn] if rank in adding)


class HostMemory:
    """This worker's memory, which its neighbours read, and theirs.

    For each key it has what its worker adds, and behind that, as much for values. Of a key of rows
    it has the rows of each server, from where the server's run begins, and behind that their
    numbers: the system gives memory only to what is written. Belongs to the worker's thread.
    """

    def __init__(self, rank: int, neighbours: Mapping[int, Connection]) -> None:
        self._rank = rank
        self._neighbours = neighbours
        self._own = OwnMemory()
        self._theirs = TheirMemory()
        self._memory: Dict[Tuple[int, int], np.ndarray] = {}
        """By rank and key."""
        self._wide_sums: Dict[int, np.ndarray] = {}
        """By key, sums that this worker sends of half-precision gradients."""

    def open(self, connection: Connection, header: KeyHeader, place: SharedMemory) -> None:
        """Opens the memory that a neighbour shares for a key."""
        rank, key_id = header.rank, header.key
        if (rank, key_id) in self._memory:
            raise ProtocolError(f"it has shared memory for key {key_id} before")
        self._memory[rank, key_id] = self._theirs.at(place)

    def hand_in(self, key: WorkerKey, piece: Slice, gradient: Any) -> int:
        """Copies this worker's part of a sum to where neighbours read it; returns how many rows it
        has, of a key of rows."""
        if not key.touched_only:
            self.own_part(key, piece)[:] = gradient
            return 0
        rows = len(gradient.numbers)
        part = self.own_part(key, piece, rows)
        part.numbers[:], part.elements[:] = gradient
        return rows

    def own_part(self, key: WorkerKey, piece: Slice, rows: int = 0) -> Any:
        """This worker's part of a sum, where neighbours read it."""
        return _part(self._own_memory(key), key, piece, rows)

    def own_values(self, key: WorkerKey) -> np.ndarray:
        """The bytes of the values that this worker gives its neighbours."""
        return self._own_memory(key)[key.size_bytes :]

    def own_value(self, key: WorkerKey, piece: Slice) -> np.ndarray:
        """Where a slice's value goes that this worker gives its neighbours."""
        return _elements(self.own_values(key), key, piece)

    def part(self, rank: int, key: WorkerKey, piece: Slice, rows: int = 0) -> Any:
        """A neighbour's part of a sum; ProtocolError if it shares none, or not so many rows."""
        memory = self._of(rank, key)
        if not 0 <= rows * key.touched_only <= piece.length // key.row_elems:
            raise ProtocolError(f"worker {rank} shares {rows} rows of {key.called}")
        part = _part(memory, key, piece, rows)
        if key.touched_only:
            part = Rows(part.numbers.copy(), part.elements)
            check_numbers(part.numbers, 0, piece.length // key.row_elems)
        return part

    def value(self, rank: int, key: WorkerKey, piece: Slice) -> np.ndarray:
        """A slice's value that a neighbour has; ProtocolError if it shares none."""
        return _elements(self._of(rank, key)[key.size_bytes :], key, piece)

    def of_sum(self, key: WorkerKey, piece: Slice) -> np.ndarray:
        """Where this worker sums a slice: in the place of its own part, which it does not share,
        unless sums are wider."""
        if key.sum_dtype == key.numpy_dtype:
            return _elements(self._own_memory(key), key, piece)
        wide = self._wide_sums.get(key.key_id)
        if wide is None:
            wide = self._wide_sums[key.key_id] = np.empty(key.size_elems, key.sum_dtype)
        return wide[piece.offset : piece.offset + piece.length]

    def close(self) -> None:
        """Shares nothing with those that have not opened it. May be called twice."""
        self._own.close()

    def _of(self, rank: int, key: WorkerKey) -> np.ndarray:
        memory = self._memory.get((rank, key.key_id))
        if memory is None or len(memory) != _shared_bytes(key):
            raise ProtocolError(f"worker {rank} shares no memory for {key.called}")
        return memory

    def _own_memory(self, key: WorkerKey) -> np.ndarray:
        memory = self._memory.get((self._rank, key.key_id))
        if memory is None:
            memory, place = self._own.take(_shared_bytes(key))
            self._memory[self._rank, key.key_id] = memory
            words = memoryview(encode(place))
            header = KeyHeader(Kind.MEMORY, self._rank, key=key.key_id)
            for connection in self._neighbours.values():
                connection.writer.push(Frame(URGENT, header, words))
        return memory


def _shared_bytes(key: WorkerKey) -> int:
    if key.touched_only:
        return key.size_bytes + key.size_elems // key.row_elems * NUMBER.itemsize
    return 2 * key.size_bytes


def _part(memory: np.ndarray, key: WorkerKey, piece: Slice, rows: int) -> Any:
    """A worker's elements of a slice, or so many of its rows for a server."""
    elements = _elements(memory, key, piece)
    if not key.touched_only:
        return elements
    first = key.size_bytes + piece.offset // key.row_elems * NUMBER.itemsize
    numbers = memory[first : first + rows * NUMBER.itemsize].view(NUMBER)
    return Rows(numbers, elements[: rows * key.row_elems].reshape(rows, key.row_elems))


def _elements(memory: np.ndarray, key: WorkerKey, piece: Slice) -> np.ndarray:
    """A slice in memory for a tensor of the key."""
    start = piece.offset * key.item_bytes
    return memory[start : start + piece.length * key.item_bytes].view(key.numpy_dtype)


class OwnMemory:
    """This process's memory, in extents that have no name and end with the processes that map them.
    Belongs to one thread."""

    def __init__(self) -> None:
        self._descriptors: List[int] = []
        self._extent = np.empty(0, np.uint8)
        self._free_bytes = 0

    def take(self, size_bytes: int) -> Tuple[np.ndarray, SharedMemory]:
        """New memory as bytes, all 0, and where other processes find it."""
        if size_bytes > self._free_bytes:
            self._add_extent(max(size_bytes, _EXTENT_BYTES))
        offset = len(self._extent) - self._free_bytes
        taken = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._free_bytes = max(0, self._free_bytes - taken)
        place = SharedMemory(os.getpid(), self._descriptors[-1], offset, size_bytes)
        return self._extent[offset : offset + size_bytes], place

    def _add_extent(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("p3kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._extent = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        self._free_bytes = size_bytes

    def close(self) -> None:
        """Close the descriptors by which others open the memory; mappings stay. May be called
        twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class TheirMemory:
    """The memory of other processes of this host, to be read. Belongs to one thread."""

    def __init__(self) -> None:
        self._extents: Dict[Tuple[int, int], np.ndarray] = {}
        """By process and its descriptor."""

    def at(self, place: SharedMemory) -> np.ndarray:
        """The memory as bytes, which can't be written.

        Raises ProtocolError if there is not so much of it, or if it is anything but memory that
        keeps its size; ConfigError where this process can't open what belongs to the other one.
        """
        name = (place.pid, place.descriptor)
        extent = self._extents.get(name)
        if extent is None:
            extent = self._extents[name] = _mapped(f"/proc/{place.pid}/fd/{place.descriptor}")
        end = place.offset + place.size_bytes
        if end > len(extent):
            raise ProtocolError(f"it shares memory up to byte {end}, and has {len(extent)}")
        return extent[place.offset : end]


def _mapped(path: str) -> np.ndarray:
    try:
        # Found, and not opened: to open a FIFO waits for its other end, and a device may act.
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"this worker can't open memory of another one on its host ({path}: {error.strerror}). "
            "Set P3KV_LOCAL_AGGREGATION=0 on all workers; each then sends its gradients itself"
        ) from error
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolError("what it shares is no memory")
        if status.st_uid != os.geteuid():
            raise ProtocolError(f"it shares memory of user {status.st_uid}")
        memory = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ProtocolError(f"what it shares is no memory: {error}") from error
    finally:
        os.close(found)
    try:
        return _mapped_if_sealed(memory)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"what it shares is no memory: {error}") from error
    finally:
        os.close(memory)


def _mapped_if_sealed(memory: int) -> np.ndarray:
    """Maps all of a descriptor's memory; OSError for a file of another kind."""
    if not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("it shares memory that it may take away (without F_SEAL_SHRINK)")
    size_bytes = os.fstat(memory).st_size
    return np.frombuffer(mmap.mmap(memory, size_bytes, prot=mmap.PROT_READ), np.uint8)
