"""Servers and the scheduler beside a worker, where the launcher starts nothing but ranks.

The worker starts them. They end with the job, and the worker's process waits for that when its
script has ended: other workers may still train. It does not where the process above it is a worker,
too, which may wait for its end: they stay without it then. Signals that ask the rank to end are for
its script alone, which may need servers to save its state. If the worker is killed, the kernel
kills them, and if the job does not let it in, it ends them itself.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import List

from p3kv.common.addresses import endpoint, family_of
from p3kv.common.terminal import SET_PARENT_DEATH_SIGNAL
from p3kv.config import Launch
from p3kv.errors import ConfigError
from p3kv.wire.address import listening_address, other_account_at

_BACKLOG = 1024
_OTHER_FIRST_S = 1.0
"""mpirun and srun end all others with the exit code of the rank that ends first: let it be the one
that failed."""
_END_TOGETHER_S = 5.0
"""Workers whose scripts end at about the same time keep what they have connected until then."""
_LOOK_EVERY_S = 0.05
_FOR_THE_SCRIPT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""torchrun and srun send them to all processes of a rank."""


def start(launch: Launch) -> List[subprocess.Popen]:
    """Start the processes that `launch` wants here; ConfigError if the scheduler can't listen."""
    if not launch.beside or threading.current_thread() is threading.main_thread():
        return _started(launch)
    # The kernel takes the end of the thread that starts them for that of their parent.
    answer: Future[List[subprocess.Popen]] = Future()

    def start_and_stay() -> None:
        try:
            answer.set_result(_started(launch))
        except Exception as error:  # noqa: BLE001  raised by whoever asks for the answer
            answer.set_exception(error)
            return
        for process in answer.result():
            process.wait()

    threading.Thread(target=start_and_stay, name="p3kv-beside", daemon=True).start()
    return answer.result()


def _started(launch: Launch) -> List[subprocess.Popen]:
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def prepare() -> None:
        for signum in _FOR_THE_SCRIPT:
            signal.signal(signum, signal.SIG_IGN)
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent has ended before the kernel knew

    processes: List[subprocess.Popen] = []
    for env in launch.beside:
        with ExitStack() as opened:
            more, fds = {"P3KV_BESIDE_WORKER": "1"}, []
            if env["DMLC_ROLE"] == "scheduler":
                # Opened here: a port that is not free is told at once, by the script.
                listener = opened.enter_context(_listener(launch))
                more["P3KV_SCHEDULER_FD"] = str(listener.fileno())
                fds.append(listener.fileno())
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "p3kv"],
                    env={**env, **more},
                    stdin=subprocess.DEVNULL,
                    pass_fds=fds,
                    preexec_fn=prepare,
                )
            )
    return processes


def wait(processes: List[subprocess.Popen], not_let_in: bool, fails_for_another: bool) -> None:
    """Wait at the worker's end for what was started beside it. `not_let_in`: the worker never
    belonged to the job. `fails_for_another`: another rank failed."""
    with suppress(KeyboardInterrupt):
        for process in processes:
            if not_let_in:
                process.kill()
        until = time.monotonic() + _END_TOGETHER_S
        while any(process.poll() is None for process in processes):
            if time.monotonic() > until:
                _hang_up()
                until = math.inf
            time.sleep(_LOOK_EVERY_S)
        if fails_for_another:
            time.sleep(_OTHER_FIRST_S)


def _hang_up() -> None:
    """Ends what the script's libraries have connected, as gloo and NCCL, and what Python knows
    nothing of. The end of the process would, for which others may wait in a collective."""
    gc.unfreeze()
    pythons = {one.fileno() for one in gc.get_objects() if issubclass(type(one), socket.socket)}
    for fd in {*map(int, os.listdir("/proc/self/fd"))} - pythons - {0, 1, 2}:
        # Not a socket, or not a connected one.
        with suppress(OSError), socket.socket(fileno=os.dup(fd)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername():
                one.shutdown(socket.SHUT_RDWR)


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
