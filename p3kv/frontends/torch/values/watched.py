"""Tensors whose uses are told: to what waits for their values, or sees that nobody changes them.

Such a tensor is of a class of its own, a subclass of what it was, whose `__torch_function__` torch
calls for every operation on it. So a tensor that is not watched costs nothing.
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Type
from weakref import WeakSet

import torch

from p3kv.errors import P3Error
from p3kv.frontends.torch.script_marks import may_begin_forward

_ATTRIBUTES = (
    "_version", "device", "dtype", "grad", "grad_fn", "is_leaf", "is_sparse", "layout",
    "ndim", "requires_grad", "shape",
)  # fmt: skip
_METHODS = (
    "dim", "element_size", "is_contiguous", "is_floating_point", "numel", "register_hook",
    "register_post_accumulate_grad_hook", "size", "stride",
)  # fmt: skip


def _need_no_value() -> Iterator[Any]:
    for name in _ATTRIBUTES:
        attribute = getattr(torch.Tensor, name)
        yield from (attribute.__get__, getattr(attribute, "__set__", None))
        yield getattr(attribute, "__delete__", None)
    for name in _METHODS:
        yield getattr(torch.Tensor, name)


NEED_NO_VALUE = {one for one in _need_no_value() if one is not None}
"""Functions that read or change what is not a parameter's value."""


_GIVES_MEMORY = {
    "__array__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__reduce_ex__",
    "__repr__", "_amp_foreach_non_finite_check_and_unscale_", "_typed_storage",
    "const_data_ptr", "data_ptr", "mutable_data_ptr", "numpy", "share_memory_", "storage",
    "untyped_storage",
}  # fmt: skip
"""Functions by which a script may write without a count from then on, or that need the class."""


@functools.lru_cache(maxsize=256)
def gives_memory(function: Any) -> bool:
    """Whether it does, or sets what the memory is."""
    return _own_name(function) == "__set__" or name_of(function) in _GIVES_MEMORY


@functools.lru_cache(maxsize=256)
def name_of(function: Any) -> str:
    """That of a function, or of the attribute that it gets or sets."""
    name = _own_name(function)
    return _own_name(function.__self__) if name in ("__get__", "__set__") else name


def _own_name(function: Any) -> str:
    name: str = getattr(function, "__name__", "")
    return name


class Watcher(ABC):
    """What is told of each use of some tensors, and has it wait."""

    __slots__ = ()

    @abstractmethod
    def take(self, tensor: Optional[torch.Tensor] = None) -> None:
        """Waits for the values that are under way, and has a tensor have its own, or all."""

    @abstractmethod
    def read(self, tensor: torch.Tensor, function: Any) -> None:
        """The same, for what this thread computes next: by this function of torch."""

    def gave(self, tensor: torch.Tensor, function: Any, result: Any) -> None:  # noqa: B027
        """The function has returned."""

    def enter(self, tensor: torch.Tensor) -> None:
        """As `read`, for a module that is about to be called and has the tensor."""
        self.take(tensor)


_WATCHERS: Dict[int, Watcher] = {}
"""By the ids of tensors, which stay while they are here."""
_classes: Dict[Type[torch.Tensor], Type[torch.Tensor]] = {}
_changing = threading.RLock()
"""Held while tensors change their class: the script and the worker's thread may do so at once."""


def watch(watcher: Watcher, tensors: Iterable[torch.Tensor]) -> None:
    """From now on, whoever reads one of the tensors tells the watcher before."""
    with _changing:
        for tensor in tensors:
            if _WATCHERS.get(id(tensor)) is watcher:
                continue
            _WATCHERS[id(tensor)] = watcher
            kind = type(tensor)
            tensor.__class__ = _classes.get(kind) or _watched_class(kind)


def unwatch(watcher: Watcher, tensors: Iterable[torch.Tensor]) -> None:
    """Tensors are what they were before `watch`, if they have not been yet."""
    with _changing:
        for tensor in tensors:
            if _WATCHERS.get(id(tensor)) is watcher:
                tensor.__class__ = type(tensor).__base__
                del _WATCHERS[id(tensor)]


def pass_on(watcher: Watcher, other: Watcher, tensor: torch.Tensor) -> None:
    """Uses of a tensor that told `watcher` tell another one from now on."""
    with _changing:
        if _WATCHERS.get(id(tensor)) is watcher:
            _WATCHERS[id(tensor)] = other


def watcher_of(tensor: torch.Tensor) -> Optional[Watcher]:
    """What uses of a tensor are told to."""
    return _WATCHERS.get(id(tensor))


def forget(watcher: Watcher, number: int) -> None:
    """The tensor of this id is gone."""
    if _WATCHERS.get(number) is watcher:
        del _WATCHERS[number]


def is_watched(tensor: torch.Tensor) -> bool:
    """Whether uses of a tensor are told."""
    return id(tensor) in _WATCHERS


def before_fork() -> None:
    """Waits for all values: in a forked process none would come. The job's failure is for the next
    call to raise."""
    with suppress(P3Error):
        take_all()


def take_all() -> None:
    """Waits for all values that are under way."""
    for watcher in dict.fromkeys(list(_WATCHERS.values())):
        watcher.take()


def take_all_of(module: torch.nn.Module) -> None:
    """Waits for the values that are under way to a module's parameters and buffers, which is about
    to be called."""
    if not _WATCHERS:
        return
    if module.training:
        may_begin_forward()
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        watcher = _WATCHERS.get(id(tensor))
        if watcher is not None:
            watcher.take(tensor)


told_of_collectives: WeakSet[Any] = WeakSet()
"""Whose `collective_gets(tensors)` is called before a collective may write to tensors: torch counts
no such write."""


def watch_collectives() -> None:
    """Has collectives of torch.distributed wait for the tensors that they are given; torch tells
    only of some of them, by version."""
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d

    for name in ("_check_single_tensor", "_check_tensor_list"):  # each of them calls one
        check = getattr(distributed_c10d, name, None)
        if check is not None:
            setattr(distributed_c10d, name, _waiting_check(check))


def _waiting_check(check: Any) -> Any:
    @functools.wraps(check)
    def wait_and_check(tensors: Any, *arguments: Any, **named: Any) -> Any:
        if _WATCHERS:
            for watcher, tensor in _watched_among((tensors,)):
                watcher.read(tensor, check)
        for one in told_of_collectives:
            one.collective_gets([tensors] if isinstance(tensors, torch.Tensor) else tensors)
        return check(tensors, *arguments, **named)

    return wait_and_check


_entrances: WeakSet[object] = WeakSet()
"""Those who watch them: who may have weights that are read unseen."""
_entrance: Optional[Any] = None
"""torch's handle of the hook."""


def watch_entrances(who: object) -> None:
    """From now on, each module waits for its own parameters and buffers when it is called, for code
    that torch does not tell of: scripted modules and extensions."""
    global _entrance
    _entrances.add(who)
    if _entrance is None:
        _entrance = torch.nn.modules.module.register_module_forward_pre_hook(_enter)


def leave_entrances(who: object) -> None:
    """Nothing of `who` needs that any more."""
    global _entrance
    _entrances.discard(who)
    if not _entrances and _entrance is not None:
        _entrance.remove()
        _entrance = None


@contextmanager
def free_entrances() -> Iterator[None]:
    """Has no module wait inside, where torch's compiler would find the hook."""
    global _entrance
    if _entrance is None:
        yield
        return
    _entrance.remove()
    _entrance = None
    try:
        yield
    finally:
        if _entrances and _entrance is None:
            _entrance = torch.nn.modules.module.register_module_forward_pre_hook(_enter)


def _enter(module: torch.nn.Module, args: Any) -> None:
    if not _WATCHERS:
        return
    if isinstance(module, torch.jit.ScriptModule):  # what is inside is not called by Python
        own = itertools.chain(module.parameters(), module.buffers())
    else:
        own = itertools.chain(module._parameters.values(), module._buffers.values())
    for tensor in own:
        watcher = _WATCHERS.get(id(tensor))
        if watcher is not None:
            watcher.enter(tensor)


def _watched_class(of: Type[torch.Tensor]) -> Any:
    """Make the subclass of a class of tensors for those that are watched."""
    _classes[of] = made = type(
        of.__name__, (of,),
        {"__torch_function__": classmethod(_wait_and_call), "__deepcopy__": _wait_and_copy},
    )  # fmt: skip
    return made


def _wait_and_call(
    cls: Type[torch.nn.Parameter],
    function: Any,
    types: Tuple[type, ...],
    args: Tuple[Any, ...] = (),
    kwargs: Optional[Dict[str, Any]] = None,
) -> Any:
    if function in NEED_NO_VALUE:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))
    used = _watched_among((*args, *kwargs.values()) if kwargs else args)
    for watcher, tensor in used:
        watcher.read(tensor, function)
    with torch._C.DisableTorchFunctionSubclass():
        result = function(*args, **(kwargs or {}))
    for watcher, tensor in used:
        watcher.gave(tensor, function, result)
    return result


def _wait_and_copy(tensor: torch.Tensor, memo: Dict[int, Any]) -> torch.Tensor:
    """A copy of the class that the tensor has when it is not watched."""
    watcher = _WATCHERS.get(id(tensor))
    if watcher is not None:
        may_begin_forward()
        watcher.take(tensor)
    copied: torch.Tensor = copy.deepcopy(tensor, memo)
    return copied


def _watched_among(values: Iterable[Any]) -> List[Tuple[Watcher, torch.Tensor]]:
    """The tensors that are watched, also in lists, tuples and dicts."""
    found: List[Tuple[Watcher, torch.Tensor]] = []
    for one in values:
        watcher = _WATCHERS.get(id(one))
        if watcher is not None:
            found.append((watcher, one))
        elif isinstance(one, (list, tuple)):
            found += _watched_among(one)
        elif isinstance(one, dict):
            found += _watched_among(one.values())
    return found
