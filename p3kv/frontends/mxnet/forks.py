"""Forks while gradients are on their way: process pools, data loaders, `os.system`.

Before a fork MXNet stops its engine, which waits for all operations. Ours are completed by Python
threads, and the forking thread may hold Python's GIL meanwhile: both would wait for ever. So all
operations are completed before MXNet's handler comes, with the GIL free for other threads.

Read off MXNet 1.9.1: `src/initialize.cc` (install_pthread_atfork_handlers), `src/engine/
threaded_engine_perdevice.cc` (Stop).
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import mxnet as mx


def complete_before_forks() -> None:
    """Has every fork of this process wait until all of MXNet's operations are complete.

    Python calls the first handler before it takes locks of its own, but not for every fork:
    `subprocess` on Python 3.8 and 3.9 and libraries in C fork without it. The C library calls the
    second before every fork, handlers that were registered later first, so before MXNet's.
    """
    os.register_at_fork(before=_wait)
    register = ctypes.CDLL(None)["__register_atfork"]
    register.argtypes = [ctypes.c_void_p] * 4
    register(ctypes.cast(_wait_in_c, ctypes.c_void_p), None, None, None)


def _wait() -> None:
    with suppress(mx.base.MXNetError):  # whoever waits for one of these arrays gets it, too
        mx.nd.waitall()


_wait_in_c = ctypes.CFUNCTYPE(None)(_wait)
"""Kept for the life of the process: the C library has its address."""
