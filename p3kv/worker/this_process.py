"""The one worker of this process. The front end finds it here; it leaves when the process ends."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import traceback
from contextlib import suppress
from multiprocessing import util
from types import TracebackType
from typing import Any, Callable, Iterable, NoReturn, Optional, Tuple, Type

from p3kv import config
from p3kv.common import words
from p3kv.config import Launch
from p3kv.errors import P3Error, in_one_line
from p3kv.worker.worker import Worker

_log = logging.getLogger(__name__)

_worker: Optional[Worker] = None
_decided_in = 0
"""Number of the process that has its role, or none for good: its forks have not."""
_look_again: Callable[[], None] = lambda: None  # noqa: E731
"""Function that has this process take the place that its environment gives it by now."""
_means_it = False
_tells_at_end = True
_exit_reason = ""
"""Why the script has failed, if it ends by `sys.exit`."""
_raised = False
"""Whether the job's failure had been raised in the script when that ended."""
_launched = False
"""Whether `p3kv launch` supervises the job, and prints all that its processes say."""
_libraries: Tuple[str, ...] = ("p3kv",)
"""Packages whose lines in a traceback are not the user's."""
_advice_for: Callable[[BaseException], str] = lambda error: ""  # noqa: E731
"""Function that gives advice on an error of a framework's own."""
_LOST_ANOTHER = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited",
)  # fmt: skip
"""What the system, gloo and NCCL say where another process has ended."""
_EARLY = 100
"""Priority of functions at the end of a child: before those of data loaders, which have none."""
_LAST = -100
"""And of what ends the process itself, after all of them."""
_Hook = Callable[[Type[BaseException], BaseException, Optional[TracebackType]], Any]


def join(
    launch: Launch, frameworks: Iterable[str], advice_for: Callable[[BaseException], str]
) -> None:
    """Registers this process with the scheduler; it leaves the job when it ends.

    `frameworks` are the packages of the frameworks that a script may use; `advice_for(error)` says
    what to do about an error of theirs, or nothing.
    From now on `sys.exit` records its code for the other processes, and an error of p3kv's that the
    script does not catch is printed as one line.
    """
    global _worker, _decided_in, _launched, _libraries, _advice_for
    _launched = launch.launched
    _libraries = ("p3kv", *frameworks)
    _advice_for = advice_for
    _worker = Worker(launch, config.current(), _libraries)
    _decided_in = os.getpid()
    sys.exit = _exit
    sys.excepthook = _one_line_hook(sys.excepthook)
    at_end(leave)


def may_join_later(look_again: Callable[[], None]) -> None:
    """`look_again()` has this process take the place that its environment gives it by then."""
    global _look_again
    _look_again = look_again


def stand_aside() -> None:
    """This process has a place in a job, and none in p3kv's."""
    global _decided_in
    _decided_in = os.getpid()


def is_worker() -> bool:
    """Whether this process is a worker of a p3kv job."""
    return _worker is not None


def joined() -> bool:
    """Whether this process, which is to train, is a worker of a p3kv job. It becomes one now if its
    environment has got a rank since the import of p3kv, as a function's that a launcher runs.

    Raises ConfigError for a child that can be none: of a worker, or of `multiprocessing` without a
    rank.
    """
    if _decided_in != os.getpid():
        _look_again()
    return _decided_in == os.getpid() and _worker is not None


def worker() -> Worker:
    """This process's worker; to be called after `joined`."""
    assert _worker is not None
    return _worker


def at_end(function: Callable[..., object], *arguments: Any) -> None:
    """Has a function be called when this process ends, before those that were given earlier."""
    if multiprocessing.parent_process() is None:
        atexit.register(function, *arguments)
    else:  # Python calls no function of atexit's
        util.Finalize(None, function, arguments, exitpriority=_EARLY)


def fails_for_another() -> bool:
    """Whether the job has failed because of another process than this worker."""
    failure = None if _worker is None else _worker.failure
    if _worker is None or failure is None:
        return False
    return (failure.role, failure.rank) != ("worker", _worker.rank)


def is_awaited() -> bool:
    """Whether the process above this one is another worker of its job, which has not failed: it may
    wait for this one's end before it ends itself."""
    above = multiprocessing.parent_process()
    pids = {os.getppid(), None if above is None else above.pid}
    return _worker is not None and _worker.failure is None and not pids.isdisjoint(_worker.pids)


def not_let_in() -> bool:
    """Whether this process was to be a worker, and the job has refused it, or was not found."""
    return _worker is None or _worker.not_let_in


def shares_nothing() -> bool:
    """Whether this is a worker of a job that shares nothing with the others, and nobody has said
    that this is meant."""
    if _worker is None or _means_it:
        return False
    return not _worker.started and _worker.num_workers > 1


def means_it() -> None:
    """If this worker shares nothing with the others, that needs no more warnings."""
    global _means_it
    _means_it = True


def shares_what_is_wrapped() -> None:
    """The script may share nothing, as one that evaluates; who steps an optimizer is told then."""
    global _tells_at_end
    _tells_at_end = False


def trains_alone(how: str) -> None:
    """Warns, once, that this worker of a job shares nothing with the others: `how` says why. Does
    not warn if the process has the p3 store as well: then the other store is intended."""
    if not shares_nothing():
        return
    assert _worker is not None
    means_it()
    _log.warning(
        "this worker trains alone, %s: it shares nothing with the other workers of its job (%d in "
        "all). Write %s.",
        how,
        _worker.num_workers,
        words.current().create_store,
    )


def give_up_if_script_failed() -> bool:
    """At the end of the process: if its script has failed, tells all processes why.

    Transfers that are under way, or begin until `leave`, end with an error. Returns whether the
    script has failed.
    """
    global _raised
    assert _worker is not None
    if not _worker.script.has_ended:
        _worker.script.has_ended = True
        failure = _worker.failure
        _raised = failure is not None and failure.__traceback__ is not None
    error = getattr(sys, "last_value", None) or _ends_a_child()
    if error is not None:
        advice = _advice_for(error)
        what_to_do = f" ({advice})" if advice else ""
        follows = any(words in str(error).lower() for words in _LOST_ANOTHER)
        _worker.abort(f"its script ended with {in_one_line(error)}{what_to_do}", follows)
    elif _exit_reason:
        _worker.abort(f"its script ended with {_exit_reason}")
    else:
        return False
    return True


def _ends_a_child() -> Optional[BaseException]:
    """The exception with which a child of `multiprocessing` ends, which has no hook for it."""
    error = sys.exc_info()[1]
    if not isinstance(error, SystemExit):
        return error
    _note_exit(error.code)
    # A framework's children may exit where they have handled the script's error.
    return error.__context__ if _exit_reason else None


def leave() -> None:
    """At the end of the process: leaves the job. If that has failed, and the script has not seen
    it, as where it reads no weights after its last step, the process says so and ends with 1."""
    assert _worker is not None
    script_failed = give_up_if_script_failed()
    if not script_failed and _worker.usable and _tells_at_end:
        trains_alone("or has not trained, since its script has never used p3kv")
    failure = _worker.close()
    if failure is not None and not script_failed and not _raised:
        _log.error("%s", _our_words(failure, None))
        util.Finalize(None, exit_with, [1], exitpriority=_LAST)


def exit_with(code: int) -> NoReturn:
    """Ends the process; by no other way can what Python calls at its end set its exit code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it, or it has been closed
            stream.flush()
    os._exit(code)


_CODE: Any = vars(SystemExit)["code"]


class _Exit(SystemExit):
    """Exception that `sys.exit` raises: records its code when it ends the process.

    A script may catch it and go on. If the script does not, the interpreter reads the code, in a
    call that comes from no frame. `raise SystemExit(3)` bypasses this class: only the parent of the
    process sees that code, for example 'p3kv launch' or 'p3kv run'.
    """

    @property
    def code(self) -> Any:
        code = _CODE.__get__(self)
        if sys._getframe().f_back is None:
            _note_exit(code)
        return code

    @code.setter
    def code(self, code: Any) -> None:
        _CODE.__set__(self, code)


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def _exit(status: Any = None) -> NoReturn:
    """Exits the interpreter by raising SystemExit(status), as Python's own `sys.exit`."""
    raise _Exit(status)


def _note_exit(code: Any) -> None:
    global _exit_reason
    if isinstance(code, int):
        _exit_reason = f"exit code {int(code)}" if code else ""
    elif code is not None:
        # Python prints it, and ends with 1.
        _exit_reason = f"exit code 1: {' '.join(str(code).split())}"


def _one_line_hook(previous: _Hook) -> _Hook:
    def show(
        kind: Type[BaseException], error: BaseException, trace: Optional[TracebackType]
    ) -> None:
        words = _our_words(error, trace)
        if _launched and isinstance(error, KeyboardInterrupt):
            # All workers get Ctrl-C at the same time.
            words = f"its script was interrupted{_place_in_script(trace)}"
        if words is None or config.wants_traceback():
            previous(kind, error, trace)
        else:
            _log.error("%s", words)

    return show


def _our_words(error: BaseException, trace: Optional[TracebackType]) -> Optional[str]:
    """The one line for an error of p3kv's; None for any other error. The framework may raise the
    job's failure as an exception of its own."""
    failure = None if _worker is None else _worker.failure
    if failure is not None and (error is failure or str(failure) in str(error)):
        error = failure
    if not isinstance(error, P3Error):
        return None
    if error.role is not None:
        return error.brief if _launched and error.brief else str(error)
    return f"{error}{_place_in_script(trace)}"


def _place_in_script(trace: Optional[TracebackType]) -> str:
    """Where in the user's code an error was raised, in brackets."""
    places = [
        f" ({os.path.basename(frame.f_code.co_filename)}, line {line})"
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _libraries
    ]
    return places[-1] if places else ""
