"""`p3kv top`: what a running job does, live."""

from __future__ import annotations

import argparse
from contextlib import suppress

from p3kv.tools.commands.arguments import positive, positive_seconds

HELP = "watch a running job"
USAGE = None
DESCRIPTION = """\
Show what each process of a running job does: steps, waiting for the network,
traffic, queues, and which worker the others wait for. A table on a terminal,
else lines. Run it on a host where a process of the job runs, as the same user:
it finds the job by itself."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "pid",
        nargs="?",
        type=positive,
        metavar="PID",
        help="a process of the job, or its launcher, if there are several jobs",
    )
    parser.add_argument(
        "--every", type=positive_seconds, default=2.0, metavar="SECONDS", help="(default: 2)"
    )
    parser.add_argument(
        "--count", type=positive, metavar="N", help="show it so many times (default: to its end)"
    )


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools.top import find, watch

    with suppress(KeyboardInterrupt):  # the usual end
        watch(find(options.pid), options.every, options.count)
    return 0
