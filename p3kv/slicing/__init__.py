"""Tensors cut into slices, and the slices' place on the servers."""

from p3kv.slicing.slices import Slice, cut, loads_with

__all__ = ["Slice", "cut", "loads_with"]
