"""Where a model has its buffers, and which of them travel together."""

from __future__ import annotations

import logging
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch

from p3kv.consistency import Consistency
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.values.compiled import own_name
from p3kv.frontends.torch.values.devices import Devices

_log = logging.getLogger("p3kv")
BROADCAST, AVERAGE, OWN = HOWS = ("broadcast", "average", "own")
_TRAVELS_AS = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.bool: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.int16: torch.int32,
    torch.int32: torch.int32,
    torch.int64: torch.int64,
}
_SMALL_ELEMS = 65_536
"""Buffers of at most so many elements travel together: there are many, and most change in each
step. A larger one, such as a mask, is often constant, and then does not travel."""


class Place(NamedTuple):
    """Where a model has a buffer: another tensor may take its place."""

    module: torch.nn.Module
    attribute: str
    name: str
    shape: Tuple[int, ...]
    device: torch.device

    @property
    def where(self) -> Tuple[int, str]:
        """Tells it from all others."""
        return id(self.module), self.attribute

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer. Raises NotSupportedError if it has another shape or device than before."""
        found = self.module._buffers.get(self.attribute)
        now = "gone" if found is None else f"{tuple(found.shape)} on {found.device}"
        if found is None or tuple(found.shape) != self.shape or found.device != self.device:
            raise NotSupportedError(
                f"the buffer '{self.name}' had the shape {self.shape} on {self.device} when "
                f"p3kv.torch.Optimizer was made, and is {now} now: buffers keep their shapes and "
                "devices, but with buffers='own' and without checkpoints"
            )
        return found


kept: Dict[Tuple[int, str], Any] = {}
"""By `Place.where`: what has the buffer travel."""


def places_of(model: torch.nn.Module, how: str, devices: Devices) -> List[Place]:
    """A model's buffers, each once, also those of which another optimizer takes care (`kept`).

    Raises NotSupportedError for one that can't travel, unless each worker is to have its own: then
    the log says that it is left out.
    """
    found: Dict[int, Place] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in module._buffers.items():
            if tensor is None or not tensor.numel() or id(tensor) in found:
                continue
            name, device = _named(prefix, attribute), tensor.device
            place = Place(module, attribute, name, tuple(tensor.shape), device)
            if (
                not devices.can_copy(device)
                or tensor.layout is not torch.strided
                or tensor.dtype not in _TRAVELS_AS
            ):
                what = (
                    f"the buffer '{place.name}' is {tensor.dtype}, {tensor.layout}, on "
                    f"{device}, and p3kv.torch takes dense ones of usual dtypes on the CPU, cuda "
                    "and xpu"
                )
                if how != OWN:
                    raise NotSupportedError(
                        f"{what}: with p3kv.torch.Optimizer(..., buffers='own') it is left out"
                    )
                _log.warning("%s: it is each worker's own, and not in checkpoints", what)
                continue
            found[id(tensor)] = place
    return list(found.values())


def own_or_shared(chosen: Optional[str], rule: Consistency) -> str:
    """How buffers are each worker's own or all workers', by the user's choice, or else by default.

    Raises NotSupportedError for buffers of all where workers go on without each other: the next
    forward pass would wait for them.
    """
    waits = not (rule.own_rounds or rule.lets_go_ahead or rule.local)
    if chosen is None:
        return BROADCAST if waits else OWN
    if chosen != OWN and not waits:
        raise NotSupportedError(
            f"buffers={chosen!r} would have each worker wait for the others' buffers in each step, "
            "which the consistency is to avoid: leave it out, or use buffers='own'"
        )
    return chosen


def packed(places: List[Place]) -> Iterator[Tuple[torch.dtype, int, List[Place]]]:
    """What travels together, on one device, as which dtype, and how many elements it has."""
    small: Dict[Tuple[torch.dtype, torch.device], List[Place]] = {}
    for place in places:
        dtype = _TRAVELS_AS[place.tensor.dtype]
        elems = flat(place.tensor).numel()
        if elems > _SMALL_ELEMS:
            yield dtype, elems, [place]
        else:
            small.setdefault((dtype, place.device), []).append(place)
    for (dtype, _), together in small.items():
        yield dtype, sum(flat(place.tensor).numel() for place in together), together


def _named(prefix: str, attribute: str) -> str:
    return own_name(f"{prefix}.{attribute}" if prefix else attribute)


def called(places: List[Place]) -> str:
    more = f" and {len(places) - 1} more buffers" if len(places) > 1 else ""
    return f"{places[0].name}{more}"


def flat(buffer: torch.Tensor) -> torch.Tensor:
    buffer = buffer.detach()
    return (torch.view_as_real(buffer.contiguous()) if buffer.is_complex() else buffer).reshape(-1)
