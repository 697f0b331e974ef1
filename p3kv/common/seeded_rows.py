"""Rows of a table that is made from a seed: the same wherever each row is made."""

from __future__ import annotations

import math

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX = (
    (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
    (np.uint64(27), np.uint64(0x94D049BB133111EB)),
)
_LAST, _HALF = np.uint64(31), np.uint64(32)
_PIECE_ELEMS = 1 << 18
"""Made at once: the intermediate arrays stay in the processor's cache."""


def seeded_rows(
    numbers: np.ndarray, row_elems: int, seed: int, std: float, uniform: bool
) -> np.ndarray:
    """The rows with these numbers, as float32 by row: normal with mean 0, or uniform around 0.

    An element depends on the seed, its row and its place in it only. The n-th number of SplitMix64
    (Steele, Lea, Flood, OOPSLA'14) gives two elements, by Box and Muller's transform if normal; in
    double precision, so that machines whose logarithms differ in the last bit agree.
    """
    rows = np.empty((len(numbers), row_elems), np.float32)
    at_once = max(1, _PIECE_ELEMS // row_elems)
    for start in range(0, len(numbers) if row_elems else 0, at_once):
        piece = slice(start, start + at_once)
        rows[piece] = _rows(numbers[piece].astype(np.uint64), row_elems, seed, std, uniform)
    return rows


def _rows(numbers: np.ndarray, row_elems: int, seed: int, std: float, uniform: bool) -> np.ndarray:
    pairs = (row_elems + 1) // 2
    counters = numbers[:, None] * np.uint64(pairs) + np.arange(1, pairs + 1, dtype=np.uint64)
    origin = _mixed(np.array([seed], np.uint64))
    bits = _mixed(counters * _GAMMA + origin)
    first = ((bits >> _HALF).astype(np.float64) + 0.5) / 2**32  # never 0
    second = (bits.astype(np.uint32).astype(np.float64) + 0.5) / 2**32
    both = np.empty((len(numbers), pairs, 2))
    if uniform:
        both[..., 0], both[..., 1] = first, second
        both -= 0.5
        both *= std * math.sqrt(12)
    else:
        length = np.sqrt(-2 * np.log(first)) * std
        angle = second * (2 * math.pi)
        both[..., 0], both[..., 1] = length * np.cos(angle), length * np.sin(angle)
    return both.reshape(len(numbers), 2 * pairs)[:, :row_elems]


def _mixed(bits: np.ndarray) -> np.ndarray:
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> shift)) * factor
    return bits ^ (bits >> _LAST)
