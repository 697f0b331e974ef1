"""Layout of a checkpoint on a disk: a file of each server, and perhaps of worker 0 or each worker.

A file is a ZIP archive without compression, whose members have checksums (CRC-32): the outline, and
numpy's arrays. `numpy.load` reads it. A checkpoint is complete when all its files are there; each
file says which these are.
"""

from __future__ import annotations

import os
import re
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from p3kv.wire.messages import (
    DTYPES,
    MAX_KEY_ELEMS,
    MAX_STATE_ARRAYS,
    MAX_STEP,
    Key,
    Message,
    ResumedStore,
    called,
)
from p3kv.wire.messages.base import check, check_number, check_plain
from p3kv.wire.messages.keys import check_runs, check_shape, check_tensor


class Place(NamedTuple):
    """A process among those of its job, once all have arrived."""

    rank: int
    host: str
    servers_hosts: Sequence[str]
    """By rank."""
    workers_hosts: Sequence[str]
    """By rank."""
    mark: Callable[[str], bytes]
    """Gives the mark of a process such as "server 0" (`p3kv.checkpoints.marks`)."""


VERSION = 1
OUTLINE = "outline.msgpack"
"""The member with the outline."""
UNFINISHED = ".unfinished"
"""How the name of a file ends that is being written."""
_NAME = re.compile(r"step-(\d{10,16})\.(server|worker)-(\d{1,5})-of-(\d{1,5})\.npz")
SERVER, WORKER = "server", "worker"


def _check_arrays(arrays: Sequence[Tuple[str, str, List[int]]], too_many: str) -> None:
    check(len(arrays) <= MAX_STATE_ARRAYS, too_many)
    for name, dtype, shape in arrays:
        check(dtype in DTYPES, f"an array {name!r} has dtype {dtype!r}")
        check_shape(f"an array {name!r}", shape)


class KeyOutline(Message, frozen=True):
    """A key in a file: a server's run of its value, and the optimizer's state; or the whole
    value."""

    store: int
    key: Key
    name: Optional[str]
    """Worker rank 0's name of the parameter, if any."""
    shape: Tuple[int, ...]
    dtype: str
    layout: str
    runs: List[Tuple[int, int]]
    """Server and number of elements, in their order; in a worker's file all are server 0's."""
    whole: bool
    """Whether the state is that of a whole tensor, which is never cut."""
    numbers: Optional[Dict[str, Any]]
    """The state's; None if the optimizer remembers nothing."""
    arrays: List[Tuple[str, str, List[int]]]
    """Name, dtype and shape of each of the state's arrays; flat unless it is a whole tensor's."""

    def __post_init__(self) -> None:
        check_tensor(self.key, self.name, self.shape, self.dtype, self.layout)
        check_runs(called(self.key, self.name), self.shape, self.runs)
        _check_arrays(self.arrays, "an optimizer's state has too many arrays")
        check_plain("an optimizer's state", self.numbers)


class MemoryOutline(Message, frozen=True):
    """A codec's memory of a key's gradients: flat arrays with an item for each element of the
    key."""

    store: int
    key: Key
    codec: str
    """Its name."""
    size_elems: int
    arrays: List[Tuple[str, str]]
    """Name and dtype of each."""

    def __post_init__(self) -> None:
        check_number("a number of elements", self.size_elems, 1, MAX_KEY_ELEMS)
        check(len(self.arrays) <= MAX_STATE_ARRAYS, "a codec's memory has too many arrays")
        for name, dtype in self.arrays:
            check(dtype in DTYPES, f"an array {name!r} has dtype {dtype!r}")


class TrainedOutline(Message, frozen=True):
    """A worker's state of a key that it trains by itself."""

    store: int
    key: Key
    numbers: Dict[str, Any]
    """Plain values."""
    arrays: List[Tuple[str, str, List[int]]]
    """Name, dtype and shape of each array."""

    def __post_init__(self) -> None:
        _check_arrays(self.arrays, "a worker has too many arrays of a key")
        check_plain("what a worker has of a key", self.numbers)


class Outline(Message, frozen=True):
    """Contents of a file, without the numbers."""

    version: int
    identity: str
    """The same in all files of a checkpoint, and in no others."""
    step: int
    server: int
    hosts: List[str]
    """Where each server of the checkpoint has written, by rank."""
    stores: List[ResumedStore]
    """As worker rank 0 knows them; in a worker's file, as that worker does."""
    keys: List[KeyOutline]
    workers_host: str = ""
    """Where worker rank 0 has written a file of this checkpoint; empty: it has none."""
    role: str = SERVER
    """Who has written this file; of a worker, `server` is its rank."""
    others_hosts: List[str] = []  # noqa: RUF012  nobody changes it
    """Hosts of the other workers' files, from rank 1 on, where codecs remember or workers train by
    themselves."""
    memories: List[MemoryOutline] = []  # noqa: RUF012  nobody changes it
    """Memories of this worker's codecs."""
    trained: List[TrainedOutline] = []  # noqa: RUF012  nobody changes it
    """Keys that this worker trains by itself."""
    is_first: bool = True
    """Whether no checkpoint was complete when this one began. If a later one is all there is and
    can't be used, files are lost."""

    def __post_init__(self) -> None:
        check_number("a checkpoint's version", self.version, VERSION, VERSION)
        check_number("a step", self.step, 1, MAX_STEP)
        check(self.role in (SERVER, WORKER), f"a file of the role {self.role!r}")
        check_number(f"a {self.role}'s rank", self.server, 0, self._ranks - 1)

    @property
    def part(self) -> Part:
        """The name that the file must have."""
        return Part(self.step, self.server, self._ranks, self.role)

    @property
    def parts(self) -> Dict[Part, str]:
        """All files of the checkpoint, servers' first and by rank, each with its host."""
        workers = [self.workers_host, *self.others_hosts] if self.workers_host else []
        return {
            Part(self.step, rank, len(hosts), role): host
            for role, hosts in ((SERVER, self.hosts), (WORKER, workers))
            for rank, host in enumerate(hosts)
        }

    @property
    def _ranks(self) -> int:
        """How many processes of this one's role have files."""
        return len(self.hosts) if self.role == SERVER else 1 + len(self.others_hosts)


class CutOfKey(NamedTuple):
    """Value and state of a key in a process at a checkpoint, to be written once."""

    outline: KeyOutline
    value: Iterable[np.ndarray]
    """Consecutive parts, which stay as they are."""
    arrays: Sequence[Iterable[np.ndarray]]
    """As in the outline, each in consecutive parts."""


class Contents(NamedTuple):
    """Outline and arrays that are to be written into a file, once. The arrays stay as they are."""

    keys: Sequence[CutOfKey]
    memories: Sequence[Sequence[np.ndarray]] = ()
    """As in the outline: of each key, the arrays that a codec remembers."""
    trained: Sequence[Sequence[np.ndarray]] = ()
    """As in the outline: of each key, what the worker has of it."""


class Part(NamedTuple):
    """One process's file of a checkpoint, as its name says."""

    step: int
    rank: int
    ranks: int
    """How many processes of the role have files."""
    role: str = SERVER

    @property
    def name(self) -> str:
        return f"step-{self.step:010}.{self.role}-{self.rank}-of-{self.ranks}.npz"


def value_member(index: int) -> str:
    """The name of the member with the value of the outline's key number `index`."""
    return f"{index}/value.npy"


def array_member(index: int, place: int) -> str:
    """The name of the member with one of its state's arrays."""
    return f"{index}/state{place}.npy"


def memory_member(index: int, place: int) -> str:
    """The name of the member with one of the arrays of the outline's memory number `index`."""
    return f"memory{index}/{place}.npy"


def trained_member(index: int, place: int) -> str:
    """The name of the member with one of the arrays of a key that a worker trains by itself."""
    return f"trained{index}/{place}.npy"


def part_of(name: str) -> Optional[Part]:
    """Part of a checkpoint that a file is by its name; None if it is no checkpoint's."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    step, role, rank, ranks = found.groups()
    return Part(int(step), int(rank), int(ranks), role)


def parts_in(folder: str) -> List[Part]:
    """The files in a folder, in no order; none if there is no such folder. Raises OSError."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return [part for part in map(part_of, names) if part is not None]


def any_parts(folder: str) -> bool:
    """Whether a folder has any file of a checkpoint."""
    return bool(parts_in(folder))
