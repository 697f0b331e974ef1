"""The job's secret: where a process finds it, and which job may do without one.

A job that stays on one machine may do without. Then its processes share what only their account can
read (`account_secret`), so none of another account can join.
"""

from __future__ import annotations

import os
import pwd
import secrets
import stat
from contextlib import suppress
from typing import Iterable, List, Mapping, Optional, Sequence

from p3kv.common.addresses import is_loopback
from p3kv.errors import ConfigError

VARIABLE = "P3KV_SECRET"
FILE_VARIABLE = "P3KV_SECRET_FILE"
SECRET_BYTES = 32
"""Size of a secret that p3kv makes."""
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_ACCOUNTS_FOLDER, _IN_HOME, _ACCOUNTS_FILE = "/tmp/p3kv-{uid}", ".cache/p3kv", "account"
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


def account_secret(folders: Optional[Sequence[str]] = None) -> bytes:
    """Secret that only this account's processes can read, on this machine; made when first needed.

    It is in a file of a folder of its own, at a place that no variable changes: all processes of a
    job must find the same. Whoever makes the folder in /tmp first could keep the account from it:
    then it is in the account's home, and stays there. Raises ConfigError where neither is private.
    """
    uid = os.geteuid()
    *first, last = _folders(uid) if folders is None else folders
    if first and not _is_others(first[0], uid) and not os.path.exists(f"{last}/{_ACCOUNTS_FILE}"):
        last = first[0]
    try:
        os.makedirs(os.path.dirname(last), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(last, 0o700)
        # What is checked is what is used: from here on by its descriptor.
        inside = os.open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            _check_private(last, os.fstat(inside), uid)
            with suppress(FileNotFoundError):
                return _accounts_secret(inside, last, uid)
            _make_accounts_secret(inside)
            return _accounts_secret(inside, last, uid)
        finally:
            os.close(inside)
    except OSError as error:
        raise ConfigError(
            f"{VARIABLE} is not set, and {last}, where p3kv then keeps what only this account "
            f"may read, can't be used: {error.strerror}. Remove it, or set {VARIABLE}: "
            f"{_HOW_TO_MAKE}"
        ) from error


def _folders(uid: int) -> List[str]:
    """Where an account's secret may be; in its home if it has one."""
    folders = [_ACCOUNTS_FOLDER.format(uid=uid)]
    with suppress(KeyError):  # in a container, say
        folders.append(os.path.join(pwd.getpwuid(uid).pw_dir, _IN_HOME))
    return folders


def _is_others(path: str, uid: int) -> bool:
    """Whether another account has made what is at a path, which this one can't remove."""
    with suppress(FileNotFoundError):
        return os.lstat(path).st_uid != uid
    return False


def _accounts_secret(inside: int, folder: str, uid: int) -> bytes:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(_ACCOUNTS_FILE, flags, dir_fd=inside), "rb") as file:
        found, path = os.fstat(file.fileno()), f"{folder}/{_ACCOUNTS_FILE}"
        _check_private(path, found, uid)
        if not stat.S_ISREG(found.st_mode) or found.st_size != SECRET_BYTES:
            raise ConfigError(f"{path} is not what p3kv has written there; remove it")
        return file.read(SECRET_BYTES)


def _make_accounts_secret(inside: int) -> None:
    """Makes the file at once with all that is in it, unless another process is quicker."""
    name = f"{_ACCOUNTS_FILE}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with open(os.open(name, flags, 0o600, dir_fd=inside), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        with suppress(FileExistsError):
            os.link(name, _ACCOUNTS_FILE, src_dir_fd=inside, dst_dir_fd=inside)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=inside)


def _check_private(path: str, found: os.stat_result, uid: int) -> None:
    if found.st_uid != uid or found.st_mode & 0o077:
        whose = f"belongs to user {found.st_uid}"
        if found.st_uid == uid:
            whose = f"other users may use (its mode is {stat.S_IMODE(found.st_mode):o})"
        raise ConfigError(
            f"{VARIABLE} is not set, and {path}, where p3kv then keeps what only this account may "
            f"read, {whose}. Remove it, or set {VARIABLE}: {_HOW_TO_MAKE}"
        )


def check_local(hosts: Iterable[Optional[str]], interface: Optional[str]) -> None:
    """Raises ConfigError for a job without a secret that other hosts can reach. `hosts` and
    `interface` say where its processes listen, as far as its user has said so."""
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
