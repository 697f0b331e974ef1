"""Marks show that a process has the folder of checkpoints that worker rank 0 has.

A server makes an empty file, whose name only its job knows (`Credentials.mark`), and worker 0 looks
for it. For worker 0's own mark other workers look that have something to write.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from typing import Dict, Mapping, Optional

from p3kv.checkpoints.files import NotOursError, make_anew, open_folder, open_own, owner_in

_MARK = re.compile(r"\.p3kv-[0-9a-f]{32}")


def name(mark: bytes) -> str:
    """The name of a mark's file, from the 16 bytes that only the job knows."""
    return f".p3kv-{mark.hex()}"


def leave(folder: str, mark: bytes) -> None:
    """Makes a mark; OSError if the folder is not there, or no file can be made in it."""
    descriptor = open_folder(folder)
    try:
        make_anew(descriptor, name(mark)).close()
    finally:
        os.close(descriptor)


def remove(folder: str, mark: bytes) -> None:
    """Removes a mark if it is still there."""
    with suppress(OSError):
        os.unlink(os.path.join(folder, name(mark)))


def hold(folder: str) -> Optional[int]:
    """Lock a folder until the descriptor is closed; None where the file system can't,
    BlockingIOError where another job holds it."""
    descriptor = open_folder(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def remove_old(folder: str) -> None:
    """Remove marks of killed jobs from a folder that this job holds, before it leaves its own."""
    with suppress(OSError):
        for found in filter(_MARK.fullmatch, os.listdir(folder)):
            with suppress(OSError):
                os.unlink(os.path.join(folder, found))


def take(folder: str, marks: Mapping[int, bytes]) -> Dict[int, str]:
    """Remove the marks that are in the folder; return and raise as `look`."""
    problems = look(folder, marks)
    for server in marks.keys() - problems.keys():
        remove(folder, marks[server])
    return problems


def look(folder: str, marks: Mapping[int, bytes]) -> Dict[int, str]:
    """By rank, why a mark can't be used; OSError if the folder can't be read."""
    problems = {}
    descriptor = open_folder(folder)
    try:
        owner = owner_in(descriptor)
        for rank, mark in marks.items():
            try:
                open_own(descriptor, name(mark), owner, 0).close()
            except NotOursError as error:
                problems[rank] = str(error)
            except OSError as error:
                missing = isinstance(error, FileNotFoundError)
                problems[rank] = "its files are not there" if missing else str(error.strerror)
    finally:
        os.close(descriptor)
    return problems
