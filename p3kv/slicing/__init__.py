"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.size import LEAST_CREDIT_BYTES, credit_bytes, lead_bytes, slice_size_for
from p3kv.slicing.slices import Slice, cut, loads_with

__all__ = [
    "LEAST_CREDIT_BYTES",
    "Slice",
    "credit_bytes",
    "cut",
    "lead_bytes",
    "loads_with",
    "slice_size_for",
]
