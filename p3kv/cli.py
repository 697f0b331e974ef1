"""The command line: `p3kv launch`, `p3kv run` and `p3kv --version`."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from p3kv.config import Settings
from p3kv.errors import ConfigError
from p3kv.version import VERSION

_BROKEN_PIPE = 141  # 128 + SIGPIPE

_LAUNCH = """\
Start a scheduler, servers and workers on this machine, the workers with the given command, and
show what they print, each line marked with its writer. When one of them fails, the others get a
moment to end, then all are ended; the last line says which one failed first, and why. The exit
code is that one's.

example: p3kv launch -n 2 -s 2 -- python train.py --epochs 10"""

_RUN = """\
Run a training script that does not import p3kv itself: like `python SCRIPT`, with the store
registered and the roles of scheduler and server taken over from MXNet."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`, by default this process's; returns the exit code."""
    options = _parser().parse_args(argv)
    exit_code: int = options.do(options)
    return exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p3kv", description="A key-value store for data-parallel training with MXNet."
    )
    parser.add_argument("--version", action="version", version=f"p3kv {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    launch = commands.add_parser(
        "launch",
        help="run a whole job on this machine",
        description=_LAUNCH,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="p3kv launch -n WORKERS [-s SERVERS] [--root-port PORT] -- COMMAND ...",
    )
    launch.add_argument(
        "-n", "--num-workers", type=_positive, required=True, metavar="WORKERS", help="how many"
    )
    launch.add_argument(
        "-s",
        "--num-servers",
        type=_positive,
        metavar="SERVERS",
        help="how many (default: as many as workers)",
    )
    launch.add_argument(
        "--root-port",
        type=_port,
        default=0,
        metavar="PORT",
        help="the scheduler's port (default: a free one)",
    )
    launch.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="a worker's")
    launch.set_defaults(do=_launch, parser=launch)

    run = commands.add_parser("run", help="run a script that stays unchanged", description=_RUN)
    run.add_argument("script", metavar="SCRIPT", help="the script's path")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own")
    run.set_defaults(do=_run, parser=run)
    return parser


def _positive(text: str) -> int:
    number = _number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def _port(text: str) -> int:
    number = _number(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port; ports go up to 65535")
    return number


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None


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


def _run(options: argparse.Namespace) -> int:
    # In the roles of scheduler and server `import p3kv` has done its work and ended the process
    # before this line.
    script: str = options.script
    try:
        with open(script, "rb"):
            pass
    except FileNotFoundError:
        print(f"p3kv run: there is no script '{script}'", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"p3kv run: can't read '{script}': {error.strerror}", file=sys.stderr)
        return 2
    folder = os.path.dirname(os.path.abspath(script))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
    else:
        # Where `python -m p3kv` or the p3kv script was found; not for the user's script to see.
        sys.path[0] = folder
    sys.argv = [script, *options.args]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        # However the script has raised it: a worker tells the others what it gives to `sys.exit`.
        sys.exit(end.code)
    return 0
