"""Chooses a slice's largest elements."""

from __future__ import annotations

import math

import numpy as np

_STRIDE = 13
"""One of so many elements is in the sample. It is no divisor of the usual lengths of rows and sizes
of kernels, so the sample does not have the same place of each."""
_SORTED_ELEMS = 2048
"""Fewer elements are sorted at once; a sample of them would say little."""


def share_of(share: float, length_elems: int) -> int:
    """How many of a slice's elements a share is: at least one."""
    return min(length_elems, math.ceil(share * length_elems)) if length_elems else 0


def largest(magnitudes: np.ndarray, count: int, exact: bool = False) -> np.ndarray:
    """Positions of the `count` largest elements that are not zero, in ascending order.

    Not `exact`: a sample first says from which magnitude on to look, as in Deep Gradient
    Compression (section 3.1), a little lower than its own share, and the largest of what is found
    are taken. So they are the `count` largest, or where the sample misleads, some fewer of them.
    The same arguments always give the same positions. NaN is larger than all numbers.
    """
    length = len(magnitudes)
    if exact or length <= _SORTED_ELEMS or count >= length:
        found = np.flatnonzero(magnitudes)
    else:
        sample = magnitudes[::_STRIDE]
        wanted = count / length * len(sample)
        among = min(len(sample), math.ceil(wanted + 2 * math.sqrt(wanted) + 1))
        place = len(sample) - among
        least = np.partition(sample, place)[place]
        # Not greater than or equal: NaN is neither.
        found = np.flatnonzero(~(magnitudes < least) if least > 0 else magnitudes)
    if len(found) <= count:
        return found
    candidates = magnitudes[found]
    place = len(found) - count
    least = np.partition(candidates, place)[place]
    if np.isnan(least):
        return found[np.isnan(candidates)][:count]
    above = ~(candidates <= least)
    ties = np.flatnonzero(candidates == least)[: count - np.count_nonzero(above)]
    above[ties] = True
    return found[above]
