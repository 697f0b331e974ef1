"""Gives this process its role in the job: the one place where the roles are assembled."""

from __future__ import annotations

import contextlib
import importlib
import logging
import multiprocessing
import os
import sys
import tempfile
from typing import Iterator, Optional

from p3kv import config
from p3kv.config import Launch
from p3kv.errors import ConfigError, P3Error, RendezvousError, in_one_line
from p3kv.frontends import warm_up
from p3kv.server.optimizer import MakeOptimizer, SliceOptimizer
from p3kv.worker import this_process

_log = logging.getLogger("p3kv")


def take_over() -> None:
    """Gives this process the role that its launcher has chosen.

    A scheduler or server serves its job here and ends the process. A worker registers with the
    scheduler and goes on. A process that no launcher has started goes on unchanged.
    """
    if multiprocessing.current_process().name != "MainProcess":
        return  # a data loader's helper, say, which has inherited the environment
    launch = _launch()
    if launch is not None:
        _start_logging(launch.role)
    # Without a role, no handler of ours says whose line it is.
    whose = "p3kv: " if launch is None else ""
    for warning in config.unknown_variables().values():
        _log.warning("%s%s", whose, warning)
    if launch is None:
        return
    if launch.role == "worker":
        _join(launch)
    else:
        sys.exit(_serve(launch))


def _launch() -> Optional[Launch]:
    try:
        return Launch.from_environment()
    except ConfigError as error:
        sys.exit(f"p3kv: {error}")


def _join(launch: Launch) -> None:
    try:
        _import_plugins()
        config.current()  # a wrong setting is told at once
        this_process.join(launch)
    except P3Error as error:
        sys.exit(f"p3kv worker: {error}")


def _serve(launch: Launch) -> int:
    if "mxnet" in sys.modules:
        _log.error(
            "mxnet was imported before p3kv in a process with DMLC_ROLE=%s. Make 'import p3kv' "
            "the script's first import, or start it with 'p3kv run script.py', so that p3kv "
            "takes the role over before MXNet's native %s does.",
            launch.role,
            launch.role,
        )
        return 1
    try:
        _import_plugins()
        settings = config.current()
        config.apply_verbosity(settings)
        if launch.role == "scheduler":
            from p3kv.scheduler.scheduler import run_scheduler

            run_scheduler(launch, settings)
        else:
            from p3kv.server.server import run_server

            run_server(launch, settings, _MakeMXNetOptimizer())
    except P3Error as error:
        if not launch.launched:
            _log.error("%s", error)
        elif error.role is None or not isinstance(error, RendezvousError):
            _log.error("%s", error.brief or error)
        # If the job never began, the launcher says which processes are missing.
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _import_plugins() -> None:
    for name in config.plugins():
        try:
            importlib.import_module(name)
        except Exception as error:
            raise ConfigError(
                f"can't import {name}, which P3KV_PLUGINS names: {in_one_line(error)}"
            ) from error


class _MakeMXNetOptimizer(MakeOptimizer):
    def __call__(self) -> SliceOptimizer:
        self._import_mxnet()
        from p3kv.frontends.mxnet.server_optimizer import MXNetOptimizer

        return MXNetOptimizer()

    def get_ready(self) -> None:
        # The front end comes later: the main thread serves inside the import of p3kv, and modules
        # that import from it would wait for that to end.
        if config.update_on_kvstore_default():
            self._import_mxnet()

    def _import_mxnet(self) -> None:
        config.prepare_for_server_optimizer()
        with _stderr_without(b"MXNet start using engine"):
            warm_up("mxnet")


@contextlib.contextmanager
def _stderr_without(unwanted: bytes) -> Iterator[None]:
    """Drops certain lines that a library writes to this process's standard error."""
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            written.seek(0)
            os.write(2, b"".join(line for line in written if unwanted not in line))


def _start_logging(role: str) -> None:
    """Shows p3kv's warnings to the user, whatever the script does with logging."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"p3kv {role}: %(message)s"))
    _log.addHandler(handler)
    _log.propagate = False
