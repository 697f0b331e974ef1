"""What tests do where MXNet can't be installed (Python 3.12 and later): those that need it skip.

A test needs MXNet if it imports it, or starts a script of a job that does.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Sequence

import pytest

import p3kv  # noqa: F401  # its finder answers for MXNet: this module's comes before it

REASON = "MXNet is not installed: MXNet 1.9.1 runs on Python 3.8 to 3.11 only"


MISSING = importlib.util.find_spec("mxnet") is None
_IMPORT = re.compile(r"\b(import|from)\b[^\n;]*\bmxnet\b")
NEEDS_MXNET = pytest.mark.skipif(MISSING, reason=REASON)
"""For tests that need it in another way: what an environment with a framework is told."""


def skip_what_needs_it() -> None:
    """Has imports of MXNet, and starts of scripts that import it, skip the test or the module."""
    if MISSING:
        sys.meta_path.insert(0, _Skip())
        start = subprocess.Popen.__init__

        @functools.wraps(start)
        def start_or_skip(self: Any, args: Any, *more: Any, **named: Any) -> None:
            _skip_where_needed([args] if isinstance(args, (str, os.PathLike)) else list(args))
            start(self, args, *more, **named)

        subprocess.Popen.__init__ = start_or_skip  # type: ignore[method-assign]


class _Skip:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        # Of importlib's frames only an import statement's: others ask whether MXNet is there.
        caller = sys._getframe(2).f_code.co_name
        if name == "mxnet" and caller == "_find_and_load_unlocked":
            pytest.skip(REASON, allow_module_level=True)


def _skip_where_needed(command: Sequence[Any]) -> None:
    """Skip if the command runs a script that needs MXNet."""
    words = [os.fspath(word) for word in command]
    scripts = [Path(word) for word in words if word.endswith(".py")]
    code = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "-c"]
    if any(map(_needs_mxnet, scripts)) or any(map(_IMPORT.search, code)):
        pytest.skip(REASON)


@functools.lru_cache(maxsize=None)
def _needs_mxnet(script: Path) -> bool:
    """Whether a script, or a module beside it that it imports, imports MXNet."""
    if not script.is_file():
        return False
    return any(
        name.partition(".")[0] == "mxnet" or _needs_mxnet(script.parent / f"{name}.py")
        for name in _imported(script)
    )


def _imported(script: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
