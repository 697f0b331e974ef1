"""The priority queue against the plainest model of one: a list that is searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p3kv.wire.framing import PriorityQueue

# Few different priorities, so that ties are common; None takes an item out.
steps = st.lists(st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([-(2**31), 2**31 - 1])))


@given(steps)
def test_the_largest_priority_comes_first_and_the_oldest_among_equals(steps: list) -> None:
    queue: PriorityQueue = PriorityQueue()
    model: list = []
    for number, priority in enumerate(steps):
        if priority is not None:
            # Items that cannot be compared: only priority and arrival may decide.
            item = {"number": number}
            queue.push(priority, item)
            model.append((priority, item))
        elif model:
            first = max(model, key=lambda entry: (entry[0], -entry[1]["number"]))
            assert queue.top_priority() == first[0]
            assert queue.pop() is first[1]
            model.remove(first)
        assert len(queue) == len(model)


def test_an_empty_queue_has_nothing_to_give() -> None:
    queue: PriorityQueue = PriorityQueue()
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()
    with pytest.raises(IndexError):
        queue.top_priority()


@given(st.lists(st.integers(-3, 3)))
def test_clear_gives_every_item_and_leaves_a_queue_that_works(priorities: list) -> None:
    queue: PriorityQueue = PriorityQueue()
    for number, priority in enumerate(priorities):
        queue.push(priority, number)
    assert sorted(queue.clear()) == list(range(len(priorities)))
    assert len(queue) == 0
    queue.push(0, 99)
    assert queue.pop() == 99
