"""Quantities with units, as arguments: "10gbit" and "300ms"."""

from __future__ import annotations

import argparse
import re
from typing import Mapping

_BIT_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)(/s)?\s*", re.IGNORECASE)


def bandwidth(text: str) -> float:
    """Bits a second: "800mbit", "10 Gbit/s"."""
    return _read(text, _BIT_S, "bandwidth", "10gbit", takes_per_second=True)


def duration(text: str) -> float:
    """Seconds: "0.3s", "300ms"."""
    return _read(text, _SECONDS, "time", "0.3s", takes_per_second=False)


def _read(
    text: str, units: Mapping[str, float], what: str, example: str, takes_per_second: bool
) -> float:
    known = f"{', '.join(list(units)[:-1])} or {list(units)[-1]}"
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found is None or (found[3] and not takes_per_second):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no {what}; write a number and {known}, such as {example}"
        )
    number, unit = float(found[1]), found[2].lower()
    if not unit:
        raise argparse.ArgumentTypeError(
            f"'{text}' has no unit; write {known} after the number, such as {example}"
        )
    if unit not in units:
        raise argparse.ArgumentTypeError(
            f"'{found[2]}' in '{text}' is no unit of a {what}; write {known}, such as {example}"
        )
    if not 0 < number * units[unit] < 1e18:
        raise argparse.ArgumentTypeError(f"'{text}' is no {what} that anything has")
    return number * units[unit]
