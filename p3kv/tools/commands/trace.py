"""`p3kv trace`: the traces of a job, put together for people."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, List

from p3kv.common.words import counted
from p3kv.errors import TraceError

if TYPE_CHECKING:
    from p3kv.tools.timeline import Iteration, Timeline

HELP = "put the traces of a job together, for Perfetto and as a picture"
USAGE = None
DESCRIPTION = """\
Put the traces together that the processes of a job have written
(P3KV_TRACE=FOLDER), on one clock: FOLDER/trace.json for
https://ui.perfetto.dev, FOLDER/trace.png with one iteration, and its numbers:

overlap       part of the communication during which the worker computes
compute idle  part of the iteration in which the worker surely waits
link idle     part in which the worker neither sends nor receives a slice"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where the traces are")


def do(options: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    from p3kv.tools.timeline import iterations, read_job, typical, write_chrome

    try:
        timeline = read_job(options.folder)
        path = options.folder / "trace.json"
        write_chrome(timeline, path)
        workers = [iterations(timeline, worker) for worker in timeline.of_role("worker")]
        print(_clocks(timeline))
        print(f"{path}: open it at https://ui.perfetto.dev")
        shown = next((found for found in map(typical, workers) if found is not None), None)
        if shown is None:
            print("no picture: no worker has recorded two steps")
            return 0
        of_step = [one for found in workers for one in found if one.step == shown.step]
        _draw(timeline, shown, of_step, options.folder / "trace.png")
        print(_table(of_step))
    except OSError as error:
        raise TraceError(f"{error.filename}: {error.strerror or error}") from error
    return 0


def _draw(timeline: Timeline, shown: Iteration, of_step: List[Iteration], path: Path) -> None:
    try:
        from p3kv.tools.pictures import draw_iteration
    except ImportError as error:
        print(f"no picture: {error}. Install it: pip install 'p3kv[plots]'")
        return
    draw_iteration(timeline, shown, of_step, path)
    print(f"{path}: an iteration of median length")


def _clocks(timeline: Timeline) -> str:
    unknown = [one.process.name for one in timeline.processes if not one.has_clock]
    roles = (counted(len(timeline.of_role(role)), role) for role in ("worker", "server"))
    worst_ms = max(one.uncertainty_ns for one in timeline.processes) / 1e6
    text = f"{' and '.join(roles)}; "
    text += f"their clocks are aligned within {worst_ms:.2f} ms" if worst_ms else "on one clock"
    if unknown:
        text += f", but for {', '.join(unknown)}: nothing is known of those clocks"
    return text


def _table(of_step: List[Iteration]) -> str:
    from p3kv.tools.timeline import percent

    rows = [(f"step {of_step[0].step}", "ms", "overlap", "compute idle", "link idle")]
    rows += [
        (
            f"worker {one.worker}", f"{one.seconds * 1e3:.1f}", percent(one.overlap),
            percent(one.compute_idle), percent(one.link_idle),
        )
        for one in of_step
    ]  # fmt: skip
    return "\n".join(
        f"{who:10}{ms:>10}{overlap:>10}{idle:>14}{link:>11}"
        for who, ms, overlap, idle, link in rows
    )
