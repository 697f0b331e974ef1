"""Leaves torch's compiler out of a process that compiles nothing."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any, Callable

_NAME = "torch._dynamo"


class _NoCompiler(ModuleType):
    """In the place of torch._dynamo. It answers what torch's optimizers ask; for anything else, the
    compiler is imported all the same."""

    @staticmethod
    def disable(function: Callable, *_: Any, **__: Any) -> Callable:
        """A function that is not compiled: this one."""
        return function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """There is no graph to break."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(importlib.import_module(_NAME), name)


def leave_out() -> None:
    """The first of torch's optimizers in this process does not import the compiler, which takes a
    second of a processor and 70 MB of memory."""
    sys.modules.setdefault(_NAME, _NoCompiler(_NAME))
