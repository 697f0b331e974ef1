"""Operations of our own in MXNet's engine: when and where they start, and how they end."""

from __future__ import annotations

import sys
import threading
from typing import List, Set

import mxnet as mx
import pytest

from p3kv.errors import NotSupportedError
from p3kv.frontends.mxnet import engine

DEADLINE_S = 60.0


class Starts:
    """Notes which thread starts operations, and leaves it to the test to complete them."""

    def __init__(self) -> None:
        self.operations: List[engine.Operation] = []
        self.threads: List[int] = []
        self.started = threading.Event()

    def __call__(self, operation: engine.Operation) -> None:
        self.operations.append(operation)
        self.threads.append(threading.get_ident())
        self.started.set()


def test_an_operation_whose_arrays_are_ready_starts_in_the_thread_that_pushes_it() -> None:
    read, written = mx.nd.ones(3), mx.nd.zeros(3)
    mx.nd.waitall()
    starts = Starts()
    engine.push(starts, [read], [written])
    assert starts.threads == [threading.get_ident()]
    starts.operations[0].complete()
    written.wait_to_read()


def test_an_operation_whose_arrays_are_not_ready_starts_when_they_are_in_another_thread() -> None:
    array, written = mx.nd.ones(3), mx.nd.zeros(3)
    mx.nd.waitall()
    first, second = Starts(), Starts()
    engine.push(first, [], [array])
    engine.push(second, [array], [written])
    assert not second.started.wait(0.05)
    first.operations[0].complete()
    assert second.started.wait(DEADLINE_S)
    assert second.threads != [threading.get_ident()]
    second.operations[0].complete()
    written.wait_to_read()


def test_who_waits_for_an_array_gets_the_error_of_its_operation() -> None:
    def fails(operation: engine.Operation) -> None:
        raise RuntimeError("there is no way on")

    array = mx.nd.ones(3)
    mx.nd.waitall()
    engine.push(fails, [], [array])
    with pytest.raises(mx.base.MXNetError, match="there is no way on"):
        array.wait_to_read()


def test_a_build_with_blocked_layouts_and_no_way_back_is_refused() -> None:
    class Library:
        """A build that does not export what puts a layout right."""

    with pytest.raises(NotSupportedError, match="wrong order"):
        engine._bind_reorder(Library())


def test_threads_that_ask_at_the_same_time_get_the_addresses_of_their_own_arrays() -> None:
    arrays = [mx.nd.ones(3) for _ in range(4)]
    mx.nd.waitall()
    found: List[Set[int]] = [set() for _ in arrays]
    threads = [
        threading.Thread(
            target=lambda at, array: at.update(engine.address(array) for _ in range(100_000)),
            args=pair,
        )
        for pair in zip(found, arrays)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [len(addresses) for addresses in found] == [1] * len(arrays)
    assert len(set.union(*found)) == len(arrays)
