"""Questions of `p3kv doctor` to its helpers on the job's hosts, and their answers, as JSON."""

from __future__ import annotations

from typing import Optional, Union

import msgspec

from p3kv.tools.doctor.findings import Seen


class Look(msgspec.Struct, frozen=True, tag=True):
    """Look at your host, and listen for probes; answered by `Looked`."""

    root_host: str
    token: str
    """Token that probes must show; for this check only."""


class Looked(msgspec.Struct, frozen=True):
    seen: Seen
    port: Optional[int]
    """Where probes connect; None without an address."""


class TellTime(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Time`."""


class Time(msgspec.Struct, frozen=True):
    time_s: float
    """Time of the host's clock, since 1970."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Send single bytes to another helper; answered by `Measured`, in seconds: the fastest round
    trip."""

    address: str
    port: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send to another helper for a third of a second; answered by `Measured`, in bytes a second:
    how much has arrived."""

    address: str
    port: int


class Measured(msgspec.Struct, frozen=True):
    """Number that was measured, or why none was."""

    number: float = 0.0
    problem: str = ""


Question = Union[Look, TellTime, Ping, Send]
