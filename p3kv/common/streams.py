"""The standard streams: programs may be started without them, as by `p3kv launch >&-`."""

from __future__ import annotations

import os
import sys

_MODES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def guard() -> None:
    """Opens the null device in the place of standard streams that are closed.

    Otherwise the next socket or file gets the stream's number, and whatever prints writes to it.
    """
    for number, (name, mode) in enumerate(_MODES):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  stays open


def drop_output() -> None:
    """Drops what is printed from now on, and what has not left: the standard output takes no more,
    and Python would try it once more at its end."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
