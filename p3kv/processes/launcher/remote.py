"""A job's parts as they run on other hosts, each behind a connection of ssh's.

ssh starts a guardian on the host (`guardian.py`), which starts the process.
"""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Mapping, Sequence

from p3kv.processes.launcher.guardian import guardian_command
from p3kv.processes.launcher.guardian_channel import GuardianChannel
from p3kv.processes.launcher.hosts import Host, in_turn
from p3kv.processes.launcher.parts import Part, some_port, with_ranks
from p3kv.processes.launcher.process import CONNECT_TIMEOUT_S

_SIGNS_OF_LIFE = 4


def on_hosts(
    parts: Sequence[Part],
    hosts: Sequence[Host],
    *,
    own_env: Mapping[str, str],
    cwd: str,
    term_s: float,
    silence_s: float,
) -> list[Part]:
    """A job's parts as they run on `hosts`: the scheduler on the first, and as many workers on each
    as it says, with consecutive ranks. Servers are spread in the same proportions.

    `own_env` is what ssh itself gets. `term_s` is between SIGTERM and SIGKILL for what runs on a
    host that the launcher does not reach any more; `silence_s` is how long ssh waits for a host.
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
    part: Part,
    host: Host,
    *,
    own_env: Mapping[str, str],
    cwd: str,
    term_s: float,
    silence_s: float,
    has_link: bool,
) -> Part:
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
