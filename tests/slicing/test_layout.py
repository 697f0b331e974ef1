"""Layouts: what stays together in a tensor does so on its server and in its slices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from own_layout import WholeRows
from p3kv.errors import ConfigError, ProtocolError
from p3kv.slicing import LAYOUTS, Layout, make_layout
from p3kv.slicing.slices import MAX_KEY_SLICES, Dense
from p3kv.wire.messages import DeclareKey

layouts = st.builds(Dense, st.tuples(st.integers(0, 5000))) | st.builds(
    WholeRows, st.tuples(st.integers(0, 50), st.integers(0, 20), st.integers(0, 40))
)


@given(layouts, st.integers(1, 700))
def test_slices_have_whole_grains_and_as_many_as_their_size_has_room_for(
    layout: Layout, slice_size: int
) -> None:
    pieces = layout.slices([(0, layout.size_elems)] if layout.size_elems else [], slice_size)
    for piece in pieces:
        assert piece.offset % layout.grain_elems == piece.length % layout.grain_elems == 0
    for piece in pieces[:-1]:
        assert piece.length + layout.grain_elems > slice_size


def test_a_row_longer_than_a_slice_is_a_slice_of_its_own() -> None:
    slices = WholeRows((3, 2, 50)).slices([(1, 100), (0, 200)], 99)
    assert [(s.offset, s.length, s.server) for s in slices] == [
        (0, 100, 1), (100, 100, 0), (200, 100, 0),
    ]  # fmt: skip


def test_a_layout_has_no_more_slices_than_a_key_may_have() -> None:
    runs = [(0, 10 * MAX_KEY_SLICES), (1, 5)]
    Dense((0,)).check_slices(runs[:1], 10)
    with pytest.raises(ProtocolError, match=f"{MAX_KEY_SLICES + 1} slices .* P3KV_SLICE_SIZE"):
        Dense((0,)).check_slices(runs, 10)
    # Rows are longer than the slices that are asked for, so there are fewer.
    WholeRows((0, 20)).check_slices(runs, 10)


class Fixed(Layout):
    """Keeps together what its name says, whatever the shape."""

    grain_elems = 0


@pytest.mark.parametrize(
    ("grain_elems", "why"),
    [
        (0, "keeps 0 elements"), (4, "keeps 4 elements"), (-1, "keeps -1"), (1.0, "keeps 1.0"),
        (2**29, "keeps 536870912"), (None, "TypeError"),
    ],
)  # fmt: skip
def test_a_layout_that_can_not_be_right_is_refused_and_named(
    monkeypatch: pytest.MonkeyPatch, grain_elems: object, why: str
) -> None:
    monkeypatch.setattr(LAYOUTS, "_members", {"fixed": Fixed})
    monkeypatch.setattr(Fixed, "grain_elems", grain_elems)
    with pytest.raises(ConfigError, match=r"the layout 'fixed' .*\(2, 3\)") as refused:
        make_layout("fixed", (2, 3))
    assert why in str(refused.value)


def test_an_unknown_layout_is_told_with_those_that_there_are_and_what_to_do() -> None:
    assert type(make_layout(DeclareKey("w", (2,), "float32").layout, (2,))) is Dense
    known = r"bucket, dense, rows, sparse_rows, touched_rows\. Set P3KV_PLUG"
    with pytest.raises(ConfigError, match=f"no layout 'columns', only {known}"):
        make_layout("columns", (2, 3))
