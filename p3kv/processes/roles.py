"""Gives this process its role in the job: the one place where the roles are assembled."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import subprocess
import sys
from types import FrameType
from typing import List, Optional

from p3kv import config
from p3kv.common import words
from p3kv.common.log import LogFormatter
from p3kv.common.registry import import_modules
from p3kv.common.terminal import guard
from p3kv.config import Launch
from p3kv.config.trials import NATIVE, Report, Trial, tell
from p3kv.errors import ConfigError, P3Error, RendezvousError
from p3kv.frontends import FRONT_ENDS
from p3kv.processes import companions, meeting
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")

_IMPORTING = ("p3kv", "importlib", "_frozen_importlib")
_LOCATES = "_get_module_details"
"""The function of runpy that imports the package of a module that is to run."""
_RUNS_SCRIPT = "p3kv.ddp"
"""The module that runs a script, and is no command."""


def take_over() -> None:
    """Gives this process the role that its launcher has chosen.

    A scheduler or server serves its job here and ends the process. A worker registers with the
    scheduler and goes on. A process that no launcher has started goes on unchanged, and so does
    p3kv's own command line, whatever it inherits: its commands belong to no job.
    """
    this_process.may_join_later(_take_place_late)
    if multiprocessing.current_process().name != "MainProcess":
        return  # a data loader's helper, say, which has inherited the environment
    if _is_command():
        config.forget_rank()
    try:
        launch = _launch()
    except P3Error as error:
        sys.exit(f"p3kv: {error}")
    if launch is None or config.worker_above(launch):
        _warn_of_unknown("p3kv: ")  # no handler of ours says whose line it is
        return
    try:
        _take(launch)
    except P3Error as error:
        if config.wants_traceback():
            raise
        sys.exit(f"p3kv {launch.role}: {error}")


def _take_place_late() -> None:
    """Take the role that the environment has got since the import; none without a launcher.
    ConfigError for a child that must not train."""
    launch = _launch()
    above = config.worker_above(launch)
    use = words.current().create_store
    if above:
        raise ConfigError(
            f"this process is a child of {above}, whose place in the job it has inherited: a child "
            f"can't train beside it. Write {use} in the process that the launcher starts, and let "
            "the launcher start as many of them as there are to be workers ('p3kv launch -n'). A "
            "child that is to train by itself needs WORLD_SIZE=1, and no DMLC_ROLE, in os.environ"
        )
    if launch is not None:
        _take(launch)
    elif multiprocessing.parent_process() is not None and not config.trains_alone():
        raise ConfigError(
            "this process is a child of another one, and nothing says which of how many workers it "
            "is. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in os.environ in each child, "
            f"before {use}; or WORLD_SIZE=1 in a child that is to train by itself"
        )


def _take(launch: Launch) -> None:
    """Takes a place in a job. Raises P3Error where that fails."""
    guard()
    _start_logging(launch.role)
    _warn_of_unknown("")
    trial = config.trial()
    if trial is not None and launch.role == "worker":
        tell(Report())
    if trial is not None and not trial.runs_p3kv:
        _stand_aside(launch, trial)
    elif launch.role == "worker":
        _join(launch)
    else:
        _end(_serve(launch))


def _end(code: int) -> None:
    """End a process that runs no script at once: taking its framework apart would take half a
    second, and the launcher waits for it."""
    atexit._run_exitfuncs()
    this_process.exit_with(code)


def _warn_of_unknown(whose: str) -> None:
    for warning in config.unknown_variables().values():
        _log.warning("%s%s", whose, warning)


def _is_command() -> bool:
    """Whether p3kv is imported as the command line, and not for a script: by `python -m p3kv`, or
    for its `p3kv.tools.cli`, as the p3kv script does.

    A script that `p3kv run` or `python -m p3kv.ddp` runs has its role. So has `python -m p3kv`
    without a command where DMLC_ROLE names one that runs no script: launchers start such processes
    by it.
    """
    by_module = by_script = False
    frame: Optional[FrameType] = sys._getframe(1)
    # From this import outwards: importlib's frames, and then who imports.
    while frame is not None and _package(frame) in _IMPORTING:
        by_script = by_script or frame.f_locals.get("name") == "p3kv.tools.cli"
        frame = frame.f_back
    if frame is not None:
        by_module = (_package(frame), frame.f_code.co_name) == ("runpy", _LOCATES)
        by_module &= frame.f_locals.get("mod_name") != _RUNS_SCRIPT
    words = sys.argv[1:]
    if by_module and not words:
        return not config.serves()
    runs_script = words[:1] == ["run"] and any(not one.startswith("-") for one in words[1:])
    return (by_module or by_script) and not runs_script


def _package(frame: FrameType) -> str:
    """The package, or module outside of packages, whose code a frame runs."""
    name: str = frame.f_globals.get("__name__", "")
    return name.partition(".")[0]


def _launch() -> Optional[Launch]:
    meeting.meet()
    return Launch.from_environment()


def _join(launch: Launch) -> None:
    import_modules(config.plugins(), "P3KV_PLUGINS")
    # A wrong setting is told at once, and what the scheduler answers from now on is logged.
    config.apply_verbosity(config.current())
    beside = companions.start(launch)
    if beside:  # what is registered first comes last: the worker leaves before
        this_process.at_end(_wait_for, beside, os.getpid())
    this_process.join(launch, [front_end.name for front_end in FRONT_ENDS], _advice_for)
    config.note_place(launch)


def _wait_for(beside: List[subprocess.Popen], parent: int) -> None:
    if os.getpid() == parent and not this_process.is_awaited():  # and not a fork of it
        companions.wait(beside, this_process.not_let_in(), this_process.fails_for_another())


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
    this_process.stand_aside()
    config.note_place(launch)


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
        told = launch.launched and error.role is not None and isinstance(error, RendezvousError)
        # And of what fails elsewhere speak the scheduler and the worker beside this server.
        elsewhere = error.role is not None and (error.role, error.rank) != ("server", launch.rank)
        told |= launch.role == "server" and launch.beside_worker and elsewhere
        if not told:
            text = error if not launch.launched else error.brief or error
            _log.error("%s", text, exc_info=config.wants_traceback())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _start_logging(role: str) -> None:
    """Shows p3kv's warnings to the user, whatever the script does with logging."""
    for inherited in [one for one in _log.handlers if isinstance(one.formatter, LogFormatter)]:
        _log.removeHandler(inherited)  # in a fork
    handler = logging.StreamHandler()
    handler.setFormatter(LogFormatter(role))
    _log.addHandler(handler)
    _log.propagate = False
