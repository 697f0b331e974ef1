"""The job's secret: where a process finds it, and which job may do without one."""

from __future__ import annotations

import os
import stat
from typing import Iterable, Mapping, Optional

from p3kv.addresses import is_loopback
from p3kv.errors import ConfigError

VARIABLE = "P3KV_SECRET"
FILE_VARIABLE = "P3KV_SECRET_FILE"
SECRET_BYTES = 32
"""Of a secret that p3kv makes."""
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_HOW_TO_MAKE = "python -c 'import secrets; print(secrets.token_hex(32))' prints a good one"


def job_secret(environ: Mapping[str, str]) -> bytes:
    """The secret that all processes of a job share; empty if there is none.

    It must never be logged, sent or put into a command line. Raises ConfigError, without the
    secret, for one that is too short, and for a file that others can read.
    """
    text, path = environ.get(VARIABLE), environ.get(FILE_VARIABLE)
    if text and path:
        raise ConfigError(f"{VARIABLE} and {FILE_VARIABLE} are both set; set one of them")
    if path:
        return _checked(_read(path), f"the secret in {path!a} ({FILE_VARIABLE})")
    return _checked(os.fsencode(text), VARIABLE) if text else b""


def check_local(hosts: Iterable[Optional[str]], interface: Optional[str]) -> None:
    """Raises ConfigError for a job without a secret that other hosts can reach.

    `hosts` and `interface` say where its processes listen, as far as its user has said so.
    """
    where = next((host for host in hosts if host and not is_loopback(host)), None)
    if where is None and interface not in (None, "lo"):
        where = f"the interface {interface}"
    if where is not None:
        raise ConfigError(
            f"{VARIABLE} is not set, and this job uses {where}, where other hosts can reach it: "
            f"anybody could join it. Set {VARIABLE} to the same text in all its processes "
            f"({_HOW_TO_MAKE}), or {FILE_VARIABLE} to a file that has it and that only you can "
            "read. Without a secret a job must use 127.0.0.1 or ::1."
        )


def _checked(secret: bytes, what: str) -> bytes:
    secret = secret.strip()
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ConfigError(
            f"{what} has {len(secret)} letters; it must have from {_LEAST_BYTES} to {_MOST_BYTES}. "
            f"{_HOW_TO_MAKE}"
        )
    return secret


def _read(path: str) -> bytes:
    what = f"{FILE_VARIABLE} is {path!a}"
    try:
        # Not waiting for a writer if it is a pipe. What is checked is what is read.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{what}, which is no file")
            if found.st_uid not in (os.geteuid(), 0):
                raise ConfigError(
                    f"{what}, which belongs to user {found.st_uid}. It must belong to the user who "
                    "runs the job, or to root"
                )
            if found.st_mode & 0o077:
                raise ConfigError(
                    f"{what}, which other users may read or write (its mode is "
                    f"{stat.S_IMODE(found.st_mode):o}). Run 'chmod 600' on it, and change the "
                    "secret if others may have read it"
                )
            return file.read(_MOST_BYTES + 2)
    except OSError as error:
        raise ConfigError(f"{what}, which can't be read: {error.strerror}") from error
    except ValueError as error:  # a zero byte, which no name can have
        raise ConfigError(f"{what}, which can't be read: {error}") from error
