"""Forks while gradients are on their way: process pools, data loaders, `os.system`.

Before a fork MXNet stops its engine, which waits for all operations. Python threads complete our
operations, and the forking thread may hold the GIL meanwhile: a deadlock. So handlers of ours
complete all operations before MXNet's handler runs, while the GIL is free for other threads.

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
    second handler before every fork. It calls the handlers that were registered last first, so ours
    runs before MXNet's.
    """
    os.register_at_fork(before=_wait)
    register = ctypes.CDLL(None)["__register_atfork"]
    register.argtypes = [ctypes.c_void_p] * 4
    register(ctypes.cast(_wait_in_c, ctypes.c_void_p), None, None, None)


def _wait() -> None:
    with suppress(mx.base.MXNetError):  # a caller that waits for one of these arrays gets it, too
        mx.nd.waitall()


_wait_in_c = ctypes.CFUNCTYPE(None)(_wait)
"""Kept for the life of the process, because the C library has its address."""
