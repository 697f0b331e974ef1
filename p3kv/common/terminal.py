"""A process and what has started it: closed standard streams, Ctrl-C while a command is still being
imported, a parent's end.

Imports nothing that takes time: Ctrl-C before that shows a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def is_command() -> bool:
    """Whether this process seems to be p3kv's command line, as far as its arguments tell: `p3kv` or
    `python -m` something."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name in ("p3kv", "-m") and threading.current_thread() is threading.main_thread()


def end_silently() -> None:
    """Let SIGINT end a command as the system does: without a word."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Undoes `end_silently`: SIGINT raises KeyboardInterrupt."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_MODES = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def guard() -> None:
    """Opens the null device in the place of standard streams that are closed. Otherwise the next
    socket or file gets the stream's number, and whatever prints writes to it."""
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


SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def outlive_parent() -> None:
    """Has this process go on when its parent ends, by whose end it was to be killed."""
    import ctypes

    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, 0)
