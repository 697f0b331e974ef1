"""Starts a job again that has failed; it goes on from its newest checkpoint."""

from __future__ import annotations

import sys
from typing import BinaryIO, Callable, NamedTuple


class Run(NamedTuple):
    """How a job has ended."""

    code: int
    """The exit code; 0 when every process ended well."""
    may_start_again: bool
    """Whether a process of the job has failed: nobody has stopped the job, and all could start."""


def run_with_restarts(
    run: Callable[[bool], Run], restarts: int, resume: bool, err: BinaryIO | None = None
) -> int:
    """Runs a job, and again when it fails, at most `restarts` times; returns the last exit code.

    `run(resume)` runs it once; every run but the first goes on from the newest checkpoint. Restarts
    count whatever the job has achieved: one that fails at the same place again and again ends.
    """
    done = run(resume)
    for number in range(1, restarts + 1):
        if not done.code or not done.may_start_again:
            break
        stream = err if err is not None else sys.stderr.buffer
        line = (
            f"p3kv launch: starts the job again from its newest checkpoint ({number} of {restarts})"
        )
        stream.write(f"{line}\n".encode())
        stream.flush()
        done = run(True)
    return done.code
