"""The one worker of this process: found by the front end, and left when the process ends."""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Optional

from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.worker.worker import Worker

_log = logging.getLogger(__name__)

_MAX_REASON_CHARS = 2000

_worker: Optional[Worker] = None
_said_alone = False


def join(launch: Launch) -> None:
    """Tells the scheduler that this process is there, and leaves when it ends."""
    global _worker
    _worker = Worker(launch)
    atexit.register(leave)


def belongs_to_a_job() -> bool:
    """Whether a launcher has started this process, or the one that it was forked from."""
    return _worker is not None or Launch.from_environment() is not None


def worker() -> Worker:
    """This process's worker.

    Raises ConfigError where the job does not know the process.
    """
    if _worker is None:
        raise ConfigError(
            "only the process that the launcher has started may create the p3 store, not one of "
            "its children. Create it where the training runs, or unset DMLC_ROLE for a child that "
            "trains by itself."
        )
    return _worker


def trains_alone(how: str) -> None:
    """Warns, once, that this worker of a job shares nothing with the others: `how` says why.

    Where it has the p3 store as well, another one is meant.
    """
    global _said_alone
    if _worker is None or _said_alone or _worker.started or _worker.num_workers == 1:
        return
    _said_alone = True
    _log.warning(
        "this worker trains alone, %s: it shares nothing with the other workers of its job (%d in "
        "all). Write kvstore='p3' in gluon's Trainer, or mx.kv.create('p3').",
        how,
        _worker.num_workers,
    )


def give_up_if_script_failed() -> bool:
    """At the end of the process: where its script failed, tells all why, and ends what is under
    way with an error; what begins until `leave` ends with it, too. Returns whether it failed."""
    assert _worker is not None
    failed = getattr(sys, "last_value", None) is not None
    if failed:
        error = f"{type(sys.last_value).__name__}: {sys.last_value}"
        if len(error) > _MAX_REASON_CHARS:
            error = f"{error[:_MAX_REASON_CHARS]} ... (its own output has the rest)"
        _worker.abort(f"its script ended with {error}")
    return failed


def leave() -> None:
    """At the end of the process: leaves the job."""
    assert _worker is not None
    if not give_up_if_script_failed() and _worker.usable:
        trains_alone("or has not trained, without ever having created a p3 store")
    _worker.close()
