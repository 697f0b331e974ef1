"""States of the servers' optimizer, key by key; and those that nest arrays, as plain values."""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional

from p3kv.errors import NotSupportedError
from p3kv.server.optimizer import State
from p3kv.wire.states import PlainState
from p3kv.worker.stores import WorkerStore
from p3kv.worker.transfers import WorkerKey


def states_of(
    store: WorkerStore, key: WorkerKey, whole: bool, member: int = 0, before: bool = False
) -> List[State]:
    """The states of the key's servers, in the order of the elements; of one that needs whole
    tensors (`whole`), and of a bucket's tensor, there is one. None if the optimizer remembers
    nothing of the key.

    As `WorkerStore.optimizer_state`.
    """
    return [
        State(dict(part.elements), dict(part.numbers))
        for part in store.optimizer_state(key, whole, member, before)
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


def take_apart(value: Any, keep: Callable[[Any], Any]) -> Any:
    """The structure of a state: plain values.

    `keep(one)` gives what stands for an array in it, a str or a dict of one item, and None for what
    is no array. The structure is None, what stands for an array, a list of structures for a tuple,
    or a dict that says what is in it. Raises NotSupportedError for what nothing stands for.
    """
    if value is None:
        return None
    kept = keep(value)
    if kept is not None:
        return kept
    if isinstance(value, tuple):
        return [take_apart(part, keep) for part in value]
    if isinstance(value, list):
        return {"list": [take_apart(part, keep) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[name, take_apart(part, keep)] for name, part in value.items()]}
    if isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise NotSupportedError(
        f"an optimizer's state has a {type(value).__name__}; it may have arrays, numbers, strs, "
        "tuples, lists and dicts"
    )


def put_together(structure: Any, array: Callable[[Any], Any]) -> Any:
    """The state that `take_apart` has taken apart; `array(kept)` gives the array for which `kept`
    stands."""
    if structure is None:
        return None
    if isinstance(structure, list):
        return tuple(put_together(part, array) for part in structure)
    if isinstance(structure, dict):
        if "list" in structure:
            return [put_together(part, array) for part in structure["list"]]
        if "dict" in structure:
            return {name: put_together(part, array) for name, part in structure["dict"]}
        if "value" in structure:
            return structure["value"]
    return array(structure)
