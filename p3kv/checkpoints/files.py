"""Opens and makes files in a folder of checkpoints.

Others may be able to write to the folder, too. So a name is opened once, no link is followed, and
whatever is not a regular file of this user is refused before anything of it is read.
"""

from __future__ import annotations

import io
import os
import secrets
import stat
from contextlib import suppress
from typing import IO, Optional

_PERMISSIONS = 0o644
_KINDS = {
    stat.S_IFLNK: "a link, which is not followed",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class NotOursError(Exception):
    """A name in the folder is not a regular file of this user."""


class OwnFile(io.BufferedReader):
    """A regular file of this user, open for reading; no read takes more memory than allowed."""

    def __init__(self, descriptor: int, size_bytes: int, most_bytes: int) -> None:
        """Takes the descriptor over; `most_bytes` of one call of `read`."""
        super().__init__(io.FileIO(descriptor, "rb"))
        self.size_bytes = size_bytes
        """When it was opened."""
        self._most_bytes = most_bytes

    def read(self, size: Optional[int] = -1) -> bytes:
        """Reads like any file; ValueError for more than allowed."""
        left = max(0, self.size_bytes - self.tell())
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > self._most_bytes:
            raise ValueError(f"it has {wanted} bytes where {self._most_bytes} at most are right")
        return super().read(wanted)


def open_folder(folder: str) -> int:
    """A descriptor of the folder, for the functions below. Raises OSError."""
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def owner_in(folder: int) -> int:
    """Owner of the files that this process makes in the folder, which a network file system may
    change; this process's user where it can't make any."""
    name = f".p3kv-{secrets.token_hex(8)}"
    try:
        descriptor = _make(folder, name)
    except OSError:
        return os.geteuid()
    try:
        return os.fstat(descriptor).st_uid
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)


def open_own(folder: int, name: str, owner: int, most_bytes: int) -> OwnFile:
    """Open a regular file that belongs to `owner`; NotOursError at once for anything else,
    OSError."""
    # Without O_NONBLOCK, the open of a FIFO would wait for somebody who writes to it.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError:
        _check_kind(os.lstat(name, dir_fd=folder))
        raise
    try:
        found = os.fstat(descriptor)
        _check_kind(found)
        if found.st_uid != owner:
            raise NotOursError(f"it belongs to user {found.st_uid} and not to {owner}, this job's")
        return OwnFile(descriptor, found.st_size, most_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def make_anew(folder: int, name: str) -> IO[bytes]:
    """Make a file in place of any of this name, but of none to which a link points. OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
    return os.fdopen(_make(folder, name), "wb")


def _make(folder: int, name: str) -> int:
    """A descriptor, for writing; OSError where anything has the name."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, _PERMISSIONS, dir_fd=folder)


def _check_kind(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise NotOursError(f"it is no file, but {kind}")
