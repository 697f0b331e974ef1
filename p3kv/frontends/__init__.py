"""The frameworks that p3kv serves, each attached when the user's script imports it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Optional, Sequence

_FRONT_ENDS = {"mxnet": "p3kv.frontends.mxnet"}


def attach() -> None:
    """Attaches the front end of every framework, now or as soon as it is imported."""
    for framework, front_end in _FRONT_ENDS.items():
        if framework in sys.modules:
            importlib.import_module(front_end)
        else:
            sys.meta_path.insert(0, _AfterImport(framework, front_end))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Imports a front end right after its framework."""

    def __init__(self, framework: str, front_end: str) -> None:
        self._framework = framework
        self._front_end = front_end

    def find_spec(
        self,
        name: str,
        path: Optional[Sequence[str]],
        target: Optional[ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != self._framework:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._front_end)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, front_end: str) -> None:
        self._loader = loader
        self._front_end = front_end

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        importlib.import_module(self._front_end)
