"""The settings that hold in this process: those set in code, then the environment's."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from typing import Any, Dict

from p3kv.common import words
from p3kv.config.settings import Settings, check_together, converted, variable_of
from p3kv.config.trials import settings_of_a_trial, trial
from p3kv.errors import ConfigError

_overrides: Dict[str, Any] = {}
_frozen = False


def configure(**settings: Any) -> None:
    """Sets settings in code, over the environment's; the names are those of `Settings`.

    Call it in every worker before the store is created. Raises ConfigError for an unknown name,
    a value out of range, and when it comes too late.
    """
    if _frozen:
        raise ConfigError(
            "the job has its settings and keeps them: call p3kv.configure before the first "
            f"{words.current().first_use}"
        )
    known = [field.name for field in fields(Settings)]
    checked = {}
    for name, value in settings.items():
        if name not in known:
            meant = words.did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"there is no setting '{name}'{meant}")
        checked[name] = converted(name, variable_of(name), value, strict=True)
    _overrides.update(checked)


def current() -> Settings:
    """The settings that hold now: those set in code, then the environment's, then defaults."""
    settings = replace(Settings.from_environment(), **_overrides)
    tried = trial()
    return settings if tried is None else settings_of_a_trial(settings, tried)


def freeze() -> Settings:
    """The settings of the store that is being created; `configure` changes nothing any more."""
    global _frozen
    settings = current()
    if settings.checkpoint_dir is not None:
        # Servers may have another current folder.
        settings = replace(settings, checkpoint_dir=os.path.abspath(settings.checkpoint_dir))
    check_together(settings)
    _frozen = True
    return settings


def wants_traceback() -> bool:
    """Whether an error of p3kv's shows its traceback, too; not if settings are what is wrong."""
    try:
        return current().verbose > 0
    except ConfigError:
        return False
