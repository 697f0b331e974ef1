"""The parts of a job, on this machine or on hosts that ssh reaches; nothing is started yet."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Mapping, NamedTuple, Sequence

from p3kv.common.addresses import addresses, is_loopback, route
from p3kv.common.secret import SECRET_BYTES
from p3kv.config.ranks import PORTS, without_ranks
from p3kv.errors import ConfigError
from p3kv.processes.launcher.guardian import guardian_command
from p3kv.processes.launcher.process import CONNECT_TIMEOUT_S, GuardianChannel, JobPart

HOST = "127.0.0.1"
_TRIES = 100

# Set for one role only, or for none: an old value from the launcher's own environment would mislead
# the others.
_SET_PER_PART = (
    "P3KV_SCHEDULER_FD", "P3KV_LAUNCHER_FD", "P3KV_SECRET_FILE", "P3KV_PLACE", "P3KV_BESIDE_WORKER",
)  # fmt: skip


def job_parts(
    command: Sequence[str],
    num_workers: int,
    num_servers: int,
    *,
    port: int,
    env: Mapping[str, str],
    host: str = HOST,
) -> list[JobPart]:
    """A scheduler at `port` of `host`, servers, and workers that run `command`. `env` reaches all,
    without what a launcher says of this process."""
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
    scheduler = JobPart("scheduler", serve, environment("scheduler"), serves_workers=True)
    servers = [
        JobPart(
            f"server {rank}",
            serve,
            environment("server", DMLC_SERVER_ID=str(rank)),
            serves_workers=True,
        )
        for rank in range(num_servers)
    ]
    workers = [
        JobPart(f"worker {rank}", tuple(command), environment("worker", DMLC_WORKER_ID=str(rank)))
        for rank in range(num_workers)
    ]
    return [scheduler, *servers, *workers]


def on_this_host(parts: Sequence[JobPart]) -> list[JobPart]:
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


def with_ranks(parts: Sequence[JobPart], hosts: Sequence[str], master_port: int) -> list[JobPart]:
    """Add torchrun's variables for workers: ranks in the job and on the host, and where rank 0 may
    listen for a process group of the script's own. `hosts` has each part's host."""
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


def with_descriptors(
    parts: Sequence[JobPart], *, scheduler_fd: int, launcher_fd: int
) -> list[JobPart]:
    """Let the scheduler inherit its listening socket, so that nobody takes the port in between, and
    its end of the link to the launcher."""
    scheduler, *others = parts
    descriptors = {
        "P3KV_SCHEDULER_FD": str(scheduler_fd), "P3KV_LAUNCHER_FD": str(launcher_fd)
    }  # fmt: skip
    inherits = replace(
        scheduler, env={**scheduler.env, **descriptors}, pass_fds=(scheduler_fd, launcher_fd)
    )
    return [inherits, *others]


_SYNTAX = re.compile(
    r"(?P<host>(?P<user>[\w.-]+@)?(?:\[(?P<ipv6>[\da-fA-F:.]+)\]|(?P<name>[\w.-]+)))"
    r"(?::(?P<workers>\d{1,4}))?",
    re.ASCII,
)


class Host(NamedTuple):
    """A host of a job: `name` is what ssh gets, with a user before an @ if need be."""

    name: str
    workers: int


def parse_hosts(text: str) -> list[Host]:
    """Read "host1,host2:2,[fd00::3]:2": hosts, each with its number of workers (default 1);
    ConfigError for anything else, and for a host that comes twice."""
    hosts: list[Host] = []
    for word in text.split(","):
        word = word.strip()
        found = _SYNTAX.fullmatch(word)
        workers = int(found["workers"] or 1) if found else 0
        if found is None or workers < 1 or word.startswith("-"):
            raise ConfigError(
                f"'{word}' is no host; write host names or addresses with commas between, IPv6 "
                "addresses in brackets, and the number of workers after a colon if it is not 1: "
                "host1,host2:2,[fd00::3]:2"
            )
        name = (found["user"] or "") + (found["ipv6"] or found["name"])
        if name in [host.name for host in hosts]:
            once = word[: found.end("host")]
            raise ConfigError(f"the host '{name}' comes twice; write {once}:2")
        hosts.append(Host(name, workers))
    return hosts


def in_turn(hosts: Sequence[Host], count: int) -> list[Host]:
    """Spread `count` processes as workers are: hosts take turns, each as often as it has
    workers."""
    most = max(host.workers for host in hosts)
    turns = [host for turn in range(most) for host in hosts if turn < host.workers]
    return [turns[i % len(turns)] for i in range(count)]


def address_of_first(hosts: Sequence[Host]) -> str:
    """An address of the first host that the others reach, as far as can be known here.

    That is what ssh connects to. On the first host itself its name often means 127.0.0.1 or, on
    Debian and Ubuntu, 127.0.1.1: then it is the address from which this host reaches the second.
    A name that only the hosts know is returned as it is.
    """
    name = _name_for_ssh(hosts[0])
    try:
        address = addresses(name)[0]
    except OSError:
        return name
    if is_loopback(address) and len(hosts) > 1:
        with suppress(OSError):
            return route(_name_for_ssh(hosts[1]))[1]
    return address


def _name_for_ssh(host: Host) -> str:
    """The name or address that ssh connects to, which its configuration may replace."""
    with suppress(OSError):
        told = subprocess.run(["ssh", "-G", host.name], capture_output=True, text=True, check=False)
        for line in told.stdout.splitlines():
            key, _, value = line.partition(" ")
            if key == "hostname":
                return value
    return host.name.rpartition("@")[2]


_SIGNS_OF_LIFE = 4


def on_hosts(
    parts: Sequence[JobPart],
    hosts: Sequence[Host],
    *,
    own_env: Mapping[str, str],
    cwd: str,
    term_s: float,
    silence_s: float,
) -> list[JobPart]:
    """Place the scheduler on the first host, workers as hosts say, and servers in proportion.

    `own_env` is ssh's own. `term_s` is between SIGTERM and SIGKILL on a host that is not reached
    any more; `silence_s` is how long ssh waits for a host.
    """
    serving = [part for part in parts[1:] if part.serves_workers]
    working = [part for part in parts if not part.serves_workers]
    of_workers = [host for host in hosts for _ in range(host.workers)]
    of_servers = in_turn(hosts, len(serving))
    placed = [hosts[0], *of_servers, *of_workers]
    names = [host.name for host in placed]
    ordered = with_ranks([parts[0], *serving, *working], names, some_port())
    return [
        on_host(
            part,
            host,
            own_env=own_env,
            cwd=cwd,
            term_s=term_s,
            silence_s=silence_s,
            has_link=part.name == "scheduler",
        )
        for part, host in zip(ordered, placed)
    ]


def on_host(
    part: JobPart,
    host: Host,
    *,
    own_env: Mapping[str, str],
    cwd: str,
    term_s: float,
    silence_s: float,
    has_link: bool,
) -> JobPart:
    """The part as it runs on `host`; with `has_link` it can speak with the launcher."""
    channel = GuardianChannel(
        host.name, part.argv, part.env, cwd, workers_here=host.workers, has_link=has_link
    )
    options = {
        "BatchMode": "yes",  # nobody is there to answer questions
        "ConnectTimeout": CONNECT_TIMEOUT_S,
        "ServerAliveInterval": max(1, round(silence_s / _SIGNS_OF_LIFE)),
        "ServerAliveCountMax": _SIGNS_OF_LIFE,
    }
    settings = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    command = shlex.join(["exec", *guardian_command("host", term_s)])
    argv = ("ssh", "-T", *settings, "--", host.name, command)
    return replace(part, argv=argv, env=own_env, channel=channel)
