"""`p3kv launch`: a whole job on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from p3kv.commands.arguments import port, positive
from p3kv.config import Settings
from p3kv.errors import ConfigError

if TYPE_CHECKING:
    from p3kv.commands.arguments import Commands

_BROKEN_PIPE = 141  # 128 + SIGPIPE

_DESCRIPTION = """\
Start a scheduler, servers and workers on this machine, the workers with the given command, and
show what they print, each line marked with its writer. When one of them fails, the others get a
moment to end, then all are ended; the last line says which one failed first, and why. The exit
code is that one's.

example: p3kv launch -n 2 -s 2 -- python train.py --epochs 10"""


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "launch",
        help="run a whole job on this machine",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="p3kv launch -n WORKERS [-s SERVERS] [--root-port PORT] -- COMMAND ...",
    )
    parser.add_argument(
        "-n", "--num-workers", type=positive, required=True, metavar="WORKERS", help="how many"
    )
    parser.add_argument(
        "-s",
        "--num-servers",
        type=positive,
        metavar="SERVERS",
        help="how many (default: as many as workers)",
    )
    parser.add_argument(
        "--root-port",
        type=port,
        default=0,
        metavar="PORT",
        help="the scheduler's port (default: a free one)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="a worker's")
    parser.set_defaults(do=_launch, parser=parser)


def _launch(options: argparse.Namespace) -> int:
    from p3kv.launcher import launch

    try:
        Settings.from_environment()  # every process would say the same
    except ConfigError as error:
        print(f"p3kv launch: {error}", file=sys.stderr)
        return 2
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        options.parser.error("the workers' command is missing, such as '-- python train.py'")
    exit_code = launch(
        command,
        options.num_workers,
        options.num_servers or options.num_workers,
        root_port=options.root_port,
    )
    if exit_code == _BROKEN_PIPE:
        # Python would try to write the rest once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code
