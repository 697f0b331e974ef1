"""Memory that the workers of one host share: each writes its own, and reads the others'."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from typing import Dict, List, Tuple

import numpy as np

from p3kv.errors import ConfigError, ProtocolError
from p3kv.wire.messages import SharedMemory

_EXTENT_BYTES = 64 << 20
"""Small keys share an extent, so that a process needs few descriptors. The system takes memory for
the pages that are written, and not before."""
_ALIGNED_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""An extent keeps its size, whoever has it: who reads behind the end of a file is ended by the
system (SIGBUS)."""


class OwnMemory:
    """This process's memory, in extents that have no name and end with the processes that map them.

    Belongs to one thread.
    """

    def __init__(self) -> None:
        self._descriptors: List[int] = []
        self._extent = np.empty(0, np.uint8)
        self._free_bytes = 0

    def take(self, size_bytes: int) -> Tuple[np.ndarray, SharedMemory]:
        """New memory as bytes, all 0, and where other processes find it."""
        if size_bytes > self._free_bytes:
            self._add_extent(max(size_bytes, _EXTENT_BYTES))
        offset = len(self._extent) - self._free_bytes
        taken = -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._free_bytes = max(0, self._free_bytes - taken)
        place = SharedMemory(os.getpid(), self._descriptors[-1], offset, size_bytes)
        return self._extent[offset : offset + size_bytes], place

    def _add_extent(self, size_bytes: int) -> None:
        descriptor = os.memfd_create("p3kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, size_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._extent = np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8)
        self._free_bytes = size_bytes

    def close(self) -> None:
        """Closes what others open the memory by; what is mapped stays. May be called twice."""
        while self._descriptors:
            os.close(self._descriptors.pop())


class TheirMemory:
    """The memory of other processes of this host, to be read. Belongs to one thread."""

    def __init__(self) -> None:
        self._extents: Dict[Tuple[int, int], np.ndarray] = {}
        """By process and its descriptor."""

    def at(self, place: SharedMemory) -> np.ndarray:
        """The memory as bytes, which can't be written.

        Raises ProtocolError if there is not so much of it, or if it is anything but memory that
        keeps its size; ConfigError where this process can't open what belongs to the other one.
        """
        name = (place.pid, place.descriptor)
        extent = self._extents.get(name)
        if extent is None:
            extent = self._extents[name] = _mapped(f"/proc/{place.pid}/fd/{place.descriptor}")
        end = place.offset + place.size_bytes
        if end > len(extent):
            raise ProtocolError(f"it shares memory up to byte {end}, and has {len(extent)}")
        return extent[place.offset : end]


def _mapped(path: str) -> np.ndarray:
    try:
        # Found, and not opened: to open a FIFO waits for its other end, and a device may act.
        found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"this worker can't open memory of another one on its host ({path}: {error.strerror}). "
            "Set P3KV_LOCAL_AGGREGATION=0 on all workers; each then sends its gradients itself"
        ) from error
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise ProtocolError("what it shares is no memory")
        if status.st_uid != os.geteuid():
            raise ProtocolError(f"it shares memory of user {status.st_uid}")
        memory = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ProtocolError(f"what it shares is no memory: {error}") from error
    finally:
        os.close(found)
    try:
        return _mapped_if_sealed(memory)
    except (OSError, ValueError) as error:
        raise ProtocolError(f"what it shares is no memory: {error}") from error
    finally:
        os.close(memory)


def _mapped_if_sealed(memory: int) -> np.ndarray:
    """Maps all of a descriptor's memory; OSError for a file of another kind."""
    if not fcntl.fcntl(memory, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError("it shares memory that it may take away (without F_SEAL_SHRINK)")
    size_bytes = os.fstat(memory).st_size
    return np.frombuffer(mmap.mmap(memory, size_bytes, prot=mmap.PROT_READ), np.uint8)
