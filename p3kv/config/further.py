"""Variables beside a process's settings and its place: modules to import, and colours."""

from __future__ import annotations

import os
from typing import List, Mapping


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
