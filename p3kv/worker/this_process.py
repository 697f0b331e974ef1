"""The one worker of this process: found by the front end, and left when the process ends."""

from __future__ import annotations

import atexit
import sys
from typing import Optional

from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.worker.worker import Worker

_MAX_REASON_CHARS = 2000

_worker: Optional[Worker] = None


def join(launch: Launch) -> None:
    """Tells the scheduler that this process is there, and leaves when it ends."""
    global _worker
    _worker = Worker(launch)
    atexit.register(leave)


def worker() -> Worker:
    """This process's worker.

    Raises ConfigError when no launcher has started the process as one.
    """
    if _worker is None:
        raise ConfigError(
            "kvstore='p3' needs servers and a scheduler, and this process was started by no "
            "launcher: DMLC_ROLE is not set. Start the script with 'p3kv launch -n 2 -s 2 -- "
            "python train.py', or with MXNet's launch.py; to train without them, use "
            "kvstore='device'."
        )
    return _worker


def give_up_if_script_failed() -> None:
    """At the end of the process: where its script failed, tells all why, and ends what is under
    way with an error; what begins until `leave` ends with it, too."""
    assert _worker is not None
    if getattr(sys, "last_value", None) is not None:
        error = f"{type(sys.last_value).__name__}: {sys.last_value}"
        if len(error) > _MAX_REASON_CHARS:
            error = f"{error[:_MAX_REASON_CHARS]} ... (its own output has the rest)"
        _worker.abort(f"its script ended with {error}")


def leave() -> None:
    """At the end of the process: leaves the job."""
    give_up_if_script_failed()
    assert _worker is not None
    _worker.close()
