"""Arguments that several commands have, and what commands are added to."""

from __future__ import annotations

import argparse
import math
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Mapping, Sequence

from p3kv.errors import ConfigError

if TYPE_CHECKING:
    from p3kv.processes.launcher import Host

_BIT_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)(/s)?\s*", re.IGNORECASE)


def bandwidth(text: str) -> float:
    """Bits a second: "800mbit", "10 Gbit/s"."""
    return _read(text, _BIT_S, "bandwidth", "10gbit", takes_per_second=True)


def duration(text: str) -> float:
    """Seconds: "0.3s", "300ms"."""
    return _read(text, _SECONDS, "time", "0.3s", takes_per_second=False)


def _read(
    text: str, units: Mapping[str, float], what: str, example: str, takes_per_second: bool
) -> float:
    known = f"{', '.join(list(units)[:-1])} or {list(units)[-1]}"
    found = _NUMBER_AND_UNIT.fullmatch(text)
    if found is None or (found[3] and not takes_per_second):
        raise argparse.ArgumentTypeError(
            f"'{text}' is no {what}; write a number and {known}, such as {example}"
        )
    number, unit = float(found[1]), found[2].lower()
    if not unit:
        raise argparse.ArgumentTypeError(
            f"'{text}' has no unit; write {known} after the number, such as {example}"
        )
    if unit not in units:
        raise argparse.ArgumentTypeError(
            f"'{found[2]}' in '{text}' is no unit of a {what}; write {known}, such as {example}"
        )
    if not 0 < number * units[unit] < 1e18:
        raise argparse.ArgumentTypeError(f"'{text}' is no {what} that anything has")
    return number * units[unit]


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


def add_places(parser: argparse.ArgumentParser, workers: int) -> None:
    """Adds where a command runs a script: on this machine, or on hosts."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "-n",
        "--num-workers",
        type=positive,
        metavar="WORKERS",
        help=f"number of workers, on this machine, without a network (default: {workers})",
    )
    where.add_argument(
        "-H", "--hosts", type=hosts, metavar="HOSTS", help="the job's hosts, as for p3kv launch"
    )


def add_trials(parser: argparse.ArgumentParser, steps: int, rounds: int) -> None:
    """Adds how long a command tries a script."""
    parser.add_argument(
        "--steps",
        type=positive,
        default=steps,
        metavar="N",
        help=f"steps that are measured in each trial, after some to warm up (default: {steps})",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=rounds,
        metavar="N",
        help=f"how many trials each has (default: {rounds})",
    )


def add_workers_command(parser: argparse.ArgumentParser) -> None:
    """Adds what `workers_command` reads."""
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="what each worker runs, such as `python train.py`",
    )


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
