"""The frameworks that p3kv serves, each attached when the user's script imports it."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Dict, Optional, Sequence

_FRONT_ENDS = {"mxnet": "p3kv.frontends.mxnet"}
_HOW_TO_INSTALL = {
    "mxnet": "p3kv's extras install it: pip install '.[cpu]' in p3kv's repository, or cu101, "
    "cu102, cu110 or cu112 instead of cpu for MXNet's CUDA builds"
}

_WARM_UP: Dict[str, Callable[[Any], None]] = {"mxnet": lambda mxnet: mxnet.nd.waitall()}


def warm_up(framework: str) -> None:
    """Imports a framework, without its front end, and starts what it starts at first use.

    It takes seconds. May be called from any thread, also while p3kv itself is being imported,
    because nothing here imports a module of p3kv's.
    """
    _WARM_UP[framework](importlib.import_module(framework))


def attach() -> None:
    """Attaches the front end of every framework, now or as soon as it is imported."""
    for framework, front_end in _FRONT_ENDS.items():
        if framework in sys.modules:
            importlib.import_module(front_end)
        else:
            sys.meta_path.insert(0, _AfterImport(framework, front_end))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Imports a front end right after its framework, and says how to install a missing one."""

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
        spec = self._found_by_others(path, target)
        if spec is None and _is_import_statement():
            raise ModuleNotFoundError(
                f"No module named '{name}': {_HOW_TO_INSTALL[name]}{_other_python()}", name=name
            )
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._front_end)
        return spec

    def _found_by_others(
        self, path: Optional[Sequence[str]], target: Optional[ModuleType]
    ) -> Optional[importlib.machinery.ModuleSpec]:
        # This finder stays in `sys.meta_path`: a package that only asks whether a framework is
        # there (`importlib.util.find_spec`) may import it later.
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(self._framework, path, target)
            if spec is not None:
                found: importlib.machinery.ModuleSpec = spec
                return found
        return None


def _is_import_statement() -> bool:
    """Whether an import calls the finder, and not `importlib.util.find_spec`.

    Other packages use the latter to look whether a framework is there, and need an answer.
    """
    # Frames from here: the finder, importlib's loop over all finders, and its caller.
    return sys._getframe(3).f_code.co_name == "_find_and_load_unlocked"


def _other_python() -> str:
    if sys.version_info < (3, 12):
        return ""
    this = ".".join(map(str, sys.version_info[:2]))
    return f". MXNet 1.9.1 runs on Python 3.8 to 3.11, so use one of these; this is {this}"


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
