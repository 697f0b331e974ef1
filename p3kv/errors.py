"""Everything that p3kv raises.

Every message says what was wrong, where (role, rank, key, round as far as they are known) and
what the reader can do about it.
"""

from __future__ import annotations

import re
from typing import Optional, Type

_MOST_CHARS = 600
_STACK_TRACE = re.compile(r"^(Original )?Traceback \(most recent call last\):|^Stack trace:", re.M)
_FRAME = re.compile(rf"\s|\[bt\]|{_STACK_TRACE.pattern}")
"""How the lines of a stack trace begin, in Python and in MXNet's C++."""


class P3Error(Exception):
    """Base of all errors of p3kv. None is a RuntimeError: scripts that run out of memory catch
    those and go on, and would do so without the job."""

    role: Optional[str] = None
    """Role of the process that ended the job; None where the error is this process's own."""
    rank: Optional[int] = None
    """The process's rank, if it is known."""
    round: Optional[int] = None
    """The round that the process had reached, if it is known."""
    brief: Optional[str] = None
    """The message without the advice, if another process gives the advice; None: there is none."""


class ConfigError(P3Error):
    """A setting, an environment variable or the way of starting is wrong."""


class RendezvousError(P3Error):
    """The processes of the job did not find each other in time."""


class KeyMismatchError(P3Error):
    """Workers disagree on a key's shape or dtype, or a key is unknown or declared twice."""


class NotSupportedError(P3Error):
    """A feature of MXNet's KVStore that this version of p3kv does not have, or features that can't
    be combined."""


class StatesError(P3Error):
    """Optimizer states can't be saved or loaded: the servers have no optimizer, or the file is none
    or of another training."""


class TraceError(P3Error):
    """A file is no trace, or one that this version does not read."""


class CheckpointError(P3Error):
    """A job can't go on from a checkpoint: none can be used, or it is of another training."""


class ProtocolError(P3Error):
    """A peer sent something that the protocol does not allow."""


class PeerLostError(P3Error):
    """Another process of the job died, failed or left while it was still needed."""


class NotFiniteError(P3Error):
    """A gradient has nan or infinity, and P3KV_CHECK_FINITE ends the job on it."""


class ClosedError(P3Error):
    """The store was used after it was closed."""


def in_one_line(error: BaseException) -> str:
    """An exception as the last line of its traceback has it: "ValueError: boom".

    Messages of MXNet and of data loaders' helpers carry whole stack traces; what is left without
    them is the message.
    """
    name, text = type(error).__name__, str(error)
    lines = text.splitlines()
    if _STACK_TRACE.search(text):
        lines = [line for line in lines if line and not _FRAME.match(line)][-1:] or lines
    text = " ".join(" ".join(lines).split())
    if len(text) > _MOST_CHARS:
        text = f"{text[:_MOST_CHARS]} ... (its own output has the rest)"
    if not text:
        return name
    return text if text.startswith(f"{name}:") else f"{name}: {text}"


def named(name: str) -> Type[P3Error]:
    """The class of errors with this name; P3Error for a name that none has."""
    kind = globals().get(name)
    return kind if isinstance(kind, type) and issubclass(kind, P3Error) else P3Error
