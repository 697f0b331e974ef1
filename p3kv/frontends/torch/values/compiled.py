"""Compiled regions wait for late values at their entrance.

Inside, a class that is not the parameter's own would have torch compile again, or not at all.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, Callable, Optional

import torch

from p3kv.frontends.torch.values.watched import free_entrances, take_all, take_all_of

_compile = torch.compile


@functools.wraps(_compile)
def compile(model: Any = None, **options: Any) -> Any:
    """`torch.compile`, whose regions wait before they are entered."""
    compiled = _compile(model, **options)
    if model is None:  # of a decorator, which calls this again
        return compiled
    guard_modules()
    if isinstance(compiled, torch.nn.Module):
        return compiled
    return _waiting(compiled, getattr(model, "__self__", None))


def install() -> None:
    """Has `torch.compile` and `Module.compile` make regions that wait, and tracing, which compares
    what it sees twice, wait before."""
    torch.compile = compile
    torch.jit.trace = _waiting(torch.jit.trace)
    torch.jit.trace_module = _waiting(torch.jit.trace_module)


def own_name(name: str) -> str:
    """A parameter's or a buffer's name as it is without compiling, so that a job may go on with
    compiled modules or without."""
    return name.replace("_orig_mod.", "")


def has_compiler() -> bool:
    """Whether torch's compiler is imported; else nothing is compiled yet."""
    return "torch._dynamo.eval_frame" in sys.modules


@functools.lru_cache(maxsize=None)
def guard_modules() -> None:
    """Has all modules that `torch.compile` makes or has made wait for their own values. Once; it
    imports torch's compiler."""
    from torch._dynamo.eval_frame import OptimizedModule

    enter = OptimizedModule.__call__

    @functools.wraps(enter)
    def wait_and_enter(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        take_all_of(module)
        with free_entrances():
            return enter(module, *args, **kwargs)

    OptimizedModule.__call__ = wait_and_enter


def _waiting(compiled: Callable[..., Any], owner: Optional[Any] = None) -> Callable[..., Any]:
    """A compiled function that waits first: for the values of its module, or else for all. What
    compiles code that calls it sees through it, by its attributes."""
    module = owner if isinstance(owner, torch.nn.Module) else None

    @functools.wraps(compiled)
    def wait_and_enter(*args: Any, **kwargs: Any) -> Any:
        if module is None:
            take_all()
        else:
            take_all_of(module)
        with free_entrances():
            return compiled(*args, **kwargs)

    return wait_and_enter
