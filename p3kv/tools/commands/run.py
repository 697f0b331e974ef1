"""`p3kv run`: a script that does not import p3kv itself."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from typing import List, Tuple

import shtab

HELP = "run a script that does not import p3kv"
USAGE = "p3kv run [-h] [--ddp] SCRIPT [ARGS ...]"
DESCRIPTION = """\
Run a training script that does not import p3kv itself: as `python SCRIPT` does,
but with `kvstore='p3'`, and in the roles of scheduler and server as p3kv's.
With --ddp p3kv trains what the script wraps in PyTorch's
DistributedDataParallel, and so does `python -m p3kv.ddp SCRIPT`.

examples: p3kv launch -n 2 -- p3kv run train.py --kv-store p3
          p3kv launch -n 2 -- p3kv run --ddp train.py
          torchrun --nproc-per-node 2 -m p3kv.ddp train.py"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "--ddp", action="store_true", help="train what the script wraps in DistributedDataParallel"
    )
    script = parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    script.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it there
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script"
    )
    parser.set_defaults(own_errors=False)


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    # In the roles of scheduler and server `import p3kv` has done its work and ended the process
    # before this line.
    if not prepare([options.script, *options.args]):
        return 2
    if options.ddp:
        importlib.import_module("p3kv.torch.ddp")
    try:
        runpy.run_path(options.script, run_name="__main__")
    except SystemExit as end:
        # However the script has raised it: a worker tells the others what it gives to `sys.exit`.
        sys.exit(end.code)
    return 0


def located(given: List[str]) -> Tuple[str, str, List[str]]:
    """Return the file of a script and its arguments, or those of a module after "-m", between them
    the module's package. The file's name is empty where there is no such module."""
    if given[0] != "-m":
        return given[0], "", given[1:]
    _, name, *arguments = given
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:  # its package
        found = None
    if found is None:
        return "", "", arguments
    return found.origin or "", found.parent or "", arguments


def prepare(given: List[str]) -> bool:
    """Have this process's arguments and path be those of a script, or of a module after "-m"; say
    so, and return False, where it can't be read."""
    script, _, arguments = located(given)
    if not script:
        print(f"p3kv run: there is no module '{given[1]}'", file=sys.stderr)
        return False
    try:
        with open(script, "rb"):
            pass
    except FileNotFoundError:
        print(f"p3kv run: there is no script '{script}'", file=sys.stderr)
        return False
    except OSError as error:
        print(f"p3kv run: can't read '{script}': {error.strerror}", file=sys.stderr)
        return False
    sys.argv = [script, *arguments]
    if given[0] == "-m":  # the path is that of `python -m`
        return True
    folder = os.path.dirname(os.path.abspath(script))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
    else:
        # Where `python -m p3kv` or the p3kv script was found; not for the user's script to see.
        sys.path[0] = folder
    return True
