"""Memory in which a parameter's next value lands, and from which it is written."""

from __future__ import annotations

from collections import deque
from typing import Deque, Tuple

import torch

BY_SLICE_BYTES = 1 << 20
"""Parameters of so many bytes are written slice by slice: a reader then waits for the copy of the
last slices, and not of all."""


class Staging:
    """Memory for the value that is under way to a parameter, which may be read until `step`.

    `arrived` is called in the worker's thread, all else in one thread at a time.
    """

    def __init__(self, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
        """`value`: the memory, contiguous, whatever the parameter is, since values travel so."""
        self.value = value
        self._parameter = parameter
        self._slices: Deque[Tuple[int, int]] = deque()
        """Where each begins, and how many elements it has."""
        self._written_elems = 0

    def begin(self) -> None:
        """Another value is under way."""
        self._slices.clear()
        self._written_elems = 0

    def arrived(self, start: int, length: int) -> None:
        """A slice of the value is in the memory."""
        self._slices.append((start, length))

    @property
    def holds_slices(self) -> bool:
        """Whether slices are there that have not been written."""
        return bool(self._slices)

    def write_slices(self) -> bool:
        """Writes the slices that are there; whether all of the value is written then."""
        with torch._C.DisableTorchFunctionSubclass():
            weight = self._parameter.data
            if not weight.is_contiguous():
                return False
            weight, value = weight.view(-1), self.value.view(-1)
            while self._slices:
                start, length = self._slices.popleft()
                part = slice(start, start + length)
                weight[part].copy_(value[part], non_blocking=True)
                self._written_elems += length
            return self._written_elems == len(weight)

    def write(self) -> None:
        """Writes the value, all of which is there."""
        if not self._written_elems or not self.write_slices():
            self._parameter.data.copy_(self.value, non_blocking=True)
