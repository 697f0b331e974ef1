"""Times of a process's clock as times of the scheduler's."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import List, Sequence

import numpy as np

from p3kv.common.tracing import ClockSample

_NEAR_NS = 30_000_000_000
"""Clocks that differ by 100 parts per million, which is much, move 3 ms apart in this time."""


def best_samples(samples: Sequence[ClockSample]) -> List[ClockSample]:
    """The samples that count, in order of their times: those with a shorter round trip than all
    others near them."""
    ordered = sorted(samples)
    times = [sample.at_ns for sample in ordered]
    best = []
    for sample in ordered:
        start = bisect_left(times, sample.at_ns - _NEAR_NS)
        near = ordered[start : bisect_right(times, sample.at_ns + _NEAR_NS)]
        if sample == min(near, key=lambda other: other.round_trip_ns):
            best.append(sample)
    return best


def is_shared(samples: Sequence[ClockSample]) -> bool:
    """Whether a process has the scheduler's clock: both are on one machine. Clocks of two machines
    count from two starts, and no round trip is as long as the time between these."""
    return all(abs(sample.offset_ns) <= sample.round_trip_ns // 2 + 1 for sample in samples)


def aligned(times_ns: np.ndarray, samples: Sequence[ClockSample]) -> np.ndarray:
    """int64 times of a process as the scheduler's; `samples` are those of the process.

    The offset changes evenly between samples, and is constant before the first and after the last.
    Without samples the times stay as they are.
    """
    if is_shared(samples):
        return times_ns
    best = best_samples(samples)
    at_ns = [sample.at_ns for sample in best]
    offsets = np.interp(times_ns, at_ns, [float(sample.offset_ns) for sample in best])
    shifted: np.ndarray = times_ns + offsets.round().astype(np.int64)
    return shifted


def uncertainty_ns(samples: Sequence[ClockSample]) -> int:
    """By how much an aligned time is wrong at most, as long as the clocks' rates are constant."""
    if is_shared(samples):
        return 0
    return max(sample.round_trip_ns // 2 for sample in best_samples(samples))
