"""Servers and the scheduler beside a worker, where the launcher starts nothing but ranks.

The worker starts them. They end with the job, and the worker's process waits for that when its
script has ended: other workers may still train. If the worker is killed, the kernel ends them, and
if the job does not let it in, it ends them itself.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Callable, List

from p3kv.common.addresses import endpoint, family_of
from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.wire.accounts import other_account_at
from p3kv.wire.address import listening_address

_BACKLOG = 1024
_OTHER_FIRST_S = 1.0
"""mpirun and srun end with the exit code of the rank that ends first: it is to be the one whose
failure it is, and then they end the others."""
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def start(
    launch: Launch, fails_for_another: Callable[[], bool], not_let_in: Callable[[], bool]
) -> None:
    """Starts the processes that `launch` wants beside this one.

    `fails_for_another()` says at the end whether the job has failed because of another rank, and
    `not_let_in()` whether this process has never belonged to it.
    Raises ConfigError if this host can't have the scheduler.
    """
    if not launch.beside:
        return
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def end_with_parent() -> None:
        libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)  # the parent has ended before the kernel knew

    processes: List[subprocess.Popen] = []
    for env in launch.beside:
        with ExitStack() as opened:
            more, fds = {}, []
            if env["DMLC_ROLE"] == "scheduler":
                # Opened here: a port that is not free is told at once, by the script.
                listener = opened.enter_context(_listener(launch))
                more, fds = {"P3KV_SCHEDULER_FD": str(listener.fileno())}, [listener.fileno()]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "p3kv"],
                    env={**env, **more},
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    preexec_fn=end_with_parent,
                )
            )
    # Before the worker's own: what is registered first comes last.
    atexit.register(_wait, processes, parent, fails_for_another, not_let_in)


def _listener(launch: Launch) -> socket.socket:
    address = listening_address(launch)
    try:
        return socket.create_server(
            (address, launch.root_port), family=family_of(address), backlog=_BACKLOG
        )
    except OSError as error:
        place = endpoint(launch.root_host, launch.root_port)
        where = f"the scheduler, which runs beside rank 0, can't listen at {place}"
        if error.errno == errno.EADDRINUSE:
            account = other_account_at(launch.root_port)
            whose = f" (its account is {account})" if account else ""
            raise ConfigError(
                f"{where}: another program does{whose}. Perhaps another process "
                "has rank 0, too, or another job has the same port: give each job a "
                f"{launch.variables.port} of its own, the same in all its processes."
            ) from error
        raise ConfigError(
            f"{where}: {error.strerror}. Set {launch.variables.host} to an address of that host, "
            "in all processes."
        ) from error


def _wait(
    processes: List[subprocess.Popen],
    parent: int,
    fails_for_another: Callable[[], bool],
    not_let_in: Callable[[], bool],
) -> None:
    if os.getpid() != parent:
        return  # a fork of it
    with suppress(KeyboardInterrupt):
        if not_let_in():
            for process in processes:
                process.terminate()
        for process in processes:
            process.wait()
        if fails_for_another():
            time.sleep(_OTHER_FIRST_S)
