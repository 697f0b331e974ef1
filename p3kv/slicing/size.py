"""How large slices should be: as large as the network carries in a few milliseconds."""

from __future__ import annotations

import math

FEWEST_ELEMS, MOST_ELEMS = 25_000, 400_000
_WIRE_S = 0.0035
_ELEM_BYTES = 4
_LEAD_SLICES = 4
LEAST_CREDIT_BYTES = 96 * 1024
"""With much less, a connection that waits for others in a link's queue leaves its own link idle."""


def slice_size_for(rate_bytes_s: float) -> int:
    """The elements of a slice where every worker sends at this rate.

    A slice that is being sent is not overtaken, so it should take little time; each costs
    processor time, whatever its size, so it should not be smaller than that. P3 section 5.6 found
    50,000 elements best on its network. Only powers of two times the fewest: measuring again gives
    the same size.
    """
    steps = math.log2(max(rate_bytes_s, 1.0) * _WIRE_S / _ELEM_BYTES / FEWEST_ELEMS)
    most = int(math.log2(MOST_ELEMS / FEWEST_ELEMS))
    return FEWEST_ELEMS * 2 ** min(most, max(0, round(steps)))


def credit_bytes(slice_size: int) -> int:
    """How much of each connection the kernel may hold: no priority reaches what it holds."""
    return max(LEAST_CREDIT_BYTES, slice_size * _ELEM_BYTES // 3)


def lead_bytes(slice_size: int) -> int:
    """How far one worker may be ahead of another in taking new values from a server."""
    return _LEAD_SLICES * slice_size * _ELEM_BYTES
