"""The command line: `p3kv COMMAND ...` and `p3kv --version`."""

from __future__ import annotations

import argparse

from p3kv.commands import COMMANDS
from p3kv.version import VERSION


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
    for command in COMMANDS:
        command.add(commands)
    return parser
