"""Messages about checkpoints, between workers and servers."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

from p3kv.wire.messages.base import MAX_RANK, UNKNOWN, Message, check, check_number, check_plain
from p3kv.wire.messages.control import MAX_HOST_CHARS
from p3kv.wire.messages.keys import MAX_KEY_ID, MAX_STORE, check_called

MAX_STEP = 2**53
"""Steps of a script, over all runs that went on from one another."""
MAX_IDENTITY_CHARS = 64
_MAX_ROUND = 2**32 - 1


class ResumedStore(Message, frozen=True):
    """A store of a checkpoint, as all workers must know it."""

    store: int
    steps: int
    """How many steps the script has made with the store."""
    numbers: Dict[str, Any]
    """What the front end knows of the store, as plain values."""

    def __post_init__(self) -> None:
        check_number("a store's number", self.store, 0, MAX_STORE)
        check_number("a number of steps", self.steps, 0, MAX_STEP)
        check_plain("a store", self.numbers)


class StoreAtCut(Message, frozen=True):
    """A store at the end of a step."""

    known: ResumedStore
    whole: bool
    """Whether its optimizer needs whole tensors."""
    rounds: List[Tuple[int, int]]
    """Key's id, and the last round for which worker rank 0 has pushed, of each key."""
    names: Dict[int, str] = {}  # noqa: RUF012  nobody changes it
    """What worker rank 0 calls its parameters, by the key's id, where the front end knows."""
    own_rounds: bool = False
    """Whether its rounds are each worker's own."""

    def __post_init__(self) -> None:
        for key_id, round_ in self.rounds:
            check_number("a key's id", key_id, 0, MAX_KEY_ID)
            check_number("a round", round_, 0, _MAX_ROUND)
        for key_id, name in self.names.items():
            check_number("a key's id", key_id, 0, MAX_KEY_ID)
            check_called(key_id, name)


class Checkpoint(Message, frozen=True):
    """Request for a checkpoint: all that belongs to it."""

    step: int
    """Counts the steps of the script, and names the checkpoint."""
    identity: str
    """Random: tells parts of different checkpoints of the same step apart."""
    keep_from: int
    """Checkpoints of older steps are no longer needed; UNKNOWN: all are."""
    stores: List[StoreAtCut]
    """Without any, worker rank 0 asks for none of this step, or of an older one for which it has
    not asked before, and others need keep nothing for these."""
    workers_host: str = ""
    """Where worker rank 0 writes a file of its own; empty: it has nothing to write."""
    others_hosts: List[str] = []  # noqa: RUF012  nobody changes it
    """Where each other worker writes what its codecs remember, from rank 1 on; empty: they have
    nothing to write."""

    def __post_init__(self) -> None:
        check_number("a step", self.step, 0, MAX_STEP)
        check_number("a step", self.keep_from, UNKNOWN, MAX_STEP)
        for host in (self.workers_host, *self.others_hosts):
            check(len(host) <= MAX_HOST_CHARS, "a host's address")
        check(0 < len(self.identity) <= MAX_IDENTITY_CHARS, "a checkpoint's identity")


class CutReached(Message, frozen=True):
    """A worker has made all steps that belong to a checkpoint."""

    step: int
    """As in `Checkpoint`."""
    stores: List[StoreAtCut]
    """Those whose rounds are each worker's own. Without any, from worker rank 0: there will be no
    checkpoint."""

    def __post_init__(self) -> None:
        check_number("a step", self.step, 0, MAX_STEP)
        check(all(one.own_rounds for one in self.stores), "a store whose rounds workers share")


class Written(Message, frozen=True):
    """A server or worker has written its part of a checkpoint, or could not."""

    step: int
    problem: str
    """Why not; empty if it is written."""
    worker: int = UNKNOWN
    """Whose part it is, where server 0 passes on what a worker has said."""

    def __post_init__(self) -> None:
        check_number("a rank", self.worker, UNKNOWN, MAX_RANK)


class Resumed(Message, frozen=True):
    """From which checkpoint a job goes on."""

    step: int
    """0: from none."""
    stores: List[ResumedStore]
    identity: str = ""
    """That of the checkpoint."""
    num_workers: int = 0
    """How many workers have files of it."""

    def __post_init__(self) -> None:
        check_number("a step", self.step, 0, MAX_STEP)
        check_number("a number of workers", self.num_workers, 0, MAX_RANK + 1)
        check(len(self.identity) <= MAX_IDENTITY_CHARS, "a checkpoint's identity")
