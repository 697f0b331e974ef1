"""`p3kv launch`: a whole job on this machine."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from p3kv.commands.arguments import port, positive
from p3kv.config import Settings

if TYPE_CHECKING:
    from p3kv.commands.arguments import Commands

_BROKEN_PIPE = 141  # 128 + SIGPIPE

_DESCRIPTION = """\
Start a job on this machine: a scheduler, servers, and workers that run COMMAND.
Show what they print, each line marked with its writer. If one of them fails,
all end, and the last line says which one failed first, and why. The exit code
is then that one's, else 0.

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
        "-n",
        "--num-workers",
        type=positive,
        required=True,
        metavar="WORKERS",
        help="number of workers",
    )
    parser.add_argument(
        "-s",
        "--num-servers",
        type=positive,
        metavar="SERVERS",
        help="number of servers (default: as many as workers)",
    )
    parser.add_argument(
        "--root-port",
        type=port,
        default=0,
        metavar="PORT",
        help="port of the scheduler (default: a free one)",
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="what each worker runs, such as `python train.py`",
    )
    parser.set_defaults(do=_launch, parser=parser)


def _launch(options: argparse.Namespace) -> int:
    from p3kv.launcher import launch

    Settings.from_environment()  # if a setting is wrong, every process would say so
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
