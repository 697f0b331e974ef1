"""What a server keeps of a key of rows for a checkpoint, while rounds change its rows."""

from __future__ import annotations

from typing import Optional
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p3kv.server.engine import ServerRows, rows
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey, SeededRows
from p3kv.wire.rows import NUMBER, Rows
from p3kv.wire.slice_sizes import SliceSizes
from tests import adding
from tests.engines import end_round, engine_of, push_rows

ROWS, COLUMNS = 23, 3
SEEDED = SeededRows(seed=7, std=0.5, uniform=False, zero_row=2)


class Counting(adding.Adding):
    """weight += rows; counts how often each row has changed. Perhaps halves all rows first."""

    def __init__(self, halves: bool) -> None:
        self.counts = np.zeros((ROWS, COLUMNS), np.float32)
        self.halves = halves

    def changes_all_rows(self, key: DeclaredKey, step: Optional[int]) -> bool:
        return self.halves

    def update_rows(
        self, key: DeclaredKey, weight: np.ndarray, numbers: np.ndarray, rows: np.ndarray,
        step: Optional[int], ends_update: bool = True,
    ) -> None:  # fmt: skip
        if self.halves:
            weight /= 2
        weight[numbers] += rows
        self.counts[numbers] += 1


def record_of(seeded: bool, optimizer: Optional[Counting]) -> ServerRows:
    engine = engine_of(1)
    declared = DeclaredKey(
        0, "w", (ROWS, COLUMNS), "float32", [(0, ROWS * COLUMNS)],
        layout="touched_rows" if seeded else "sparse_rows", initial=SEEDED if seeded else None,
    )  # fmt: skip
    engine.set_slice_sizes(INITIAL_ROUND, SliceSizes(ROWS * COLUMNS))
    record = engine.declare(declared).rows
    if not seeded:
        value = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
        push_rows(record, 0, INITIAL_ROUND, 1, Rows(np.arange(ROWS, dtype=NUMBER), value), 0)
        end_round(record)
    record.plan.optimizer = optimizer
    return record


@pytest.mark.parametrize(
    ("seeded", "halves"), [(False, None), (False, False), (False, True), (True, False)]
)
@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_snapshot_is_read_as_it_was_made_whatever_rounds_change_meanwhile(
    seeded: bool, halves: Optional[bool], data: st.DataObject
) -> None:
    """`halves` None: without an optimizer, where values are sums. Workers refuse rows made from a
    seed where other rows than those of a gradient may change."""
    optimizer = None if halves is None else Counting(halves)
    record, round_ = record_of(seeded, optimizer), 0

    def change(most: int) -> None:
        nonlocal round_
        for _ in range(data.draw(st.integers(0, most))):
            round_ += 1
            some = sorted(data.draw(st.sets(st.integers(0, ROWS - 1), min_size=1)))
            elements = np.full((len(some), COLUMNS), round_, np.float32)
            push_rows(record, 0, round_, 1, Rows(np.array(some, NUMBER), elements), round_)
            end_round(record)

    change(3)
    with mock.patch.object(rows, "_PIECE_BYTES", 5 * COLUMNS * 4):
        snapshots, arrays = [], () if optimizer is None else (optimizer.counts,)
        for _ in range(2):
            snapshot = record.snapshot(arrays)
            made = record.initial(np.arange(ROWS))
            not_made = record.not_made(np.arange(ROWS))
            value = record.value.copy()
            value[not_made] = made[not_made]
            snapshots.append((snapshot, [value, *(one.copy() for one in arrays)]))
            change(2)
    for snapshot, expected in snapshots:
        for place, array in enumerate(expected):
            found = []
            for part in snapshot.parts(place):
                found.append(part)
                change(2)
            np.testing.assert_array_equal(np.concatenate(found), array.reshape(-1))


def test_rows_that_have_been_read_are_not_kept_and_nobody_keeps_for_one_that_is_gone() -> None:
    record = record_of(False, Counting(False))
    snapshot = record.snapshot(())
    next(snapshot.parts(0))
    snapshot.keep(None)
    assert not snapshot._kept
    del snapshot
    assert not list(record._snapshots)
