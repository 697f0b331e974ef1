"""Ctrl-C while a command is still being imported ends it at once, without a traceback."""

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
    """Has SIGINT end a command as it ends processes that know nothing of it."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_again() -> None:
    """Undoes `end_silently`: SIGINT raises KeyboardInterrupt."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
