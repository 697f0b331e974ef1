"""Everything that p3kv raises.

Every message says what was wrong, where (role, rank, key, round as far as they are known) and
what the reader can do about it.
"""

from __future__ import annotations

from typing import Optional


class P3Error(RuntimeError):
    """Base of all errors of p3kv."""

    role: Optional[str] = None
    """Role of the process that ended the job; None where the error is this process's own."""
    rank: Optional[int] = None
    """Its rank, and the round that it had reached, as far as they are known."""
    round: Optional[int] = None


class ConfigError(P3Error):
    """A setting, an environment variable or the way of starting is wrong."""


class RendezvousError(P3Error):
    """The processes of the job did not find each other in time."""


class KeyMismatchError(P3Error):
    """Workers disagree on a key's shape or dtype, or a key is unknown or declared twice."""


class NotSupportedError(P3Error):
    """A feature of MXNet's KVStore that this version of p3kv does not have."""


class ProtocolError(P3Error):
    """A peer sent something that the protocol does not allow."""


class PeerLostError(P3Error):
    """Another process of the job died, failed or left while it was still needed."""


class ClosedError(P3Error):
    """The store was used after it was closed."""
