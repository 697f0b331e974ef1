"""States of the servers' optimizer, key by key."""

from __future__ import annotations

from typing import Iterable, List, Optional

from p3kv.server.optimizer import State
from p3kv.wire.states import PlainState
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


def states_of(store: WorkerStore, key: WorkerKey, whole: bool, member: int = 0) -> List[State]:
    """The states of the key's servers, in the order of the elements; of one that needs whole
    tensors (`whole`), and of a bucket's tensor, there is one. None if the optimizer remembers
    nothing of the key.

    As `WorkerStore.optimizer_state`.
    """
    return [
        State(dict(part.elements), dict(part.numbers))
        for part in store.optimizer_state(key, whole, member)
        if part is not None
    ]


def give_state(
    store: WorkerStore, key: WorkerKey, state: Optional[State], whole: bool, member: int = 0
) -> None:
    """Has the key's servers remember the state of the whole key; None: it begins anew.

    As `WorkerStore.load_optimizer_state`.
    """
    parts: Iterable[Optional[State]] = [state] * len(key.runs)
    if state is not None and not whole and not member:
        parts = state.cut([length for _, length in key.runs])
    store.load_optimizer_state(key, map(_plain, parts), whole, member)


def _plain(part: Optional[State]) -> Optional[PlainState]:
    return None if part is None else PlainState(part.elements, part.numbers)
