"""Variables of the environment: as texts, flags and numbers, and those that go to other hosts."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Dict, List, Mapping, Optional

from p3kv.errors import ConfigError

WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
MAX_NUMBER = 2**31 - 1


def text_of(name: str, environ: Mapping[str, str]) -> Optional[str]:
    """A variable's value, if set; ConfigError unless it can be printed: messages are one line."""
    value = environ.get(name)
    if value is not None and not value.isprintable():
        raise ConfigError(f"{name} is {value!a}; it must be text in UTF-8 that can be printed")
    return value


def flag(name: str, default: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """A variable that is 1 or 0, or their words; ConfigError for another value."""
    text = text_of(name, environ)
    if not text:
        return default
    if text.lower() not in WORDS:
        raise ConfigError(f"{name} is '{text}'; it must be 1 or 0")
    return WORDS[text.lower()]


def optional_number(name: str, environ: Mapping[str, str]) -> Optional[int]:
    """A whole number, if there is one; ConfigError for what is none."""
    text = text_of(name, environ)
    if not text:
        return None
    with suppress(ValueError):
        number = int(text)
        if abs(number) <= MAX_NUMBER:
            return number
    raise ConfigError(f"{name} is '{text}'; it must be a whole number of at most {MAX_NUMBER}")


def plugins(environ: Mapping[str, str] = os.environ) -> List[str]:
    """P3KV_PLUGINS: modules to import before this process takes its role.

    They register what a job may then choose by name. Only the process's own environment names them;
    no message can. They must not import a framework, because a framework takes over roles itself.
    """
    return _modules("P3KV_PLUGINS", environ)


def optimizer_modules(environ: Mapping[str, str] = os.environ) -> List[str]:
    """P3KV_OPTIMIZERS: modules that a server imports after the framework, when its job has an
    optimizer. They register optimizers of the user's own with the framework.

    Only the server's own environment names them; no message can.
    """
    return _modules("P3KV_OPTIMIZERS", environ)


def wants_colours(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a terminal may show colours (https://no-color.org)."""
    return not environ.get("NO_COLOR")


def _modules(variable: str, environ: Mapping[str, str]) -> List[str]:
    return [name.strip() for name in environ.get(variable, "").split(",") if name.strip()]


_PREFIXES: List[str] = [
    "P3KV_", "DMLC_", "PS_", "PYTHON", "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "CUDA_",
]  # fmt: skip
_NAMES = (
    "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV",
)  # fmt: skip
_OF_ONE_HOST = ("DMLC_NODE_HOST",)
"""They say where one process listens, and would be wrong for the others."""


def add_prefix(prefix: str) -> None:
    """Let a framework's own variables travel to other hosts, too."""
    _PREFIXES.append(prefix)


def forwarded(environ: Mapping[str, str]) -> Dict[str, str]:
    """The variables that a process needs on another host: settings, and where its programs are."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _NAMES or name.startswith(tuple(_PREFIXES))) and name not in _OF_ONE_HOST
    }
