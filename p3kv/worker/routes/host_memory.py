"""Memory that the workers of a host share for each key: what they add to sums, and values."""

from __future__ import annotations

from typing import Any, Dict, Mapping, Tuple

import numpy as np

from p3kv.errors import ProtocolError
from p3kv.slicing import Slice
from p3kv.wire.connection import Connection
from p3kv.wire.fields import KeyHeader
from p3kv.wire.framing import Frame
from p3kv.wire.header import URGENT, Kind
from p3kv.wire.messages import SharedMemory, encode
from p3kv.wire.rows import NUMBER, Rows, check_numbers
from p3kv.worker.routes.shared_memory import OwnMemory, TheirMemory
from p3kv.worker.transfers import WorkerKey


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
