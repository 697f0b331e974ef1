"""Copies of a key at a checkpoint, as far as its slices have come so far."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Dict, Iterable, List, Optional

import numpy as np
from msgspec.structs import replace

from p3kv.checkpoints import CutOfKey, KeyOutline
from p3kv.server.engine import BucketSlice, Record, RowsSnapshot, ServerRows, ServerSlice
from p3kv.server.optimizer import WHOLE, State
from p3kv.wire.messages import DeclaredKey


class KeyCut:
    """A key in a round on this server. Belongs to the server's thread."""

    def __init__(self, declared: DeclaredKey, round: int, whole: bool, records: int) -> None:
        """`whole`: the optimizer needs whole tensors. `records`: how many are to be copied."""
        self.declared = declared
        self.round = round
        self.missing = records
        self._whole = whole
        self._values: Dict[int, np.ndarray] = {}
        self._states: Dict[int, State] = {}
        self._rows: Optional[RowsSnapshot] = None
        """Of a key of rows: in place of its value, and of the state's arrays unless they are a
        whole tensor's."""
        self._of_members: List[Optional[State]] = []

    def copy(self, record: Record[Any]) -> None:
        """Keeps copies of a record's value and state, when it has ended the round and no later
        one."""
        optimizer, state = record.plan.optimizer, None
        if isinstance(record, ServerRows):
            if optimizer is not None and self._whole:
                state = optimizer.copied(record.declared, WHOLE)
            elif optimizer is not None:
                state = optimizer.seen(record.declared, WHOLE)
            arrays = () if state is None or self._whole else tuple(state.elements.values())
            self._rows = record.snapshot(arrays)
            self._add(0, np.empty(0), state)
        elif isinstance(record, BucketSlice):
            if optimizer is not None:
                self._of_members = record.copied_states(optimizer)
            self._add(0, record.known_value().array.copy(), None)
        elif isinstance(record, ServerSlice):
            # That of a whole tensor is the same for all slices: they have ended the round together.
            if optimizer is not None and (not self._whole or record.offset == 0):
                index = WHOLE if self._whole else record.index
                state = optimizer.copied(record.plan.declared, index)
            self._add(record.offset, record.known_value().array.copy(), state)

    @property
    def complete(self) -> List[CutOfKey]:
        """All of it, once nothing is missing: of a bucket each tensor by itself, so that it may be
        in another bucket when the job goes on."""
        key = self.declared
        if not key.members:
            states = [self._states[offset] for offset in sorted(self._states)]
            return [self._cut(key, [self._values[at] for at in sorted(self._values)], states)]
        ((server, _),) = key.runs
        found, start = [], 0
        for member, state in zip_longest(key.members, self._of_members):
            elems = member.size_elems
            of_member = replace(
                key, key=member.key, name=member.name, shape=member.shape, layout="dense",
                runs=[(server, elems)] if elems else [], members=[],
            )  # fmt: skip
            value = self._values[0][start : start + elems]
            found.append(self._cut(of_member, [value], [] if state is None else [state]))
            start += elems
        return found

    def _cut(self, key: DeclaredKey, values: List[np.ndarray], states: List[State]) -> CutOfKey:
        first = states[0] if states else State({}, {})
        arrays: List[Any] = [[one.elements[name] for one in states] for name in first.elements]
        outline = KeyOutline(
            key.store, key.key, key.name, key.shape, key.dtype, key.layout, key.runs, self._whole,
            first.numbers if states else None,
            [
                (name, array.dtype.name, list(array.shape) if self._whole else [_elems(parts)])
                for (name, array), parts in zip(first.elements.items(), arrays)
            ],
        )  # fmt: skip
        if self._rows is None:
            return CutOfKey(outline, values, arrays)
        if not self._whole:
            arrays = [self._rows.parts(place) for place in range(1, 1 + len(arrays))]
        return CutOfKey(outline, self._rows.parts(0), arrays)

    def _add(self, offset: int, value: np.ndarray, state: Optional[State]) -> None:
        self._values[offset] = value
        if state is not None:
            self._states[offset] = state
        self.missing -= 1


def _elems(parts: Iterable[np.ndarray]) -> int:
    return sum(part.size for part in parts)
