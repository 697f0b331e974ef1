"""Types of arguments that several commands have, and what commands are added to."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Sequence

from p3kv.errors import ConfigError

if TYPE_CHECKING:
    from p3kv.processes.launcher import Host

    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
    """What `ArgumentParser.add_subparsers` returns."""


def positive(text: str) -> int:
    """A whole number of 1 or more."""
    number = _number(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


def number_of_times(text: str) -> int:
    """A whole number from 0 on."""
    number = _number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is not 0 or more")
    return number


def port(text: str) -> int:
    """A port; 0 is any that is free."""
    number = _number(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port; ports go up to 65535")
    return number


def positive_seconds(text: str) -> float:
    """A number above 0."""
    with suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0")


def workers_command(options: argparse.Namespace) -> list[str]:
    """Command of each worker: the rest of the command line, after a `--`."""
    command: list[str] = options.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        options.parser.error("the workers' command is missing, such as '-- python train.py'")
    return command


def complete_with(action: argparse.Action, names: Sequence[str]) -> None:
    """Has shells complete an option's argument with these names: shtab reads them there."""
    function, words = f"_p3kv_{action.dest}", " ".join(names)
    action.complete = {  # type: ignore[attr-defined]
        "bash": function,
        "zsh": f"({words})",
        "preamble": {"bash": f"{function}() {{ compgen -W '{words}' -- \"$1\"; }}"},
    }


def hosts(text: str) -> list[Host]:
    """Hosts that ssh reaches: "host1,host2:2"."""
    from p3kv.processes.launcher import parse_hosts

    try:
        return parse_hosts(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
