"""`p3kv compare`: the user's own script with several stores."""

from __future__ import annotations

import argparse
import sys
from textwrap import fill

from p3kv.config import Settings
from p3kv.errors import ConfigError
from p3kv.tools.commands.arguments import (
    add_places,
    add_trials,
    add_workers_command,
    positive,
    workers_command,
)

_COLUMNS = 80
_WORKERS, _STEPS, _ROUNDS = 2, 30, 3
_CODECS = "float16 bfloat16 2bit topk:share=0.01"

HELP = "measure your script with p3kv and with what its framework has"
USAGE = (
    "p3kv compare [-n WORKERS | -H HOSTS] [-s SERVERS]\n"
    "                    [--steps N] [--rounds N] [--codecs [CODECS]] -- COMMAND ..."
)
DESCRIPTION = """\
Run your script for some steps with what its framework has (PyTorch's DDP,
MXNet's dist_sync), with p3kv first in first out (FIFO), with p3kv, and with
nothing sent, in turn; then say how long a step takes with each, what p3kv
gains, and what it would gain with other numbers of hosts and other bandwidths.
The script stays as it is: it uses p3kv.torch.Optimizer or kvstore='p3'. One
that uses DDP itself is given as `python -m p3kv.ddp train.py`. Each trial ends
after its steps; p3kv writes no checkpoints and no traces meanwhile.

examples: p3kv compare -H host1,host2,host3,host4 -- python train.py
          p3kv compare -n 2 -- python train.py --batch 32"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_places(parser, _WORKERS)
    parser.add_argument(
        "-s",
        "--num-servers",
        type=positive,
        metavar="SERVERS",
        help="number of servers (default: as many as workers)",
    )
    add_trials(parser, _STEPS, _ROUNDS)
    parser.add_argument(
        "--codecs",
        nargs="?",
        const=_CODECS,
        default="",
        metavar="CODECS",
        help="measure p3kv with these codecs, too, such as 'float16 topk:share=0.001', in both "
        f"directions where they serve both (if none is named: {_CODECS})",
    )
    add_workers_command(parser)


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools import compare, trials

    settings = Settings.from_environment()  # if a setting is wrong, every process would say so
    command = workers_command(options)
    if options.hosts:
        workers = sum(host.workers for host in options.hosts)
    else:
        workers = options.num_workers or _WORKERS
    if workers < 2:
        raise ConfigError("one worker has nobody to exchange gradients with; start 2 or more")
    show = sys.stderr.buffer if settings.verbose else None
    job = trials.TrialJob(command, workers, options.num_servers or workers, options.hosts or ())
    try:
        found = trials.compare(
            job, options.steps, options.rounds, options.codecs.split(), _say, show
        )
    except trials.TrialFailed as failure:
        for line in failure.last_lines:
            print(line, file=sys.stderr)
        _say(str(failure))
        return failure.code
    forecast = found.forecast()
    print("\n".join(["", *compare.table(found, forecast)]))
    _print(compare.verdict(found))
    if found.with_codecs:
        _print(compare.about_codecs(found))
    for note in compare.notes(found):
        _print(f"Note: {note}.")
    if not options.hosts:
        _print(
            "Note: all workers ran on this machine, so no network was between them. With -H, "
            "hosts are compared with the network that they have."
        )
    for text in compare.outlook(found, forecast):
        _print(text)
    return 0


def _print(text: str) -> None:
    """A paragraph; a table keeps its lines."""
    shown = text if "\n" in text else fill(text, _COLUMNS)
    print(f"\n{shown}")


def _say(line: str) -> None:
    print(f"p3kv compare: {line}", file=sys.stderr, flush=True)
