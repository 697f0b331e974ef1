"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.size import credit_bytes, slice_size_for
from p3kv.slicing.slices import Slice, cut, loads_with

__all__ = ["Slice", "credit_bytes", "cut", "loads_with", "slice_size_for"]
