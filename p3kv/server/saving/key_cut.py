"""Copies of a key at a checkpoint, as far as its slices have come so far."""

from __future__ import annotations

from typing import Dict, Iterable, Optional

import numpy as np

from p3kv.checkpoints import CutOfKey, KeyOutline
from p3kv.server.engine import RowsKey, ServerSlice, Unit
from p3kv.server.optimizer import WHOLE, State
from p3kv.wire.messages import DeclaredKey


class KeyCut:
    """A key in a round on this server. Belongs to the server's thread."""

    def __init__(self, declared: DeclaredKey, round: int, whole: bool, units: int) -> None:
        """`whole`: the optimizer needs whole tensors. `units`: how many are to be copied."""
        self.declared = declared
        self.round = round
        self.missing = units
        self._whole = whole
        self._values: Dict[int, np.ndarray] = {}
        self._states: Dict[int, State] = {}

    def copy(self, unit: Unit) -> None:
        """Keeps copies of a unit's value and state, when it has ended the round and no later
        one."""
        optimizer, state = unit.plan.optimizer, None
        if isinstance(unit, RowsKey):
            if optimizer is not None:
                state = unit.copied_state(optimizer, self._whole)
            self._add(0, unit.copied_value(), state)
        elif isinstance(unit, ServerSlice):
            # That of a whole tensor is the same for all slices: they have ended the round together.
            if optimizer is not None and (not self._whole or unit.offset == 0):
                index = WHOLE if self._whole else unit.index
                state = optimizer.copied(unit.plan.declared, index)
            self._add(unit.offset, unit.known_value().array.copy(), state)

    @property
    def complete(self) -> CutOfKey:
        """All of it, once nothing is missing."""
        key = self.declared
        states = [self._states[offset] for offset in sorted(self._states)]
        first = states[0] if states else State({}, {})
        arrays = [[state.elements[name] for state in states] for name in first.elements]
        outline = KeyOutline(
            key.store, key.key, key.name, key.shape, key.dtype, key.layout, key.runs, self._whole,
            first.numbers if states else None,
            [
                (name, array.dtype.name, list(array.shape) if self._whole else [_elems(parts)])
                for (name, array), parts in zip(first.elements.items(), arrays)
            ],
        )  # fmt: skip
        return CutOfKey(outline, [self._values[offset] for offset in sorted(self._values)], arrays)

    def _add(self, offset: int, value: np.ndarray, state: Optional[State]) -> None:
        self._values[offset] = value
        if state is not None:
            self._states[offset] = state
        self.missing -= 1


def _elems(parts: Iterable[np.ndarray]) -> int:
    return sum(len(part) for part in parts)
