"""The sum of the squares of a slice's elements."""

from __future__ import annotations

import math
from typing import List

import numpy as np

_BITS = 24
"""Bits of a part: sums of up to 2**29 integers below 2**24 are exact in float64."""
_LEAST = -960
"""Exponent of two below which all is left out: the inverse must be a float64."""


def sum_of_squares(array: np.ndarray) -> float:
    """In the array's dtype; in float64 where it overflows there."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = float(np.dot(array, array))
    return total if math.isfinite(total) else float(np.square(array, dtype=np.float64).sum())


def exact_squares(array: np.ndarray) -> List[float]:
    """Numbers whose sum is that of the array's squares, without any rounding.

    So the sum of a tensor's squares does not depend on how the tensor is cut. Squares of float64
    are rounded to float64 first, each by itself.

    A square is cut at fixed powers of two into integers of at most 24 bits, and integers of the
    same weight are summed, as in reproducible summation (Demmel and Nguyen, ARITH 2013). It takes
    several times as long as `sum_of_squares`.
    """
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        squares = np.square(array, dtype=np.float64)
    most = float(squares.max(initial=0.0))
    if not math.isfinite(most):
        return [most]
    parts = []
    weight = math.frexp(most)[1] // _BITS * _BITS
    while weight >= _LEAST and squares.any():
        whole = np.floor(squares * 2.0**-weight)
        parts.append(math.ldexp(float(whole.sum()), weight))
        squares -= whole * 2.0**weight
        weight -= _BITS
    return parts
