"""Parts of a job: commands and environments, nothing started yet."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from dataclasses import dataclass, field, replace
from typing import Mapping, Sequence

from p3kv.common.secret import SECRET_BYTES
from p3kv.config.ranks import PORTS, without_ranks
from p3kv.processes.launcher.guardian_channel import GuardianChannel

HOST = "127.0.0.1"
_TRIES = 100

# Set for one role only, or for none: an old value from the launcher's own environment would mislead
# the others.
_SET_PER_PART = (
    "P3KV_SCHEDULER_FD", "P3KV_LAUNCHER_FD", "P3KV_SECRET_FILE", "P3KV_PLACE", "P3KV_BESIDE_WORKER",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One process of a job, not yet started.

    `name` is what people read ("worker 0"). A part with `serves_workers` has nothing to do once
    the others have ended and is expected to end by itself then. `pass_fds` are open descriptors
    that the process inherits under the same numbers. With a `channel` the process is ssh, and the
    part's own process runs on another host.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)  # the secret is in it
    serves_workers: bool = False
    pass_fds: tuple[int, ...] = ()
    channel: GuardianChannel | None = None


def job_parts(
    command: Sequence[str],
    num_workers: int,
    num_servers: int,
    *,
    port: int,
    env: Mapping[str, str],
    host: str = HOST,
) -> list[Part]:
    """Returns a scheduler, `num_servers` servers and `num_workers` workers that run `command`.

    The scheduler listens on `port` of `host`. `env` reaches every part, without what a
    launcher says of this process, and with the variables that describe the job on top of it.
    """
    shared = {key: value for key, value in without_ranks(env).items() if key not in _SET_PER_PART}
    shared.update(
        DMLC_PS_ROOT_URI=host,
        DMLC_PS_ROOT_PORT=str(port),
        DMLC_NUM_WORKER=str(num_workers),
        DMLC_NUM_SERVER=str(num_servers),
        P3KV_JOB=secrets.token_hex(16),
        P3KV_LAUNCHED="1",
        P3KV_SECRET=secrets.token_hex(SECRET_BYTES),
    )
    # Python keeps what it prints back when it prints to a pipe, as it does here.
    shared.setdefault("PYTHONUNBUFFERED", "1")

    def environment(role: str, **more: str) -> dict[str, str]:
        return {**shared, "DMLC_ROLE": role, **more}

    serve = (sys.executable, "-m", "p3kv")
    scheduler = Part("scheduler", serve, environment("scheduler"), serves_workers=True)
    servers = [
        Part(
            f"server {rank}",
            serve,
            environment("server", DMLC_SERVER_ID=str(rank)),
            serves_workers=True,
        )
        for rank in range(num_servers)
    ]
    workers = [
        Part(f"worker {rank}", tuple(command), environment("worker", DMLC_WORKER_ID=str(rank)))
        for rank in range(num_workers)
    ]
    return [scheduler, *servers, *workers]


def on_this_host(parts: Sequence[Part]) -> list[Part]:
    """A job's parts as they run beside the launcher."""
    # Each worker's operators would use a thread for every core, and idle ones spin.
    num_workers = sum(not part.serves_workers for part in parts)
    threads = str(max(1, len(os.sched_getaffinity(0)) // num_workers))
    parts = [replace(part, env={"OMP_NUM_THREADS": threads, **part.env}) for part in parts]
    return with_ranks(parts, [""] * len(parts), _free_port())


def some_port() -> int:
    """A port that is probably free on any host."""
    return secrets.choice(PORTS)


def _free_port() -> int:
    """A port that is free on this host, and that Linux gives nobody by itself."""
    for port in secrets.SystemRandom().sample(PORTS, _TRIES):
        with contextlib.suppress(OSError), socket.create_server((HOST, port)):
            return port
    return some_port()


def with_ranks(parts: Sequence[Part], hosts: Sequence[str], master_port: int) -> list[Part]:
    """The parts, whose workers get torchrun's variables, too: their ranks in the job and among
    their host's, and where rank 0 may listen for a process group of the script's own. `hosts` says
    where each part runs."""
    of_workers = [host for part, host in zip(parts, hosts) if not part.serves_workers]
    counts = dict.fromkeys(of_workers, 0)
    told = []
    for part, host in zip(parts, hosts):
        if not part.serves_workers:
            place = {
                "RANK": part.env["DMLC_WORKER_ID"],
                "WORLD_SIZE": str(len(of_workers)),
                "MASTER_ADDR": part.env["DMLC_PS_ROOT_URI"],
                "MASTER_PORT": str(master_port),
                "LOCAL_RANK": str(counts[host]),
                "LOCAL_WORLD_SIZE": str(of_workers.count(host)),
            }
            part = replace(part, env={**part.env, **place})
            counts[host] += 1
        told.append(part)
    return told


def with_descriptors(parts: Sequence[Part], *, scheduler_fd: int, launcher_fd: int) -> list[Part]:
    """A job's parts, whose scheduler inherits two sockets.

    `scheduler_fd` listens on the job's port already, so nobody can take the port in between.
    `launcher_fd` is the scheduler's end of the socket on which it and the launcher tell each other
    who failed and who ended.
    """
    scheduler, *others = parts
    descriptors = {
        "P3KV_SCHEDULER_FD": str(scheduler_fd), "P3KV_LAUNCHER_FD": str(launcher_fd)
    }  # fmt: skip
    inherits = replace(
        scheduler, env={**scheduler.env, **descriptors}, pass_fds=(scheduler_fd, launcher_fd)
    )
    return [inherits, *others]
