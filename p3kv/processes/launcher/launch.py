"""`launch`: a whole job in one call, on this machine or on several hosts."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any, BinaryIO, Callable, Mapping, NamedTuple, Sequence

from p3kv.config import Settings, told_of
from p3kv.config.variables import forwarded
from p3kv.processes.launcher.parts import (
    HOST,
    Host,
    address_of_first,
    job_parts,
    on_hosts,
    on_this_host,
    some_port,
    with_descriptors,
)
from p3kv.processes.launcher.process import JobPart
from p3kv.processes.launcher.supervisor import Graces, Launcher
from p3kv.wire.launcher_link import Cause, LauncherLink


class JobEnd(NamedTuple):
    """How a job has ended."""

    code: int
    """The exit code; 0 when every process ended well."""
    may_start_again: bool
    """Whether a process of the job has failed: nobody has stopped the job, and all could start."""


def run_with_restarts(
    run: Callable[[bool], JobEnd], restarts: int, resume: bool, err: BinaryIO | None = None
) -> int:
    """Run a job, and again from its newest checkpoint when it fails; return the last exit code.

    `run(resume)` runs it once. At most `restarts` times, whatever the job has achieved.
    """
    done = run(resume)
    for number in range(1, restarts + 1):
        if not done.code or not done.may_start_again:
            break
        stream = err if err is not None else sys.stderr.buffer
        line = (
            f"p3kv launch: starts the job again from its newest checkpoint ({number} of {restarts})"
        )
        stream.write(f"{line}\n".encode())
        stream.flush()
        done = run(True)
    return done.code


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
    resume: bool = False,
    restarts: int = 0,
    native: bool = False,
) -> int:
    """Runs `command` as `num_workers` workers with a scheduler and `num_servers` servers.

    Returns 0 when every process ended well, else the exit code of the first one that failed, as a
    shell would give it (128 + signal for a process killed by a signal, 127 for a command that does
    not exist). `root_port` 0 takes a free port; `env` None passes this process's environment on.
    What the processes print goes line by line to `out` and `err`, by default this process's
    standard output and error. `resume` has the job go on from its newest checkpoint; a job that
    fails is started again, to go on from there, at most `restarts` times. `native`: the scheduler
    is a framework's own, which does not tell the launcher why a job fails.

    Call it in the main thread if Ctrl-C and SIGTERM shall end the job: Python gives signals to no
    other thread. They are passed on to the workers, which have P3KV_STOP_TIMEOUT_S to end.
    """

    job = _Job(command, num_workers, num_servers, root_port, out, err, native)
    return run_with_restarts(lambda again: _run_here(job, _own(env, again)), restarts, resume, err)


def launch_on(
    hosts: Sequence[Host],
    command: Sequence[str],
    num_servers: int,
    *,
    root_port: int = 0,
    env: Mapping[str, str] | None = None,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
    resume: bool = False,
    restarts: int = 0,
    native: bool = False,
) -> int:
    """Like `launch`, on `hosts` over ssh: each has the number of workers that it says.

    Of `env` the hosts get what `p3kv.config.variables` lists, over what they have themselves. The
    first host has the scheduler, at DMLC_PS_ROOT_URI of `env` or at the address that ssh uses.
    `root_port` 0 takes a port by chance.
    """

    workers = sum(host.workers for host in hosts)
    job = _Job(command, workers, num_servers, root_port, out, err, native)
    return run_with_restarts(
        lambda again: _run_on(job, hosts, _own(env, again)), restarts, resume, err
    )


class _Job(NamedTuple):
    """A job as `launch` was asked for it."""

    command: Sequence[str]
    num_workers: int
    num_servers: int
    root_port: int
    out: BinaryIO | None
    err: BinaryIO | None
    native: bool

    def parts(self, host: str, port: int, env: Mapping[str, str]) -> list[JobPart]:
        return job_parts(
            self.command, self.num_workers, self.num_servers, host=host, port=port, env=env
        )

    def run(self, parts: Sequence[JobPart], **more: Any) -> JobEnd:
        launcher = Launcher(parts, out=self.out, err=self.err, **more)
        code = launcher.run()
        return JobEnd(code, launcher.a_part_failed)


def _run_here(job: _Job, env: Mapping[str, str]) -> JobEnd:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, job.root_port))
            listener.listen(_BACKLOG)
        except OSError as error:
            stream = job.err if job.err is not None else sys.stderr.buffer
            message = f"p3kv launch: port {job.root_port} of {HOST} is not free: {error.strerror}\n"
            stream.write(message.encode())
            stream.flush()
            return JobEnd(1, may_start_again=False)
        graces = Graces(stop_s=Settings.from_environment(env).stop_timeout_s)
        parts = on_this_host(job.parts(HOST, listener.getsockname()[1], env))
        if job.native:
            listener.close()  # the framework's scheduler opens the port by itself
            return job.run(parts, graces=graces)
        ours, schedulers = socket.socketpair()
        with ours, schedulers:
            parts = with_descriptors(
                parts, scheduler_fd=listener.fileno(), launcher_fd=schedulers.fileno()
            )
            link: LauncherLink[Cause] = LauncherLink(ours, Cause)
            return job.run(parts, graces=graces, handed_over=(listener, schedulers), link=link)


def _run_on(job: _Job, hosts: Sequence[Host], env: Mapping[str, str]) -> JobEnd:
    settings = Settings.from_environment(env)
    graces = Graces(stop_s=settings.stop_timeout_s)
    address = env.get("DMLC_PS_ROOT_URI") or address_of_first(hosts)
    parts = on_hosts(
        job.parts(address, job.root_port or some_port(), forwarded(env)),
        hosts,
        own_env=env,
        cwd=os.getcwd(),
        term_s=graces.term_s,
        silence_s=settings.silence_timeout_s,
    )
    channels = [part.channel for part in parts if part.channel is not None]
    try:
        link: LauncherLink[Cause] | None = None
        if not job.native:
            link = LauncherLink(channels[0].ours, Cause)
        return job.run(parts, graces=graces, link=link)
    finally:
        for channel in channels:
            channel.close()


def _own(env: Mapping[str, str] | None, resumes: bool) -> Mapping[str, str]:
    # This process has told of its own variables when it imported p3kv.
    own = {**os.environ, **told_of(os.environ)} if env is None else env
    return {**own, "P3KV_RESUME": "1"} if resumes else own
