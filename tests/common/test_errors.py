"""An error in one line: what a user who reads one line has to know."""

from __future__ import annotations

from typing import List

import pytest

from p3kv.common.log import Reminder
from p3kv.errors import ConfigError, in_one_line
from p3kv.wire.messages import Failure


class MXNetError(RuntimeError):
    """As MXNet's own, whose message often has its C++ frames."""


CPP = """Traceback (most recent call last):
  [bt] (2) /lib/libmxnet.so(MXNDArraySyncCopyToCPU+0x35) [0x7f]
  [bt] (1) /lib/libmxnet.so(+0x3c) [0x7e]
  File "../src/storage/./cpu_device_storage.h", line 91
MXNetError: Failed to allocate CPU Memory
"""
CPP_AFTER = """Check failed: ok: it is not
Stack trace:
  [bt] (0) /lib/libmxnet.so(+0x3c) [0x7e]
"""
LOADER = """Caught KeyError in data loader's helper 0.
Original Traceback (most recent call last):
  File "data.py", line 3, in load
    return rows[key]
           ~~~~^^^^^
KeyError: 'cat'
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("two\n  lines"), "ValueError: two lines"),
        (ConfigError("P3KV_X is 1"), "ConfigError: P3KV_X is 1"),
        (MXNetError(CPP), "MXNetError: Failed to allocate CPU Memory"),
        (MXNetError(CPP_AFTER), "MXNetError: Check failed: ok: it is not"),
        (RuntimeError(LOADER), "RuntimeError: KeyError: 'cat'"),
        (MXNetError("Stack trace:\n  [bt] (0) x"), "MXNetError: Stack trace: [bt] (0) x"),
    ],
)
def test_an_exception_in_one_line(error: BaseException, line: str) -> None:
    assert in_one_line(error) == line


def test_a_long_message_is_cut() -> None:
    line = in_one_line(ValueError("x" * 10_000))
    assert line.startswith("ValueError: xxx")
    assert len(line) < 1000


def test_the_advice_is_in_the_message_and_not_in_the_brief_one() -> None:
    failure = Failure("it stopped.", "worker", 3, 17, hint="Look at it.")
    error = failure.to_error()
    assert str(error) == "worker 3 (round 17): it stopped. Look at it."
    assert error.brief == "worker 3 (round 17): it stopped."


def test_a_reminder_comes_after_5_s_and_then_at_intervals_that_double() -> None:
    reminder = Reminder(since=100.0)
    due: List[int] = [now for now in range(100, 260) if reminder.is_due(now)]
    assert due == [105, 115, 135, 175, 255]


def test_a_reminder_waits_5_s_after_an_arrival() -> None:
    reminder = Reminder(since=100.0)
    reminder.postpone(104.0)
    assert not reminder.is_due(108.0)
    assert reminder.is_due(109.0)
    reminder.postpone(110.0)
    assert not reminder.is_due(116.0)
    assert reminder.is_due(119.0)
