"""`p3kv launch`: a whole job, on this machine or on several hosts."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from p3kv.config import Settings, Tuned
from p3kv.errors import ConfigError
from p3kv.tools.commands.arguments import (
    add_workers_command,
    hosts,
    number_of_times,
    port,
    positive,
    workers_command,
)

_BROKEN_PIPE = 141  # 128 + SIGPIPE

HELP = "run a whole job, here or on several hosts"
USAGE = (
    "p3kv launch -n WORKERS [-s SERVERS | --tuned FILE] [--root-port PORT]\n"
    "                   [--resume] [--restarts TIMES] -- COMMAND ...\n"
    "       p3kv launch -H HOSTS [the same options] -- COMMAND ..."
)
DESCRIPTION = """\
Start a job on this machine or, with -H, on several hosts over ssh: a scheduler,
servers, and workers that run COMMAND. Show what they print, each line marked
with its writer. If one of them fails, all end, and the last line says which one
failed first, and why. The exit code is then that one's, else 0.

examples: p3kv launch -n 2 -- python train.py --epochs 10
          p3kv launch -H host1,host2:2 -- python train.py --epochs 10"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "-n",
        "--num-workers",
        type=positive,
        metavar="WORKERS",
        help="number of workers, on this machine",
    )
    where.add_argument(
        "-H",
        "--hosts",
        type=hosts,
        metavar="HOSTS",
        help="hosts that ssh reaches without a password, each with its number of workers after a "
        "colon (default: 1), as host1,host2:2; the first has the scheduler",
    )
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument(
        "-s",
        "--num-servers",
        type=positive,
        metavar="SERVERS",
        help="number of servers (default: as many as workers)",
    )
    servers.add_argument(
        "--tuned",
        type=Path,
        metavar="FILE",
        help="take the number of servers, and the slice size, that p3kv tune has left in this file",
    )
    parser.add_argument(
        "--root-port",
        type=port,
        default=0,
        metavar="PORT",
        help="port of the scheduler (default: a free one; with -H one by chance)",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the newest complete checkpoint in P3KV_CHECKPOINT_DIR",
    )
    parser.add_argument(
        "--restarts",
        type=number_of_times,
        default=0,
        metavar="TIMES",
        help="how many times to start the job again from its newest checkpoint when a process "
        "fails (default: never)",
    )
    add_workers_command(parser)


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.processes.launcher import launch, launch_on

    settings = Settings.from_environment()  # if a setting is wrong, every process would say so
    if settings.checkpoint_dir is None and (options.resume or options.restarts):
        raise ConfigError(
            "--resume and --restarts need checkpoints: set P3KV_CHECKPOINT_DIR to a folder for them"
        )
    if settings.encrypt and not options.hosts:  # other hosts' Python is not this one
        from p3kv.transport.tls import check_package

        check_package()
    command = workers_command(options)
    num_workers = options.num_workers or sum(host.workers for host in options.hosts)
    num_servers = options.num_servers or num_workers
    more = {"root_port": options.root_port, "resume": options.resume}
    more["restarts"] = options.restarts
    if options.tuned is not None:
        tuned = Tuned.read(options.tuned)
        num_hosts = len(options.hosts) if options.hosts else 1
        num_servers = tuned.servers_per_host * num_hosts
        more["env"] = tuned.environment()
        if (num_workers, num_hosts) != (tuned.workers, tuned.hosts):
            print(
                f"p3kv launch: '{options.tuned}' is for {tuned.in_words}; with {num_workers} on "
                f"{num_hosts} another number of servers may be better",
                file=sys.stderr,
            )
    if options.hosts:
        exit_code = launch_on(options.hosts, command, num_servers, **more)
    else:
        exit_code = launch(command, num_workers, num_servers, **more)
    if exit_code == _BROKEN_PIPE:
        # Python would try to write the rest once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code
