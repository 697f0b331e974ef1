"""The command line: `p3kv COMMAND ...` and `p3kv --version`."""

from __future__ import annotations

import argparse
import errno
import sys

import shtab

from p3kv.common import terminal

terminal.end_silently()

from p3kv import config  # noqa: E402
from p3kv.common.terminal import drop_output, guard  # noqa: E402
from p3kv.common.version import VERSION  # noqa: E402
from p3kv.common.words import did_you_mean  # noqa: E402
from p3kv.errors import P3Error  # noqa: E402
from p3kv.tools.commands import COMMANDS  # noqa: E402

_WRONG, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141

_DESCRIPTION = """\
A parameter server that makes distributed training with PyTorch and MXNet
faster where the network is the limit."""

_EPILOG = """\
`p3kv COMMAND --help` says more. Settings are variables, such as P3KV_VERBOSE=1,
which logs what happens and shows the traceback of an error."""


def main(argv: list[str] | None = None) -> int:
    """Runs the command line `argv`, by default this process's; returns the exit code.

    An error of p3kv's is one line, with P3KV_VERBOSE=1 a traceback. Errors of a script that a
    command runs in this process are the script's affair (`own_errors`).
    """
    terminal.raise_again()
    guard()
    parser = _parser()
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments:
        parser.print_help(sys.stderr)
        return _WRONG
    _check_command(parser, arguments[0])
    options = parser.parse_args(arguments)
    try:
        exit_code: int = options.do(options)
        sys.stdout.flush()
    except P3Error as error:
        if not options.own_errors or config.wants_traceback():
            raise
        print(f"{options.parser.prog}: {error}", file=sys.stderr)
        return _WRONG
    except OSError as error:
        if not options.own_errors or error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        drop_output()
        if error.errno == errno.EPIPE:
            return _BROKEN_PIPE
        print(f"{options.parser.prog}: can't write: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if not options.own_errors:
            raise
        return _INTERRUPTED
    return exit_code


def _check_command(parser: argparse.ArgumentParser, word: str) -> None:
    """Ends the process with the nearest command's name if there is no such command."""
    names = _names()
    if word.startswith("-") or word in names:
        return
    meant = did_you_mean(word, names) or f". There are {', '.join(names)}"
    parser.error(f"there is no command '{word}'{meant}")


def _names() -> list[str]:
    return [command.__name__.rpartition(".")[2] for command in COMMANDS]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="p3kv",
        usage="p3kv [-h] COMMAND ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(own_errors=True)
    parser.add_argument("--version", action="version", version=f"p3kv {VERSION}")
    shtab.add_argument_to(
        parser, "--print-completion", help="print a shell's completion of this command"
    )
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", prog="p3kv", required=True
    )
    for name, command in zip(_names(), COMMANDS):
        added = commands.add_parser(
            name, help=command.HELP, usage=command.USAGE, description=command.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        command.add(added)
        added.set_defaults(do=command.do, parser=added)
    return parser
