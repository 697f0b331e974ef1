"""How gradients get into memory that the network reads, and values into the script's tensors.

On the CPU both are the same memory. `accelerators` is the other case.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, Optional, Tuple

import torch

Then = Callable[[Optional[torch.Tensor]], None]
"""Called with values in the host's memory, which nobody else changes, or with None for None."""


class Copies(ABC):
    """Of one tensor, or of some that travel together, all on one device.

    `arm` and `to_host` belong to the thread that computes, all else to whoever holds the lock of
    the tensor's value.
    """

    @abstractmethod
    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host's, contiguous, for values that come."""

    @abstractmethod
    def to_host(self, source: Optional[torch.Tensor], then: Then) -> None:
        """Calls `then` with a tensor as the script has it now, once that is in the host's memory:
        contiguous, or rows that are coalesced. In this thread or another, and in the order of the
        calls of `to_host` for the same device. Nobody changes the tensor before the step ends."""

    @abstractmethod
    def arm(self) -> None:
        """What is written from now on comes after what the script has begun to compute."""

    @abstractmethod
    def write(self, write: Callable[[], object]) -> None:
        """Calls `write`, which copies values from the host's memory into the tensor."""

    @abstractmethod
    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's where the tensor is; for `write`."""

    @abstractmethod
    def reach_reader(self) -> bool:
        """Has what this thread computes from now on see what was written last. Returns whether all
        threads and streams do."""

    @abstractmethod
    def finish(self) -> bool:
        """Waits until all threads and streams see what was written last. Returns True."""


class HostCopies(Copies):
    """Of tensors on the CPU, which the network reads where they are."""

    def empty(self, shape: Tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    def to_host(self, source: Optional[torch.Tensor], then: Then) -> None:
        then(source if source is None or source.is_sparse else source.contiguous())

    def arm(self) -> None:
        pass

    def write(self, write: Callable[[], object]) -> None:
        write()

    def to_device(self, value: torch.Tensor) -> torch.Tensor:
        return value

    def reach_reader(self) -> bool:
        return True

    def finish(self) -> bool:
        return True
