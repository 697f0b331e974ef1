"""`launch`: a whole job on this machine in one call."""

from __future__ import annotations

import os
import socket
import sys
from typing import BinaryIO, Mapping, Sequence

from p3kv.config import told_of
from p3kv.launcher.parts import HOST, job_parts
from p3kv.launcher.supervisor import Graces, Launcher
from p3kv.wire.launcher_link import Cause, LauncherLink

_BACKLOG = 1024


def launch(
    command: Sequence[str],
    num_workers: int,
    num_servers: int,
    *,
    root_port: int = 0,
    env: Mapping[str, str] | None = None,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
    graces: Graces | None = None,
) -> int:
    """Runs `command` as `num_workers` workers with a scheduler and `num_servers` servers.

    Returns 0 when every process ended well, else the exit code of the first one that failed, as a
    shell would give it (128 + signal for a process killed by a signal, 127 for a command that does
    not exist). `root_port` 0 takes a free port; `env` None passes this process's environment on.
    What the processes print goes line by line to `out` and `err`, by default this process's
    standard output and error.

    Call it in the main thread if Ctrl-C and SIGTERM shall end the job: Python gives signals to no
    other thread.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, root_port))
            listener.listen(_BACKLOG)
        except OSError as error:
            stream = err if err is not None else sys.stderr.buffer
            message = f"p3kv launch: port {root_port} of {HOST} is not free: {error.strerror}\n"
            stream.write(message.encode())
            stream.flush()
            return 1
        ours, schedulers = socket.socketpair()
        with ours, schedulers:
            parts = job_parts(
                command,
                num_workers,
                num_servers,
                port=listener.getsockname()[1],
                scheduler_fd=listener.fileno(),
                launcher_fd=schedulers.fileno(),
                # This process has told of its own variables when it imported p3kv.
                env={**os.environ, **told_of(os.environ)} if env is None else env,
            )

            def on_started() -> None:
                # Once the scheduler has the listener it must be the only one: with a second copy
                # here, connections to a dead scheduler would be accepted and never answered. The
                # same goes for its end of the link.
                listener.close()
                schedulers.close()

            launcher = Launcher(
                parts,
                out=out,
                err=err,
                graces=graces,
                on_started=on_started,
                link=LauncherLink(ours, Cause),
            )
            return launcher.run()
