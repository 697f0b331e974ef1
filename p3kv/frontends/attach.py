"""Attaches front ends: imports of a framework call its front end, which registers the store."""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import Iterable, Iterator, Optional, Sequence

from p3kv.frontends.front_end import FrontEnd
from p3kv.worker import this_process


def attach(front_ends: Iterable[FrontEnd]) -> None:
    """Attaches each front end to its framework, now or as soon as the framework is imported."""
    for front_end in front_ends:
        if front_end.name in sys.modules:
            front_end.attach()
            if this_process.is_worker():
                _leave_out_of_collections()
        else:
            sys.meta_path.insert(0, _AfterImport(front_end))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Attaches a front end right after its framework is imported, and says what to do about one
    that is missing or can't run here."""

    def __init__(self, front_end: FrontEnd) -> None:
        self._front_end = front_end

    def find_spec(
        self,
        name: str,
        path: Optional[Sequence[str]],
        target: Optional[ModuleType] = None,
    ) -> Optional[importlib.machinery.ModuleSpec]:
        if name != self._front_end.name:
            return None
        spec = self._found_by_others(path, target)
        if _is_import_statement():
            why_not = self._front_end.why_not()
            if spec is None:
                advice = ". ".join(filter(None, [self._front_end.how_to_install(), why_not]))
                raise ModuleNotFoundError(f"No module named '{name}': {advice}", name=name)
            if why_not:
                raise ImportError(f"{name} can't be imported: {why_not}", name=name)
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
            spec = None if find_spec is None else find_spec(self._front_end.name, path, target)
            if spec is not None:
                found: importlib.machinery.ModuleSpec = spec
                return found
        return None


def _is_import_statement() -> bool:
    """Whether an import calls the finder, and not `importlib.util.find_spec`. Other packages use
    the latter to look whether a framework is there, and need an answer."""
    # Frames from here: the finder, importlib's loop over all finders, and its caller.
    return sys._getframe(3).f_code.co_name == "_find_and_load_unlocked"


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, front_end: FrontEnd) -> None:
        self._loader = loader
        self._front_end = front_end

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Optional[ModuleType]:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with _no_collections():
            self._loader.exec_module(module)
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._front_end.attach()
        if this_process.is_worker():
            _leave_out_of_collections()


@contextmanager
def _no_collections() -> Iterator[None]:
    """What an import makes stays: collections would find nothing, and take a tenth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _leave_out_of_collections() -> None:
    """Has the garbage collector look no more at what there is now: modules, which stay anyway.

    A full collection goes through all of it, a hundred thousand objects. It holds the
    GIL, so the network thread stands still meanwhile, and with it all workers. Nothing is collected
    any more that exists now, so a script's models must come later.
    """
    gc.collect()  # garbage would stay, too
    gc.freeze()
