"""The devices on which a model is."""

from __future__ import annotations

from typing import Callable, Dict

import torch

from p3kv.errors import NotSupportedError, in_one_line
from p3kv.frontends.torch.values.accelerators import Accelerator, DeviceCopies
from p3kv.frontends.torch.values.copies import Copies, HostCopies


class Devices:
    """Knows how to copy from and to each device of a model. Belongs to the script's thread."""

    def __init__(self, abort: Callable[[str], None]) -> None:
        """`abort(reason)` ends the job where a gradient can't leave its device."""
        self._abort = abort
        self._accelerators: Dict[torch.device, Accelerator] = {}

    def copies(self, device: torch.device) -> Copies:
        """How the values of a tensor on a device are copied; raises NotSupportedError for a device
        that p3kv can't copy from and to beside what it computes."""
        if device.type == "cpu":
            return HostCopies()
        found = self._accelerators.get(device)
        if found is None:
            found = self._accelerators[device] = self._made(device)
        return DeviceCopies(found)

    def can_copy(self, device: torch.device) -> bool:
        """Whether `copies` takes a device."""
        try:
            self.copies(device)
        except NotSupportedError:
            return False
        return True

    def start(self) -> None:
        """Has gradients leave; no device is new from now on."""
        for accelerator in self._accelerators.values():
            accelerator.start()

    def step_ends(self) -> None:
        """Nothing more leaves in this step."""
        for accelerator in self._accelerators.values():
            accelerator.step_ends()

    def close(self) -> None:
        """Ends all threads."""
        for accelerator in self._accelerators.values():
            accelerator.close()

    def _made(self, device: torch.device) -> Accelerator:
        try:
            return Accelerator(device, self._abort)
        except (AttributeError, RuntimeError) as error:
            raise NotSupportedError(
                f"p3kv.torch can't train on the device '{device}': it needs streams, events and "
                f"pinned memory, as torch has them for cuda and xpu ({in_one_line(error)})"
            ) from error
