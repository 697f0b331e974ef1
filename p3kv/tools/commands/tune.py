"""`p3kv tune`: how many servers pay for the user's own script."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from textwrap import fill

from p3kv.config import MAX_SLICE_ELEMS, Settings, Tuned
from p3kv.errors import ConfigError
from p3kv.tools.commands.arguments import (
    add_places,
    add_trials,
    add_workers_command,
    positive,
    workers_command,
)

_COLUMNS = 80
_WORKERS, _MOST, _STEPS, _ROUNDS = 2, 16, 30, 3
_SIZES = "10000 50000 250000"

HELP = "measure how many servers your script needs"
USAGE = (
    "p3kv tune [-n WORKERS | -H HOSTS] [--max-servers N]\n"
    "                 [--slice-sizes [SIZES]] [--steps N] [--rounds N]\n"
    "                 [--write FILE] -- COMMAND ..."
)
DESCRIPTION = """\
Run your script for some steps with 1, 2, 4, ... servers on each host, until
steps become longer; fit the time of a step to the number of servers; then say
how many servers to take, and how sure that is. The script stays as it is. Each
trial ends after its steps; p3kv writes no checkpoints and no traces meanwhile.

examples: p3kv tune -H host1,host2 --write tuned.json -- python train.py
          p3kv launch -H host1,host2 --tuned tuned.json -- python train.py"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_places(parser, _WORKERS)
    parser.add_argument(
        "--max-servers",
        type=positive,
        default=_MOST,
        metavar="N",
        help=f"most servers on each host that are tried (default: {_MOST})",
    )
    parser.add_argument(
        "--slice-sizes",
        nargs="?",
        const=_SIZES,
        default="",
        metavar="SIZES",
        help="also measure these numbers of elements in a slice with the servers that were chosen, "
        f"beside the size that p3kv chooses by itself (if none is named: '{_SIZES}')",
    )
    add_trials(parser, _STEPS, _ROUNDS)
    parser.add_argument(
        "--write",
        type=Path,
        metavar="FILE",
        help="leave the choice in a file for p3kv launch --tuned FILE",
    )
    add_workers_command(parser)


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools import tune
    from p3kv.tools.trials import TrialFailed, TrialJob

    settings = Settings.from_environment()  # if a setting is wrong, every process would say so
    command = workers_command(options)
    slice_sizes = _sizes(options.slice_sizes)
    if options.write is not None:
        Tuned.check_writable(options.write)
    workers = options.num_workers or _WORKERS
    if options.hosts:
        workers = sum(host.workers for host in options.hosts)
    job = TrialJob(command, workers, 1, options.hosts or ())
    show = sys.stderr.buffer if settings.verbose else None
    try:
        found = tune.tune(
            job, options.max_servers, slice_sizes, options.steps, options.rounds, _say, show
        )
    except TrialFailed as failure:
        for line in failure.last_lines:
            print(line, file=sys.stderr)
        _say(str(failure))
        return failure.code
    print("\n".join(["", *tune.table(found)]))
    for text in (tune.equation(found), tune.choice(found)):
        print(f"\n{fill(text, _COLUMNS)}")
    if found.by_size:
        print("\n".join(["", *tune.sizes(found), "", tune.size_choice(found)]))
    if options.write is not None:
        Tuned(found.servers, workers, found.hosts, found.slice_size).write(options.write)
        _say(f"the choice is in '{options.write}', for p3kv launch --tuned")
    return 0


def _sizes(text: str) -> list[int]:
    found = []
    for word in text.split():
        if not word.isdecimal() or not 1 <= int(word) <= MAX_SLICE_ELEMS:
            raise ConfigError(
                f"--slice-sizes has '{word}'; write numbers of elements from 1 to "
                f"{MAX_SLICE_ELEMS}, with spaces between"
            )
        found.append(int(word))
    return list(dict.fromkeys(found))


def _say(line: str) -> None:
    print(f"p3kv tune: {line}", file=sys.stderr, flush=True)
