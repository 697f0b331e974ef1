"""Rows of a value that are on their way to workers."""

from __future__ import annotations

from typing import Optional

import numpy as np

from p3kv.codecs import part_of_rows
from p3kv.server.engine.plan import KeyPlan
from p3kv.wire.header import ENCODED, INITIAL_ROUND
from p3kv.wire.rows import Packed, Rows, gathered, index_of, packed


class SentRows:
    """Some rows of a value for one worker or several, copied when the first of them gets it, and
    encoded where the key has a codec for values, unless they are to be exact. Initial values travel
    as they are."""

    def __init__(
        self,
        plan: KeyPlan,
        value: np.ndarray,
        round: int,
        numbers: np.ndarray,
        exact: bool,
        place: Optional[int] = None,
    ) -> None:
        """`value`, all rows, is that of the round until `keep` has been called. `place`: of rows
        that a request names, where they begin in it."""
        self._plan = plan
        self._value = value
        self._round = round
        self._numbers = numbers
        encodes = round > INITIAL_ROUND and not plan.codecs.values.in_place
        self._encodes = encodes and not exact
        self.packed = packed(numbers)
        """Their numbers as they travel."""
        if place is not None:
            self.packed = Packed(place, len(numbers), 0, self.packed.gaps[:0])
        self.flags = self.packed.flags | (ENCODED if self._encodes else 0)
        self._copy: Optional[memoryview] = None
        self.waiting = 0
        """By how many workers."""

    def begin_send(self) -> None:
        """Keeps the rows until `end_send`."""
        self.waiting += 1

    def end_send(self) -> None:
        """Undoes one `begin_send`."""
        self.waiting -= 1
        if not self.waiting:
            self._copy = None

    def keep(self) -> None:
        """To be called before the value changes."""
        if self.waiting:
            self.payload()

    def payload(self) -> memoryview:
        """The bytes that travel."""
        if self._copy is None:
            if self._encodes:
                rows = Rows(self._numbers, self._value[self._numbers])
                self._copy = rows.encoded(
                    self.packed.gaps, self._plan.encoder(), part_of_rows(self._round),
                    self._plan.codecs.values.most_bytes(rows.elements.size),
                )  # fmt: skip
            else:
                some = index_of(self._numbers)
                self._copy = gathered(self._value, some, self.packed.gaps)
        return self._copy
