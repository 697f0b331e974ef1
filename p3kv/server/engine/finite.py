"""Finds gradients and sums that are not finite, where the job is to end on them."""

from __future__ import annotations

import numpy as np

from p3kv.wire.messages import UNKNOWN


class NotFinite(Exception):
    """A gradient, or a sum of gradients, has nan or infinity."""

    def __init__(self, reason: str, round: int, rank: int = UNKNOWN) -> None:
        """`rank` is that of the worker whose gradient has brought it, if it was one worker's."""
        super().__init__(reason)
        self.round = round
        self.rank = rank


def check_sum(array: np.ndarray, called: str, round: int, rank: int = UNKNOWN) -> None:
    """Raises NotFinite if a sum of gradients is not finite.

    `rank` is that of the worker whose gradient was added last; the sum was finite before. UNKNOWN:
    all gradients are finite, and their sum is too large for its dtype.
    """
    if np.isfinite(array).all():
        return
    what = "nan" if np.isnan(array).any() else "infinity"
    if rank == UNKNOWN:
        reason = f"the sum of all workers' gradients of {called} has {what} in round {round}"
    else:
        reason = f"its gradient of {called} has brought {what} into the sum of round {round}"
    raise NotFinite(reason, round, rank)
