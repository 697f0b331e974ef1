"""Finds gradients and sums that are not finite, where the job is to end on them."""

from __future__ import annotations

from typing import Optional

import numpy as np

ADVICE = (
    "Look at this worker's batch, its loss and the learning rate; with P3KV_CHECK_FINITE=0 the job "
    "goes on."
)
"""To the user, where one worker's gradient is not finite."""


class NotFinite(Exception):
    """A gradient, or a sum of gradients, has nan or infinity."""

    def __init__(self, what: str, called: str, round: int, rank: Optional[int] = None) -> None:
        """`rank` is that of the worker whose gradient has brought it, if it was one worker's."""
        if rank is None:
            reason = (
                f"the sum of several workers' gradients of {called} has {what} in round {round}"
            )
        else:
            reason = f"its gradient of {called} has brought {what} into the sum of round {round}"
        super().__init__(reason)
        self.what = what
        self.round = round
        self.rank = rank


def check_sum(array: np.ndarray, called: str, round: int, rank: Optional[int] = None) -> None:
    """Raise NotFinite for a sum with nan or infinity.

    `rank` is the worker whose gradient was added last, to a finite sum. None: all gradients are
    finite, and their sum is too large for its dtype.
    """
    if not np.isfinite(array).all():
        raise NotFinite("nan" if np.isnan(array).any() else "infinity", called, round, rank)
