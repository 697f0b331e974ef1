"""Why a job ends, in the words that every process says."""

from __future__ import annotations

from msgspec.structs import force_setattr

from p3kv import errors
from p3kv.config import ROLES
from p3kv.errors import P3Error
from p3kv.wire.header import LAST_ROUND
from p3kv.wire.messages.base import MAX_RANK, UNKNOWN, Message, check, check_number

MAX_REASON_CHARS = 4096


class Failure(Message, frozen=True):
    """Why the job ends: the same text in every process."""

    reason: str
    """Cause in one line."""
    role: str
    """Role and rank of the process that the failure is about."""
    rank: int
    round: int = UNKNOWN
    error: str = "PeerLostError"
    """Name of the class in p3kv.errors to raise."""
    hint: str = ""
    """Advice to the user, in whole sentences."""

    @property
    def where(self) -> str:
        """The process that the failure is about, and the round that it had reached."""
        who = self.role if self.rank == UNKNOWN else f"{self.role} {self.rank}"
        return who if self.round == UNKNOWN else f"{who} (round {self.round})"

    @property
    def words(self) -> str:
        """Reason and hint."""
        return f"{self.reason.rstrip('.')}. {self.hint}" if self.hint else self.reason

    def __post_init__(self) -> None:
        # Cut here, and not refused: whoever fails must be able to say so, whatever a peer has sent.
        for name in ("reason", "hint"):
            force_setattr(self, name, getattr(self, name)[:MAX_REASON_CHARS])
        check(self.role in ROLES, f"a failure of the role {self.role!r}")
        check_number("a rank", self.rank, UNKNOWN, MAX_RANK)
        check_number("a round", self.round, UNKNOWN, LAST_ROUND)

    def to_error(self) -> P3Error:
        """The exception that tells the user."""
        error = errors.named(self.error)(f"{self.where}: {self.words}")
        error.brief = f"{self.where}: {self.reason}"
        error.role = self.role
        error.rank = None if self.rank == UNKNOWN else self.rank
        error.round = None if self.round == UNKNOWN else self.round
        return error
