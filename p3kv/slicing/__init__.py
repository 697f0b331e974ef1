"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.slices import Slice, cut, num_slices

__all__ = ["Slice", "cut", "num_slices"]
