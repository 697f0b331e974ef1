"""A key's channel: what its window admits, and what waits for pulls that were called before."""

from __future__ import annotations

from typing import List, Optional

import numpy as np

from p3kv.consistency import BulkSynchronous
from p3kv.wire.header import INITIAL_ROUND
from p3kv.wire.messages import DeclaredKey
from p3kv.worker.transfers import Channel, Counts, Pull, Push, Snapshots, WorkerKey


class Key:
    """A key of four elements, and what its transfers were told."""

    def __init__(self, window: int = 2) -> None:
        declared = DeclaredKey(7, "w", (4,), "float32", [(0, 4)])
        self.key = WorkerKey(declared, BulkSynchronous(1))
        self.channel = Channel(self.key, window)
        self.errors: List[Optional[BaseException]] = []

    def push(self, round_: int) -> Push:
        push = Push(self.key, round_, round_, 1, 1, self.errors.append)
        push.after_pulls = self.key.pulls
        return push

    def pull(self, round_: int) -> Pull:
        return Pull(self.key, round_, round_, self.key.next_pull(), 1, self.errors.append)


def test_no_more_rounds_are_open_than_the_window_admits() -> None:
    key = Key()
    pushes = {round_: key.push(round_) for round_ in range(1, 6)}
    assert [round_ for round_, push in pushes.items() if key.channel.admits(push)] == [1, 2]
    key.channel.waiting = [pushes[5], pushes[4], pushes[3]]
    key.channel.end(2)
    assert [push.round for push in key.channel.take_admitted()] == [3, 4]
    assert key.channel.waiting == [pushes[5]]
    key.channel.end(1)  # of which another frame was late
    assert key.channel.take_admitted() == []


def test_before_a_round_has_ended_the_job_s_window_counts_where_it_is_narrower() -> None:
    key = Key(window=1)
    assert key.channel.admits(key.push(1)) and not key.channel.admits(key.push(2))
    key.channel.end(INITIAL_ROUND)
    assert key.channel.admits(key.push(2)) and not key.channel.admits(key.push(3))


def test_a_push_waits_for_all_pulls_before_it_in_whatever_order_they_are_answered() -> None:
    key = Key()
    first, second = key.pull(INITIAL_ROUND), key.pull(INITIAL_ROUND)
    push, third = key.push(1), key.pull(1)
    for pull in (third, second):
        key.channel.answer(pull)
        assert not key.channel.admits(push)
    key.channel.answer(Pull(key.key, 1, 1, 0, 1, key.errors.append))  # the script's is none
    assert not key.channel.admits(push)
    key.channel.answer(first)
    assert key.channel.admits(push)
    assert key.channel.admits(key.push(1))


def test_a_failure_ends_each_transfer_once_and_none_that_is_done() -> None:
    key, error = Key(), ValueError("over")
    done, under_way = key.push(1), key.push(2)
    done.target, done.missing_elems = None, 0
    key.channel.in_flight = {1: done, 2: under_way}
    key.channel.waiting = [key.pull(2)]
    key.channel.early = {4: key.push(4)}
    for _ in range(2):
        key.channel.fail(error)
    assert key.errors == [error] * 3


def test_what_travels_in_place_of_a_push_says_all_that_the_push_says() -> None:
    key, weight = Key(), np.zeros(4, np.float32)
    snapshots = Snapshots(key.channel, Counts())
    push = Push(key.key, 1, 1, weight.ctypes.data, weight.ctypes.data, key.errors.append)
    push.takes, push.lacking, push.own_step, push.exact, push.priority = 0, 2, 5, True, -3
    travels = snapshots.split(push)
    assert key.errors == [None]  # the weight is that of round 0
    said = travels.lacking, travels.own_step, travels.exact, travels.priority, travels.ready_s
    assert said == (2, 5, True, -3, push.ready_s)
    assert weight.ctypes.data not in (travels.source, travels.target)
    weight[:] = 1  # as the script may, now
    np.testing.assert_array_equal(travels.gradient(), np.zeros(4, np.float32))
    assert snapshots.in_flight == 1
    travels.done(None)
    assert snapshots.in_flight == 0 and key.errors == [None]
