"""The table of front ends: p3kv's own, each in a folder beside this file, and those of other
packages, which name theirs as entry points."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from typing import Dict, Iterable, Tuple

from p3kv import config
from p3kv.common import words
from p3kv.config.variables import add_prefix
from p3kv.errors import ConfigError, in_one_line
from p3kv.frontends.front_end import FrontEnd
from p3kv.frontends.mxnet.front_end import MXNet
from p3kv.frontends.torch.front_end import Torch
from p3kv.server.optimizer import OPTIMIZERS

GROUP = "p3kv.frontends"
"""The group of entry points. Each names a class that derives from `FrontEnd`, and has the name of
the framework's package."""


def _find() -> Tuple[FrontEnd, ...]:
    """p3kv's own need no metadata, which a copy that is not installed, or an older installation in
    place, does not have.

    Raises ConfigError for an installed front end that can't be used: otherwise its users would get
    the framework's own store.
    """
    found: Dict[str, FrontEnd] = {own.name: own for own in (MXNet(), Torch())}
    for entry in set(_entry_points()):
        which = f"the front end {entry.name!r}, which a package has installed as {entry.value!r}"
        try:
            front_end = entry.load()()
        except Exception as error:
            raise ConfigError(
                f"{which}, can't be loaded: {in_one_line(error)}. Repair or uninstall that package"
            ) from error
        if not isinstance(front_end, FrontEnd) or front_end.name != entry.name:
            raise ConfigError(f"{which}, is no front end of that name. Uninstall that package")
        if entry.name in found:
            raise ConfigError(
                f"{which}, is not the only one of {entry.name}. Keep one of the packages that have "
                "one"
            )
        found[entry.name] = front_end
    return tuple(found.values())


def _entry_points() -> Iterable[metadata.EntryPoint]:
    if sys.version_info >= (3, 10):
        return metadata.entry_points(group=GROUP)
    return metadata.entry_points().get(GROUP, ())


FRONT_ENDS = _find()


def register() -> None:
    """Tells the rest of p3kv what it must know of front ends; before the process takes its role."""
    here = [one for one in FRONT_ENDS if importlib.util.find_spec(one.name) is not None]
    for front_end in here or FRONT_ENDS:  # a scheduler's host may have none
        words.add(front_end.name, front_end.words)
    for front_end in FRONT_ENDS:
        config.add_aliases(front_end.aliases)
        add_prefix(front_end.prefix)
        OPTIMIZERS.register(front_end.name, front_end.make_optimizer)
