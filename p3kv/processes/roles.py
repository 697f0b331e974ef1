"""Gives this process its role in the job: the one place where the roles are assembled."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from types import FrameType
from typing import Optional

from p3kv import config
from p3kv.common.log import LogFormatter
from p3kv.common.registry import import_modules
from p3kv.common.streams import guard
from p3kv.config import Launch
from p3kv.config.trial import NATIVE, Report, Trial, tell
from p3kv.errors import ConfigError, P3Error, RendezvousError
from p3kv.frontends import FRONT_ENDS
from p3kv.processes import companions, meeting
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")

_IMPORTING = ("p3kv", "importlib", "_frozen_importlib")
_LOCATES = "_get_module_details"
"""The function of runpy that imports the package of a module that is to run."""


def take_over() -> None:
    """Gives this process the role that its launcher has chosen.

    A scheduler or server serves its job here and ends the process. A worker registers with the
    scheduler and goes on. A process that no launcher has started goes on unchanged, and so does
    p3kv's own command line, whatever it inherits: its commands belong to no job.
    """
    if multiprocessing.current_process().name != "MainProcess":
        return  # a data loader's helper, say, which has inherited the environment
    if _is_command():
        config.forget_rank()
    launch = _launch()
    if launch is not None:
        guard()
        _start_logging(launch.role)
    # Without a role, no handler of ours says whose line it is.
    whose = "p3kv: " if launch is None else ""
    for warning in config.unknown_variables().values():
        _log.warning("%s%s", whose, warning)
    if launch is None:
        return
    trial = _trial()
    if trial is not None and launch.role == "worker":
        tell(Report())
    if trial is not None and not trial.runs_p3kv:
        _stand_aside(launch, trial)
    elif launch.role == "worker":
        _join(launch)
    else:
        sys.exit(_serve(launch))


def _is_command() -> bool:
    """Whether p3kv is imported as the command line, and not for a script: by `python -m p3kv`, or
    for its `p3kv.tools.cli`, as the p3kv script does.

    A script that `p3kv run` runs has its role. So has `python -m p3kv` without a command where
    DMLC_ROLE names one that runs no script: launchers start such processes by it.
    """
    by_module = by_script = False
    frame: Optional[FrameType] = sys._getframe(1)
    # From this import outwards: importlib's frames, and then who imports.
    while frame is not None and _package(frame) in _IMPORTING:
        by_script = by_script or frame.f_locals.get("name") == "p3kv.tools.cli"
        frame = frame.f_back
    if frame is not None:
        by_module = (_package(frame), frame.f_code.co_name) == ("runpy", _LOCATES)
    words = sys.argv[1:]
    if by_module and not words:
        return not config.serves()
    runs_script = words[:1] == ["run"] and len(words) > 1 and not words[1].startswith("-")
    return (by_module or by_script) and not runs_script


def _package(frame: FrameType) -> str:
    """The package, or module outside of packages, whose code a frame runs."""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _launch() -> Optional[Launch]:
    try:
        meeting.meet()
        return Launch.from_environment()
    except P3Error as error:
        sys.exit(f"p3kv: {error}")


def _trial() -> Optional[Trial]:
    try:
        return config.trial()
    except ConfigError as error:
        sys.exit(f"p3kv: {error}")


def _join(launch: Launch) -> None:
    try:
        import_modules(config.plugins(), "P3KV_PLUGINS")
        # A wrong setting is told at once, and what the scheduler answers from now on is logged.
        config.apply_verbosity(config.current())
        companions.start(launch, this_process.fails_for_another, this_process.not_let_in)
        this_process.join(launch, [front_end.name for front_end in FRONT_ENDS], _advice_for)
    except P3Error as error:
        if config.wants_traceback():
            raise
        sys.exit(f"p3kv worker: {error}")


def _advice_for(error: BaseException) -> str:
    imported = [front_end for front_end in FRONT_ENDS if front_end.name in sys.modules]
    return " ".join(filter(None, (front_end.advice_for(error) for front_end in imported)))


def _stand_aside(launch: Launch, trial: Trial) -> None:
    """Leaves the job to the framework's own roles, or to nobody. A worker goes on; others end."""
    from p3kv.wire.address import own_address

    if trial.store == NATIVE:
        for front_end in FRONT_ENDS:
            if front_end.name == trial.front_end:
                front_end.take_native_role(launch, own_address(launch))
    if launch.role != "worker":
        sys.exit(0)


def _serve(launch: Launch) -> int:
    for front_end in FRONT_ENDS:
        problem = front_end.came_too_early(launch.role)
        if problem is not None and front_end.name in sys.modules:
            _log.error("%s", problem)
            return 1
    try:
        import_modules(config.plugins(), "P3KV_PLUGINS")
        settings = config.current()
        config.apply_verbosity(settings)
        if launch.role == "scheduler":
            from p3kv.scheduler.scheduler import run_scheduler

            run_scheduler(launch, settings)
        else:
            from p3kv.server.server import run_server

            run_server(launch, settings)
    except P3Error as error:
        # If the job never began, the launcher says which processes are missing.
        if not launch.launched or error.role is None or not isinstance(error, RendezvousError):
            text = error if not launch.launched else error.brief or error
            _log.error("%s", text, exc_info=config.wants_traceback())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _start_logging(role: str) -> None:
    """Shows p3kv's warnings to the user, whatever the script does with logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(role))
    _log.addHandler(handler)
    _log.propagate = False
