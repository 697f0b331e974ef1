"""Where a model has its buffers, and the parameters that nothing trains; which travel together."""

from __future__ import annotations

import logging
import math
from typing import Any, Collection, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple
from weakref import ReferenceType, ref

import torch
from torch.nn.modules.batchnorm import _NormBase

from p3kv.consistency import Consistency
from p3kv.errors import NotSupportedError
from p3kv.frontends.torch.values.compiled import own_name
from p3kv.frontends.torch.values.devices import Devices
from p3kv.frontends.torch.values.table_weight import TableWeight

_log = logging.getLogger("p3kv")
BROADCAST, AVERAGE, OWN = HOWS = ("broadcast", "average", "own")
IN_FORWARD = "in the forward pass"
OWNS = OWN, LEFT = OWN, "left"
"""DistributedDataParallel's: BROADCAST when the next forward pass begins; OWN from the start on."""
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
    """Where a model has a tensor: another one may take its place. It does not keep the model."""

    of: ReferenceType[torch.nn.Module]
    attribute: str
    name: str
    shape: Tuple[int, ...]
    device: torch.device
    dtype: torch.dtype
    kind: str = "buffer"

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor. Raises NotSupportedError if it has another shape or device than before."""
        found = self._found
        now = "gone" if found is None else f"{tuple(found.shape)} on {found.device}"
        if found is None or tuple(found.shape) != self.shape or found.device != self.device:
            also = ", but with buffers='own' and without checkpoints"
            raise NotSupportedError(
                f"the {self.kind} '{self.name}' had the shape {self.shape} on {self.device} when "
                f"p3kv.torch.Optimizer was made, and is {now} now: {self.kind}s keep their shapes "
                f"and devices{also if self.kind == 'buffer' else ''}"
            )
        return found

    @property
    def is_as_it_was(self) -> bool:
        """Whether the model has a tensor like the first one there."""
        found = self._found
        return found is not None and self == self._replace(
            shape=tuple(found.shape), device=found.device, dtype=found.dtype
        )

    @property
    def is_statistic(self) -> bool:
        """Whether a layer updates it while it trains, and no backward pass reads it."""
        module = self.of()
        return isinstance(module, _NormBase) and module.training

    @property
    def _found(self) -> Optional[torch.Tensor]:
        module: Any = self.of()
        if module is None:
            return None
        tensors = module._buffers if self.kind == "buffer" else module._parameters
        found: Optional[torch.Tensor] = tensors.get(self.attribute)
        return found


def places_of(model: torch.nn.Module, how: str, devices: Devices) -> List[Place]:
    """A model's buffers, each once. Raises NotSupportedError for one
    that can't travel; where each worker has its own, the log says that it is left out."""
    found: Dict[int, Place] = {}
    for module, attribute, name, tensor in _tensors_of(model, "_buffers"):
        if not tensor.numel() or id(tensor) in found:
            continue
        place = _place(module, attribute, name, tensor, "buffer")
        if not _travels(tensor, devices):
            what = _what_does_not_travel(place, tensor)
            if how not in OWNS:
                raise NotSupportedError(
                    f"{what}: with p3kv.torch.Optimizer(..., buffers='own') it is left out"
                )
            _log.warning("%s: it is each worker's own, and not in checkpoints", what)
            continue
        found[id(tensor)] = place
    return list(found.values())


def untrained_places(
    model: torch.nn.Module, trained: Collection[int], devices: Devices
) -> List[Place]:
    """A model's parameters but those with these ids, each once; the log says which can't travel.
    Raises NotSupportedError for one that has no shape yet."""
    found: Dict[int, Place] = {}
    for module, attribute, name, tensor in _tensors_of(model, "_parameters"):
        if id(tensor) in trained or id(tensor) in found:
            continue
        if isinstance(tensor, TableWeight):
            continue  # perhaps another optimizer's; it tells who reads it if it is nobody's
        if torch.nn.parameter.is_lazy(tensor):
            check_has_shape(tensor, own_name(name))
        if not tensor.numel():
            continue
        place = _place(module, attribute, name, tensor, "parameter")
        if _travels(tensor, devices):
            found[id(tensor)] = place
        else:
            what = _what_does_not_travel(place, tensor)
            _log.warning("%s: it is each worker's own, and not in checkpoints", what)
    return list(found.values())


def check_has_shape(parameter: torch.nn.Parameter, name: str) -> None:
    """Raises NotSupportedError for a parameter that is to be initialised by a forward pass."""
    if torch.nn.parameter.is_lazy(parameter):
        raise NotSupportedError(
            f"the parameter '{name}' has no shape yet: run one forward pass before you make "
            "p3kv.torch.Optimizer"
        )


def _tensors_of(
    model: torch.nn.Module, kind: str
) -> Iterator[Tuple[torch.nn.Module, str, str, torch.Tensor]]:
    """A model's parameters or buffers, each with its module, attribute and name, but those that
    scripts have DistributedDataParallel leave alone, and which so are each worker's own."""
    left_alone: Set[str] = set()
    for prefix, module in model.named_modules():
        prefix = f"{prefix}." if prefix else ""
        names = vars(module).get("_ddp_params_and_buffers_to_ignore", ())
        left_alone.update(prefix + name for name in names)
        for attribute, tensor in vars(module)[kind].items():
            if tensor is not None and prefix + attribute not in left_alone:
                yield module, attribute, prefix + attribute, tensor


def _place(
    module: torch.nn.Module, attribute: str, name: str, tensor: torch.Tensor, kind: str
) -> Place:
    shape, name = tuple(tensor.shape), own_name(name)
    return Place(ref(module), attribute, name, shape, tensor.device, tensor.dtype, kind)


def _travels(tensor: torch.Tensor, devices: Devices) -> bool:
    usual = tensor.layout is torch.strided and not tensor.is_quantized
    return usual and devices.can_copy(tensor.device)


def _what_does_not_travel(place: Place, tensor: torch.Tensor) -> str:
    return (
        f"the {place.kind} '{place.name}' is {tensor.dtype}, {tensor.layout}, on {place.device}, "
        "and p3kv.torch takes dense ones on the CPU, cuda and xpu"
    )


def own_or_shared(chosen: Optional[str], rule: Consistency) -> str:
    """How buffers are each worker's own or all workers', by the user's choice, or else by default.

    Raises NotSupportedError for buffers of all where workers go on without each other: the next
    forward pass would wait for them.
    """
    waits = rule.waits_for_each_round
    if chosen is None or chosen == IN_FORWARD:
        return (chosen or BROADCAST) if waits else OWN
    if chosen not in OWNS and not waits:
        raise NotSupportedError(
            f"buffers={chosen!r} would have each worker wait for the others' buffers in each step, "
            "which the consistency is to avoid: leave it out, or use buffers='own'"
        )
    return chosen


def packed(places: List[Place]) -> Iterator[Tuple[torch.dtype, int, List[Place]]]:
    """What travels together, on one device, as which dtype, and how many elements it has."""
    small: Dict[Tuple[torch.dtype, torch.device], List[Place]] = {}
    for place in places:
        one = travelling(place.tensor)
        dtype = one.dtype
        if one.numel() > _SMALL_ELEMS:
            yield dtype, one.numel(), [place]
        else:
            small.setdefault((dtype, place.device), []).append(place)
    for (dtype, _), together in small.items():
        yield dtype, sum(flat(place.tensor).numel() for place in together), together


def called(places: List[Place]) -> str:
    more = f" and {len(places) - 1} more {places[0].kind}s" if len(places) > 1 else ""
    return f"{places[0].name}{more}"


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in their order, of a dtype that travels or is cast to one; else bytes."""
    tensor = tensor.detach()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().contiguous()).reshape(-1)
    if tensor.dtype not in _TRAVELS_AS:
        return tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.reshape(-1)


def travelling(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as they travel."""
    elements = flat(tensor)
    return elements.to(_TRAVELS_AS[elements.dtype])


def write(values: torch.Tensor, tensor: torch.Tensor) -> None:
    """Writes elements that have travelled into their tensor. Of those that share memory, as in
    expanded tensors, one is written."""
    tensor = tensor.detach()
    if tensor.is_complex():
        values = torch.view_as_complex(values.reshape(-1, 2))
    elif tensor.dtype not in _TRAVELS_AS:
        values = values.clone().view(tensor.dtype)
    values = values.reshape(tensor.shape)
    for dim, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[dim] > 1:
            tensor, values = tensor.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    tensor.data.copy_(values)


class Memory:
    """The memory of some tensors, where these have no gaps in it."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        extents = ((str(one.device), *_extent(one), at) for at, one in enumerate(tensors))
        self._extents = sorted(
            (device, start, end, at) for device, start, end, has_gaps, at in extents if not has_gaps
        )

    def of(self, one: torch.Tensor) -> List[int]:
        """The places of those tensors, in their order, that have all memory of one; none if there
        is memory that they do not have."""
        start, end, _ = _extent(one)
        found, covered = [], start
        for device, its_start, its_end, at in self._extents:
            if device == str(one.device) and its_start <= covered < its_end:
                found.append(at)
                covered = its_end
        return found if start < end <= covered else []

    def in_part(self, one: torch.Tensor) -> Optional[int]:
        """The place of a tensor that has some memory of one, which has no gaps."""
        start, end, has_gaps = _extent(one)
        for device, its_start, its_end, at in self._extents:
            if device == str(one.device) and not has_gaps and its_start < end and start < its_end:
                return at
        return None

    @property
    def shared(self) -> Optional[Tuple[int, int]]:
        """The places of two tensors that share memory, if any do."""
        for one, other in zip(self._extents, self._extents[1:]):
            if one[0] == other[0] and other[1] < one[2]:
                return min(one[3], other[3]), max(one[3], other[3])
        return None


def _extent(tensor: torch.Tensor) -> Tuple[int, int, bool]:
    """Addresses of a tensor's first byte and of the one after its last, and whether there are gaps
    between."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided or not tensor.numel():
            return 0, 0, True
        sizes = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride()) if stride]
        elems = 1 + sum((size - 1) * stride for size, stride in sizes)
        start = tensor.data_ptr()
        has_gaps = elems != math.prod(size for size, _ in sizes)
        return start, start + elems * tensor.element_size(), has_gaps
