"""`p3kv run`: a script that does not import p3kv itself."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import TYPE_CHECKING

import shtab

if TYPE_CHECKING:
    from p3kv.tools.commands.arguments import Commands

_DESCRIPTION = """\
Run a training script that does not import p3kv itself: as `python SCRIPT` does,
but with `kvstore='p3'`, and in the roles of scheduler and server as p3kv's.

example: p3kv launch -n 2 -- p3kv run train.py --kv-store p3"""


def add(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="run a script that does not import p3kv",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="p3kv run [-h] SCRIPT [ARGS ...]",
    )
    script = parser.add_argument("script", metavar="SCRIPT", help="path of the script")
    script.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab looks for it there
    parser.add_argument(
        "args", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script"
    )
    parser.set_defaults(do=_run, parser=parser, own_errors=False)


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
