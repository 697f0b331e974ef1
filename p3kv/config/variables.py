"""Single variables as texts, flags and numbers; what is wrong is told by the variable's name."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Mapping, Optional

from p3kv.errors import ConfigError

WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
MAX_NUMBER = 2**31 - 1


def text_of(name: str, environ: Mapping[str, str]) -> Optional[str]:
    """A variable's value, if it is set; ConfigError for bytes that are no UTF-8, and for what can't
    be printed: every message is one line."""
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
