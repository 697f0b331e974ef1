"""The lines of a trace: each is a JSON array, a record's fields in their order.

Times are in nanoseconds of the process's monotonic clock, which other hosts do not share:
`ClockSample` tells how far it is from the scheduler's.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Union

FORMAT = 1
"""Version of the files; to be raised when a record changes."""
UNKNOWN = -1
"""A number that a span does not have."""

FORWARD_BEGIN = "forward begin"
"""A worker's script has begun a forward pass, where its front end knows."""
FORWARD_END = "forward end"
"""A worker's forward pass has computed the loss."""
READY = "ready"
"""The gradient of a key is computed, on a worker."""
SEND = "send"
"""A slice on its way out: since when it is queued, when its first byte was handed to the link, and
when its last. On a worker a gradient, on a server a value."""
RECEIVE = "receive"
"""A slice on its way in, from the end of its header to its last byte."""
SUM = "sum"
"""A server adds a slice to the sum of its round. Of a key of rows also the update."""
UPDATE = "update"
"""A server ends a slice's round: the sum becomes the new value."""
APPLIED = "applied"
"""All of a key's new value is in the worker's array, and the forward pass may use it."""
INSTANTS = (FORWARD_BEGIN, FORWARD_END, READY, APPLIED)
"""Kinds that take no time."""


class Process(NamedTuple):
    """The first record of a file: whose it is."""

    name: str
    """Such as "worker 0"."""
    host: str
    pid: int
    format: int = FORMAT


class KeyName(NamedTuple):
    """Key, name and size that belong to a key's id."""

    key_id: int
    key: Union[int, str]
    """Key as the script knows it."""
    name: Optional[str]
    """The parameter's name, if it is known."""
    size_bytes: int


class ClockSample(NamedTuple):
    """How far the scheduler's clock was ahead of this process's at a time."""

    at_ns: int
    offset_ns: int
    """At most half of `round_trip_ns` wrong."""
    round_trip_ns: int


class Span(NamedTuple):
    """Operation on a slice, or a whole key, from `start_ns` to `end_ns`.

    `since_ns` is when it could have begun. Numbers that it does not have are UNKNOWN.
    """

    kind: str
    key_id: int
    since_ns: int
    start_ns: int
    end_ns: int
    peer: int = UNKNOWN
    """The rank of the server, on a worker; that of the worker, on a server."""
    round: int = UNKNOWN
    step: int = UNKNOWN
    slice: int = UNKNOWN
    priority: int = 0
    """Priority as on the wire: larger goes first."""
    size_bytes: int = 0


Record = Union[Process, KeyName, ClockSample, Span]
PROCESS, KEY, CLOCK = "process", "key", "clock"
"""Beginnings of the other records' lines."""
